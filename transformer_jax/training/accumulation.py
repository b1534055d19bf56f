"""Gradient accumulation: compute sums over a batch one microbatch at a time, to hold less in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def split(tree: Any, num_microbatches: int) -> Any:
    """Split the first axis of every array into two: microbatch, row of the microbatch.

    Microbatch i has rows i, i + num_microbatches, ..., so that rows stay on their device when the axis is sharded.

    Args:
        tree: Arrays whose first axis is a multiple of `num_microbatches`.
        num_microbatches: Number of microbatches.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, num_microbatches, *x.shape[1:]), 0, 1), tree)


def merge(tree: Any) -> Any:
    """Undo `split`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def accumulate(function: Callable[[Any], tuple[Any, Any]], microbatches: Any) -> tuple[Any, Any]:
    """Apply a function to each microbatch in turn and sum its first result.

    Args:
        function: Maps one microbatch to (what to sum, what to stack).
        microbatches: A tree of arrays whose first axis is the microbatch, as `split` returns it.

    Returns:
        The sums, at least float32, and the stacked second results.
    """

    def add(total: Any, microbatch: Any) -> tuple[Any, Any]:
        terms, result = function(microbatch)
        return jax.tree.map(jnp.add, total, terms), result

    terms, _ = jax.eval_shape(function, jax.tree.map(lambda x: x[0], microbatches))
    return jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x)), terms), microbatches)


def sum_dtype(x: Any) -> Any:
    """Return the dtype to sum in: at least float32 for floats, unchanged otherwise."""
    return jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
