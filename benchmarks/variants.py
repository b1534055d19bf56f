"""Compare choices of the training step with the defaults, in alternation, in one process.

python -m benchmarks.variants --sizes base --vary dropout_generator=hash,threefry --vary loss_chunk_mb=64,1024
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.common import Output, Side, SideError, comma_list, comparison, parser, take_turns
from benchmarks.sizes import SIZES, random_batch

Answer = dict[str, Any]
DEFAULTS = "defaults"


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each choice. A ratio above 1 means that it is faster than the defaults."""
    flags = parser(__doc__.splitlines()[0], rounds=5)
    flags.add_argument("--sizes", type=comma_list, default=["small"], help=", ".join(SIZES))
    flags.add_argument("--vary", action="append", default=[], metavar="FIELD=VALUE,VALUE",
                       help="a field of ModelConfig or TrainingConfig")  # fmt: skip
    flags.add_argument("--rows", type=int)
    flags.add_argument("--length", type=int)
    flags.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags.add_argument("--check-kernels", action="store_true", help="attention_kernel xla and auto: equal results?")
    options = flags.parse_args(arguments)
    variants: dict[str, dict[str, Any]] = {DEFAULTS: {}}
    for text in options.vary:
        field, _, values = text.partition("=")
        for value in values.split(","):
            variants[f"{field}={value}"] = {field: _value(value)}
    output = Output(options.output)
    found = [_measure(size, variants, options, output) for size in options.sizes]
    return 0 if all(found) else 1


def _value(text: str) -> Any:
    if text.lstrip("-").isdigit():
        return int(text)
    return {"true": True, "false": False}.get(text.lower(), text)


class _View:
    """Return one variant of a side as a side."""

    def __init__(self, side: Side, name: str) -> None:
        self._side, self._name = side, name

    def ask(self, **command: Any) -> Answer:
        return self._side.ask(variant=self._name, **command)


def _measure(size: str, variants: dict[str, Any], options: argparse.Namespace, output: Output) -> bool:
    spec = {"size": size, "rows": options.rows, "length": options.length, "device": options.device}
    spec |= {"malloc": not options.no_malloc_tuning, "dtype": options.dtype}
    label = f"{size} {options.dtype}" + (f" {options.rows}x{options.length}" if options.rows else "")
    try:
        with Side("benchmarks.variants:build", {**spec, "variants": variants}) as side:
            for name, reason in side.info["failed"].items():
                output.skip("variants", f"{label} {name}", reason)
            views: dict[str, Any] = {name: _View(side, name) for name in side.info["built"]}
            if DEFAULTS not in views:
                raise SideError("the defaults could not be built")
            turns = take_turns(views, options.rounds, options.turn_seconds)
            for name in turns:
                figures = {**spec, "variant": name, **comparison(turns[name], turns[DEFAULTS]), "peer": DEFAULTS}
                figures |= {"malloc_tuned": side.info["malloc_tuned"], "ours_info": side.info["built"][name]}
                output.write("variants", f"{label} {name}", figures)
            if options.check_kernels:
                output.write("variants", f"{label} kernels", {**spec, "kernels": side.ask(check="kernels")})
    except SideError as error:
        output.skip("variants", label, error)
        return False
    return not side.info["failed"]


def build(spec: Mapping[str, Any]) -> tuple[Answer, Callable[[Answer], Answer]]:
    """All variants, each with a state of its own. `spec` is that of `training_sides.ours`, with `variants`."""
    from benchmarks.training_sides import ours

    built, turns, failed = {}, {}, {}
    for name, changes in spec["variants"].items():
        try:
            built[name], turns[name] = ours({**spec, "choices": {"dtype": spec["dtype"], **changes}})
        except Exception as error:  # one choice fails: the parent reports it, and measures the others
            failed[name] = f"{type(error).__name__}: {error}"[:300]

    def turn(command: Answer) -> Answer:
        if command.get("check") == "kernels":
            return check_kernels(spec)
        return turns[command["variant"]](command)

    return {"built": built, "failed": failed}, turn


def check_kernels(spec: Mapping[str, Any]) -> Answer:
    """How far logits and gradients in bfloat16 are from those in float32 (relative L2), with each attention kernel.

    A kernel is as good as another if it is as near to float32; two that round differently are not equal in bfloat16.
    """
    import jax
    import jax.numpy as jnp

    from transformer_jax.config import ModelConfig
    from transformer_jax.model.transformer import Transformer

    size = SIZES[spec["size"]]
    config = ModelConfig(**size.model(residual_dropout=0.0))
    rows, length = min(8, spec.get("rows") or size.rows), spec.get("length") or size.length
    src, tgt_in, tgt_out = (jnp.asarray(side) for side in random_batch(size.vocab_size, rows, length))
    params = jax.jit(Transformer(config).init)(jax.random.key(0), src[:1], tgt_in[:1])["params"]
    real = (tgt_out != config.pad_id)[..., None]

    def outputs(kernel: str, dtype: str) -> dict[str, jax.Array]:
        model = Transformer(dataclasses.replace(config, attention_kernel=kernel, dtype=dtype))

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = jnp.where(real, model.apply({"params": params}, src, tgt_in, deterministic=True), 0)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tgt_out[..., None], axis=-1)
            return -jnp.where(real, chosen, 0).sum(), logits

        grads, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
        return {
            "logits": logits.ravel(),
            "gradients": jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grads)]),
        }

    exact, answer = outputs("xla", "float32"), {}
    for kernel in ("xla", "auto"):
        found = outputs(kernel, "bfloat16")
        answer[kernel] = {
            name: float(jnp.linalg.norm(found[name].astype(jnp.float32) - exact[name]) / jnp.linalg.norm(exact[name]))
            for name in exact
        }
    answer["equal"] = all(answer["auto"][name] <= 1.5 * answer["xla"][name] for name in exact)
    return answer


if __name__ == "__main__":
    sys.exit(main())
