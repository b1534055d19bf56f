"""Steps whose loss or gradient is not finite: find where it began and in which sentences, then stop or skip."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, PyTree

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.files import JsonObject, to_json, write_atomically
from transformer_jax.training.accumulation import split
from transformer_jax.training.loss import LossSpec
from transformer_jax.training.step import loss_sums
from transformer_jax.types import Batch, Params, UserError, first_line

MAX_IN_A_ROW = 10
"""Number of consecutive skipped steps that end a run with `on_divergence` "skip"."""
MAX_REPORTS = 10
"""Maximum number of reports on skipped steps per process. `metrics.jsonl` counts every skipped step."""


@dataclasses.dataclass
class Divergence:
    """The policy `training.on_divergence`."""

    config: Config
    run: RunDir
    rng: Array  # the run's dropout key
    describe_batch: Callable[[int], Sequence[JsonObject]]  # the sentence pairs of global batch i, from 0
    loss: LossSpec

    _last_step = -1
    _in_a_row = 0
    _reports = 0

    def handle(self, step: int, problem: str, batch: Batch, params: Params) -> int:
        """Report a step that is not finite. Stop the run, or return the number of consecutive skipped steps.

        In a run that skips, `params` may be one update newer than the step.
        """
        self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 else 1
        self._last_step = step
        skips, is_over = self.config.training.on_divergence == "skip", self._in_a_row >= MAX_IN_A_ROW
        written = ""
        if not skips or is_over or self._reports < MAX_REPORTS:
            self._reports += 1
            written = self._write_report(step, problem, batch, params)
        if skips and not is_over:
            return self._in_a_row
        count = f" and {self._in_a_row} steps in a row were skipped" if skips else ""
        raise UserError(
            f"training stopped: {problem}{count}; {written}. The checkpoints predate this step. A lower learning rate, "
            "more training.warmup_steps or training.clip_norm 1 may help"
            + ("" if skips else "; if it is rare, training.on_divergence skip leaves such steps out")
        )

    def _write_report(self, step: int, problem: str, batch: Batch, params: Params) -> str:
        """Write the report. Return where the problem began, and the report's path."""
        try:
            found = locate_nonfinite(self.config, params, batch, self.rng, step, self.loss)
        except Exception as error:  # for example out of memory: the step is reported all the same
            found = {"first": f"unknown, because the search failed: {first_line(error)}"}
        path = self.run.path / f"diverged-{step}.json"
        try:
            if jax.process_index() == 0:
                sentences = list(self.describe_batch(step - 1))
                report = {"step": step, "problem": problem, **found, "sentences": sentences}
                write_atomically(path, to_json(report, indent=1) + "\n")
        except UserError as error:
            return f"first: {found['first']} ({error})"
        return f"first: {found['first']}; the full report, with the batch's sentences, is in {path}"


def locate_nonfinite(
    config: Config, params: Params, batch: Batch, dropout_rng: Array, step: int, loss: LossSpec
) -> JsonObject:
    """Compute a training step again. Return the paths of its non-finite parameters, module outputs and gradients.

    Outputs are in the order of the forward pass, gradients in the order of the backward pass. `first` is a phrase
    that names the first non-finite value.
    """
    accumulate = config.training.accumulate
    # Modules are seen one by one only if no scan runs over the layers. Their parameters are the same.
    model = Transformer(dataclasses.replace(config.model, scan_layers=False, remat="none"))
    rng = jax.random.fold_in(dropout_rng, step - 1)
    microbatches = [(batch, rng)]
    if accumulate > 1:
        stacked = split(batch, accumulate), jax.random.split(rng, accumulate)
        microbatches = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(accumulate)]
    loss_is_finite, largest_path, largest = True, "", -1.0
    found: dict[str, list[str]] = {"parameters": [], "outputs": [], "gradients": []}
    for microbatch in microbatches:
        inspection = jax.device_get(inspect_step(params, *microbatch, model, loss))
        loss_is_finite &= bool(np.isfinite(inspection.loss))
        parameters, gradients = (flatten_dict(tree, sep="/") for tree in (inspection.parameters, inspection.gradients))
        found["parameters"] += [path for path, is_finite in parameters.items() if not is_finite]
        calls = [(name.partition(" ")[2], is_finite) for name, is_finite in inspection.outputs.items()]
        found["outputs"] += [path for path, is_finite in calls if not is_finite]
        order = [path for path, _ in calls]  # jax sorts the outputs by the number before the path
        for path, size in sorted(gradients.items(), key=lambda leaf: -_call_index(leaf[0], order)):
            if not np.isfinite(size):
                found["gradients"].append(path)
            elif size > largest:
                largest_path, largest = path, float(size)
    problems = [
        *(f"the parameter {path}" for path in found["parameters"]),
        *(f"the output of {path}" for path in found["outputs"]),
        *([] if loss_is_finite else ["the loss; every module's output is finite"]),
        *(f"the gradient of {path}" for path in found["gradients"]),
        f"every value is finite but a sum is not; the largest gradient is {largest:.3g}, of {largest_path}",
    ]
    return {"first": problems[0], **{kind: list(dict.fromkeys(paths)) for kind, paths in found.items()}}


class Inspection(NamedTuple):
    """What `inspect_step` finds."""

    loss: Array
    parameters: PyTree  # whether each one is finite
    outputs: dict[str, Array]  # whether the output of each call is finite, by number and path: `000003 encoder/layer_0`
    gradients: PyTree  # the largest absolute entry of each one


@partial(jax.jit, static_argnums=(3, 4))
def inspect_step(params: Params, batch: Batch, rng: Array, model: Transformer, loss: LossSpec) -> Inspection:
    """Compute a microbatch as `train_step` does, and look at every value on the way."""

    def loss_and_flags(params: Params) -> tuple[Array, tuple[Array, dict[str, Array]]]:
        flags: dict[str, Array] = {}

        def call(method: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            output = method(*args, **kwargs)
            if context.method_name == "__call__":
                flags[f"{len(flags):06d} {'/'.join(context.module.path)}"] = jnp.isfinite(output).all()
            return output

        with nn.intercept_methods(call):
            sums = loss_sums(model, params, batch, loss, deterministic=False, rngs={"dropout": rng})
        return sums.loss_sum, (sums.loss_sum, flags)

    gradients, (loss_sum, outputs) = jax.grad(loss_and_flags, has_aux=True)(params)
    are_finite = jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), params)
    return Inspection(loss_sum, are_finite, outputs, jax.tree.map(lambda g: jnp.abs(g).max(), gradients))


def _call_index(path: str, calls: Sequence[str]) -> int:
    """Return when the module of a parameter is first called; the end for one that is not, like an output projection."""
    modules = itertools.accumulate(path.split("/")[:-1], "{}/{}".format)
    return ([len(calls)] + [calls.index(module) for module in modules if module in calls])[-1]
