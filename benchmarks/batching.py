"""Compare training on bucketed and on packed batches of one corpus: seconds per million tokens, and compilation.

python -m benchmarks.batching --sizes small --corpora multi30k
"""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common import Output, Side, SideError, comma_list, comparison, parser, take_turns
from benchmarks.sizes import SIZES

Answer = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each corpus and size. A ratio above 1 means that packed batches are faster."""
    flags = parser(__doc__.splitlines()[0], rounds=5)
    flags.add_argument("--corpora", type=comma_list, default=["multi30k", "wmt"])
    flags.add_argument("--sizes", type=comma_list, default=["small"], help=", ".join(SIZES))
    flags.add_argument("--batch-tokens", type=int, default=4_096, help="of a batch, on each side")
    flags.add_argument("--pairs", type=int, default=29_000, help="sentence pairs of a corpus")
    flags.add_argument("--max-shapes", type=int, default=12, help="of bucketed batches")
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = flags.parse_args(arguments)
    output, good = Output(options.output), True
    for corpus in options.corpora:
        for size in options.sizes:
            name = f"{corpus} {size} {options.dtype} packed vs bucketed"
            spec = {"corpus": corpus, "size": size, "dtype": options.dtype, "device": options.device}
            spec |= {"batch_tokens": options.batch_tokens, "pairs": options.pairs, "max_shapes": options.max_shapes}
            spec["malloc"] = not options.no_malloc_tuning
            target = "benchmarks.batching:train"
            try:
                with (
                    Side(target, {**spec, "batching": "bucketed"}) as bucketed,
                    Side(target, {**spec, "batching": "packed"}) as packed,
                ):
                    turns = take_turns({"packed": packed, "bucketed": bucketed}, options.rounds, options.turn_seconds)
                    figures = comparison(turns["packed"], turns["bucketed"])
                    info = {"ours_info": packed.info, "peer_info": bucketed.info}
            except SideError as error:
                output.skip("batching", name, error)
                good = False
                continue
            figures |= {
                "peer": "bucketed",
                "unit": "1,000,000 tokens",
                "malloc_tuned": info["ours_info"]["malloc_tuned"],
            }
            output.write("batching", name, {**spec, **figures, **info})
    return 0 if good else 1


def train(spec: Mapping[str, Any]) -> tuple[Answer, Callable[[Answer], Answer]]:
    """Run training steps on the batches of a plan, in its order, with each shape compiled ahead of time.

    A unit of work is one batch. The seconds are per million tokens, padding not counted.
    """
    from functools import partial

    import jax

    from benchmarks.corpora import count_tokens, make_corpus, make_plan
    from transformer_jax.config import ModelConfig, TrainingConfig
    from transformer_jax.data.loader import TrainingData
    from transformer_jax.model.transformer import Transformer
    from transformer_jax.training.optimizer import make_optimizer
    from transformer_jax.training.step import dropout_rng, init_rng, init_state, train_step

    config = ModelConfig(**SIZES[spec["size"]].model(dtype=spec["dtype"]))
    encoded = make_corpus(spec["corpus"], spec["pairs"], config.vocab_size)
    plan = make_plan(spec["batching"], encoded, spec["batch_tokens"], spec["max_shapes"])
    data = TrainingData(encoded, plan, config)
    model, optimizer = Transformer(config), make_optimizer(TrainingConfig(), config.d_model)
    state = jax.jit(partial(init_state, model, optimizer))(init_rng(0))
    step = jax.jit(partial(train_step, model=model, optimizer=optimizer), donate_argnums=0)
    rng = dropout_rng(0)

    def shape(batch: Any) -> tuple[int, ...]:
        return (*batch.src.shape, batch.tgt_out.shape[1])

    compiled, tokens, positions, flops = {}, 0, 0, 0.0
    compile_seconds = 0.0
    for batch in data.iterator(0, plan.batches_per_epoch):
        if shape(batch) not in compiled:
            started = time.perf_counter()
            compiled[shape(batch)] = step.lower(state, batch, rng).compile()
            compile_seconds += time.perf_counter() - started
        flops += compiled[shape(batch)].cost_analysis()["flops"]
        tokens += count_tokens(batch)
        positions += batch.src.size + batch.tgt_out.size
    batches = data.iterator(0, 1000 * plan.batches_per_epoch)  # more than is ever asked for

    def turn(command: Answer) -> Answer:
        nonlocal state
        count, start = 0, time.perf_counter()
        for _ in range(command["units"]):
            batch = next(batches)
            state, metrics = compiled[shape(batch)](state, batch, rng)
            count += count_tokens(batch)
        jax.block_until_ready((state, metrics))
        seconds = time.perf_counter() - start
        return {"seconds": 1e6 * seconds / count, "unit_seconds": seconds / command["units"]}

    info = {"shapes": len(compiled), "compile_seconds": round(compile_seconds, 2)}
    info["megaflops_per_token"] = round(flops / tokens / 1e6, 3)
    return info | {"padding_share": round(1 - tokens / positions, 4), "batches_per_epoch": plan.batches_per_epoch}, turn


if __name__ == "__main__":
    sys.exit(main())
