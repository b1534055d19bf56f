"""Average checkpoints (paper section 6.1: the last 5 for the base model, the last 20 for the big model)."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
import numpy as np

from transformer_jax.checkpoint.checkpoint import checkpoint_steps, load_params, resolve_checkpoint, save_params
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.runtime.files import read_json
from transformer_jax.types import Params, UserError, first_line


def average_params(trees: Iterable[Params]) -> Params:
    """Return the mean of parameter trees, consumed one at a time and summed in float64, in the dtypes of the first."""
    remaining = iter(trees)
    first = next(remaining)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, first)
    total, count = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), first), 1
    del first
    for tree in remaining:
        total, count = jax.tree.map(lambda so_far, leaf: so_far + np.asarray(leaf, np.float64), total, tree), count + 1
    mean: Params = jax.tree.map(lambda leaf, dtype: (leaf / count).astype(dtype), total, dtypes)
    return mean


def choose_steps(run: RunDir, *, last: int | None = None, minutes: float | None = None) -> list[int]:
    """Return the steps of the `last` checkpoints, or of those at most `minutes` older than the newest one."""
    steps = checkpoint_steps(run)
    if minutes is not None:
        if not (steps and minutes >= 0):
            raise UserError(f"{run.path} has the checkpoints {steps}; none can be averaged over {minutes} minutes")
        written = {step: _written_at(run.checkpoints / str(step) / "_CHECKPOINT_METADATA") for step in steps}
        return [step for step in steps if written[steps[-1]] - written[step] <= 60 * minutes]
    if last is None or not 1 <= last <= len(steps):
        raise UserError(f"{run.path} has {len(steps)} checkpoints {steps}; the last {last} cannot be averaged")
    return steps[-last:]


def _written_at(metadata: Path) -> float:
    """Return when a checkpoint was written, in seconds since 1970, as Orbax recorded it."""
    try:
        return float(read_json(metadata)["commit_timestamp_nsecs"]) / 1e9
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{metadata}: does not state when the checkpoint was written: {first_line(error)}") from error


def average_checkpoints(run: RunDir, abstract_params: Params, steps: Sequence[int]) -> list[int]:
    """Write the average of the checkpoints of `steps` to `average/`, and return the steps in ascending order."""
    chosen = sorted(set(steps))
    checkpoints = [resolve_checkpoint(run, str(step)) for step in chosen]  # raises before the work starts
    save_params(run.average, average_params(load_params(checkpoint, abstract_params) for checkpoint in checkpoints))
    return chosen
