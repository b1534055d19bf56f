"""Checkpoint averaging (paper section 6.1: the last 5 for base, the last 20 for big)."""

import jax
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.run.checkpoint import checkpoint_steps, load_params, save_params
from transformer_jax.run.folder import RunFolder
from transformer_jax.types import Params


def average_params(trees: list[Params]) -> Params:
    """The mean of parameter trees, summed in float64, in their own dtype."""

    def mean(*leaves: jax.Array) -> np.ndarray:
        total = sum(np.asarray(leaf, np.float64) for leaf in leaves)
        return np.asarray(total / len(leaves)).astype(leaves[0].dtype)

    return jax.tree.map(mean, *trees)


def average_checkpoints(run: RunFolder, config: ModelConfig, last: int) -> list[int]:
    """Averages the last so many checkpoints of a run into `average/`; returns their steps.

    Raises:
        UserError: there are fewer.
    """
    steps = checkpoint_steps(run)
    if not 1 <= last <= len(steps):
        raise UserError(f"{run.path} has {len(steps)} checkpoints {steps}; the last {last} cannot be averaged")
    chosen = steps[-last:]
    trees = [load_params(run.checkpoints / str(step), config) for step in chosen]
    save_params(run.average, average_params(trees))
    return chosen
