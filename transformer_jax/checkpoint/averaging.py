"""Checkpoint averaging (paper section 6.1: the last 5 for base, the last 20 for big)."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from transformer_jax.checkpoint.checkpoint import (
    checkpoint_steps,
    load_params,
    resolve_checkpoint,
    save_params,
    written_at,
)
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import ModelConfig
from transformer_jax.types import Params, UserError


def average_params(trees: Iterable[Params]) -> Params:
    """The mean of parameter trees, summed in float64 on the host, in the dtypes of the first.

    Takes them one by one: 20 of the big model, beside a training, are more than most devices have room for.
    """
    rest = iter(trees)
    first = next(rest)
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, first)
    total, count = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), first), 1
    del first
    for tree in rest:
        total, count = jax.tree.map(lambda so_far, leaf: so_far + np.asarray(leaf, np.float64), total, tree), count + 1
    mean: Params = jax.tree.map(lambda leaf, dtype: (leaf / count).astype(dtype), total, dtypes)
    return mean


def choose_steps(run: RunDir, *, last: int | None = None, minutes: float | None = None) -> list[int]:
    """The steps of the last checkpoints: so many, or those of a time before the last one.

    Raises:
        UserError: there are fewer, or none.
    """
    steps = checkpoint_steps(run)
    if minutes is not None:
        if not (steps and minutes >= 0):
            raise UserError(f"{run.path} has the checkpoints {steps}; of {minutes} minutes none can be averaged")
        written = {step: written_at(run, step) for step in steps}
        return [step for step in steps if written[steps[-1]] - written[step] <= 60 * minutes]
    if last is None or not 1 <= last <= len(steps):
        raise UserError(f"{run.path} has {len(steps)} checkpoints {steps}; the last {last} cannot be averaged")
    return steps[-last:]


def average_checkpoints(run: RunDir, config: ModelConfig, steps: Sequence[int]) -> list[int]:
    """Averages the checkpoints of these steps into `average/`; returns the steps, ascending.

    Raises:
        UserError: there is no such checkpoint.
    """
    chosen = sorted(set(steps))
    checkpoints = [resolve_checkpoint(run, str(step)) for step in chosen]  # what is missing is found before the work
    save_params(run.average, average_params(load_params(checkpoint, config) for checkpoint in checkpoints))
    return chosen
