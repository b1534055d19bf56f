"""A sum over parts of a batch that are computed one after the other, to hold less at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def split(tree: Any, num_parts: int) -> Any:
    """The first axis of every array becomes two, part and place; `num_parts` divides it.

    Part i has elements i, i + num_parts, ...: neighbours stay on their device when the axis is sharded.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, num_parts, *x.shape[1:]), 0, 1), tree)


def join(tree: Any) -> Any:
    """The reverse of `split`."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), tree)


def sum_over(function: Callable[[Any], tuple[Any, Any]], parts: Any) -> tuple[Any, Any]:
    """Of each part `function` gives (what to add up, what to keep): the sums, at least float32, and all that is kept.

    Args:
        function: called with one part: the tree `parts` less its first axis.
        parts: a tree of arrays whose first axis is the part, such as `split` gives.
    """

    def add(total: Any, part: Any) -> tuple[Any, Any]:
        more, kept = function(part)
        return jax.tree.map(jnp.add, total, more), kept

    terms, _ = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))
    return jax.lax.scan(add, jax.tree.map(lambda x: jnp.zeros(x.shape, sum_dtype(x)), terms), parts)


def sum_dtype(x: Any) -> Any:
    """Sums of floats are kept in at least float32."""
    return jnp.promote_types(x.dtype, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
