"""Gradient accumulation: compute sums over a batch one microbatch at a time, to hold less in memory."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

Tree = TypeVar("Tree")
Sums = TypeVar("Sums")
Rows = TypeVar("Rows")


def split(tree: Tree, num_microbatches: int) -> Tree:
    """Split the first axis of every array, a multiple of `num_microbatches`, into two: microbatch, row of it.

    Microbatch i has rows i, i + num_microbatches, ..., so that rows stay on their device when the axis is sharded.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, num_microbatches, *x.shape[1:]), 0, 1), tree)


def merge(tree: Tree) -> Tree:
    """Undo `split`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def accumulate(function: Callable[[Tree], tuple[Sums, Rows]], microbatches: Tree) -> tuple[Sums, Rows]:
    """Apply a function to each microbatch of `split`. Sum its first results, in float32 or wider; stack its second."""

    def add(total: Sums, microbatch: Tree) -> tuple[Sums, Rows]:
        terms, result = function(microbatch)
        return jax.tree.map(jnp.add, total, terms), result

    terms, _ = jax.eval_shape(function, jax.tree.map(lambda x: x[0], microbatches))
    return jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x)), terms), microbatches)


def sum_dtype(x: Array | jax.ShapeDtypeStruct) -> jnp.dtype:
    """Return the dtype to sum in: at least float32 for floats, unchanged otherwise."""
    return jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
