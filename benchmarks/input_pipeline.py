"""Compare the batches per second of the input pipeline with those that training needs; report padding and shapes.

python -m benchmarks.input_pipeline --corpora multi30k,wmt --sizes tiny,small,base
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common import Output, Side, SideError, comma_list, comparison, parser, take_turns
from benchmarks.sizes import SIZES

Answer = dict[str, Any]
SENTENCES = {"multi30k": 29_000, "wmt": 200_000}


def main(arguments: list[str] | None = None) -> int:
    """Print one line for each corpus, batching and size of the model that trains."""
    flags = parser(__doc__.splitlines()[0], rounds=5)
    flags.add_argument("--corpora", type=comma_list, default=["multi30k", "wmt"], help=", ".join(SENTENCES))
    flags.add_argument("--batching", type=comma_list, default=["bucketed", "packed"])
    flags.add_argument("--sizes", type=comma_list, default=["tiny", "small", "base"], help=", ".join(SIZES))
    flags.add_argument("--batch-tokens", type=int, default=25_000, help="of a batch, on each side")
    flags.add_argument("--pairs", type=int, help="sentence pairs of a corpus")
    options = flags.parse_args(arguments)
    output = Output(options.output)
    good = True
    for corpus in options.corpora:
        for batching in options.batching:
            try:
                _measure(corpus, batching, options, output)
            except SideError as error:
                output.skip("input_pipeline", f"{corpus} {batching}", error)
                good = False
    return 0 if good else 1


def _measure(corpus: str, batching: str, options: argparse.Namespace, output: Output) -> None:
    spec = {"corpus": corpus, "batching": batching, "batch_tokens": options.batch_tokens, "device": options.device}
    spec |= {"pairs": options.pairs or SENTENCES[corpus], "malloc": not options.no_malloc_tuning}
    with Side("benchmarks.input_pipeline:pipeline", spec) as pipeline:
        for size in options.sizes:
            step_spec = {"size": size, "device": options.device, "malloc": spec["malloc"]}
            with Side("benchmarks.training_sides:ours", step_spec) as step:
                turns = take_turns({"pipeline": pipeline, "step": step}, options.rounds, options.turn_seconds)
                info, tokens = pipeline.info, step.info["tokens"]
            # Batches differ in size, so a thousand tokens are the unit.
            ours = [1000 * seconds / info["tokens_per_batch"] for seconds in turns["pipeline"]]
            consumer = [1000 * seconds / tokens for seconds in turns["step"]]
            figures = {
                **spec, **comparison(ours, consumer), "peer": f"training step of {size}", "unit": "1000 tokens",
                "batches_per_second": float(f"{1 / sorted(turns['pipeline'])[options.rounds // 2]:.4g}"), **info,
            }  # fmt: skip
            output.write("input_pipeline", f"{corpus} {batching} vs {size}", figures)


def pipeline(spec: Mapping[str, Any]) -> tuple[Answer, Callable[[Answer], Answer]]:
    """The side of `TrainingData.iterator`: `spec` has `corpus`, `pairs`, `batching`, `batch_tokens`."""
    from benchmarks.corpora import count_tokens, entropy, make_corpus, make_plan
    from transformer_jax.config import ModelConfig
    from transformer_jax.data.loader import TrainingData

    model = ModelConfig()
    encoded = make_corpus(spec["corpus"], spec["pairs"], model.vocab_size)
    started = time.perf_counter()
    plan = make_plan(spec["batching"], encoded, spec["batch_tokens"])
    plan_seconds = time.perf_counter() - started
    data = TrainingData(encoded, plan, model)

    # Whole epochs, so many that the frequencies of what follows what say something.
    epochs = -(-spec.get("counted_batches", 2_000) // plan.batches_per_epoch)
    shapes, tokens, positions = [], 0, 0
    for number, batch in enumerate(data.iterator(0, epochs * plan.batches_per_epoch)):
        shapes.append((*batch.src.shape, batch.tgt_out.shape[1]))
        if number < plan.batches_per_epoch:
            tokens += count_tokens(batch)
            positions += batch.src.size + batch.tgt_out.size
    of_shapes = entropy(shapes[:-1])
    info = {
        "plan_seconds": round(plan_seconds, 3),
        "batches_per_epoch": plan.batches_per_epoch,
        "shapes": len(set(shapes)),
        "padding_share": round(1 - tokens / positions, 4),
        "tokens_per_batch": tokens / plan.batches_per_epoch,
        # Sorted batches have none of the second: what comes next is known from what was.
        "shape_entropy_bits": round(of_shapes, 3),
        "shape_entropy_given_previous_bits": round(entropy(itertools.pairwise(shapes)) - of_shapes, 3),
        "order_bits": round(plan.order_bits),
    }

    def turn(command: Answer) -> Answer:
        # Whole epochs: batches of all shapes.
        epochs = -(-command["units"] // plan.batches_per_epoch)
        start = time.perf_counter()
        count = sum(1 for _ in data.iterator(0, epochs * plan.batches_per_epoch))
        return {"seconds": (time.perf_counter() - start) / count}

    return info, turn


if __name__ == "__main__":
    sys.exit(main())
