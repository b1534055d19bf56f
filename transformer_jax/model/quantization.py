"""Matrices rounded to 8 bits: a quarter of the memory traffic, which is most of what decoding waits for on a CPU."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8


class Int8Matrix(NamedTuple):
    """W [n, v], nearly: W[i, j] = values[j, i] * scale[j]."""

    values: Int8[Array, "v n"]
    """-127 to 127. Outputs first: XLA's integer product on CPUs is fast in this layout alone."""
    scale: Float[Array, "v"]


def quantize(matrix: Float[Array, "n v"]) -> Int8Matrix:
    """Symmetric, with a scale for each output (column): no entry is off by more than half its scale.

    >>> quantize(jnp.array([[0.5, 0.0], [-1.27, 0.0]])).values.tolist()
    [[50, -127], [0, 0]]
    """
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    values, scale = _rounded(matrix.T)
    return Int8Matrix(values, scale[:, 0])


def times(
    x: Float[Array, "rows n"], matrix: Float[Array, "n v"] | Int8Matrix, dtype: DTypeLike | None = None
) -> Float[Array, "rows v"]:
    """x W, in `dtype` (None: that of `x`).

    For an `Int8Matrix` each row of x is rounded to 8 bits too, with a scale of its own: the products are of integers.
    """
    dtype = x.dtype if dtype is None else dtype
    if not isinstance(matrix, Int8Matrix):
        return jnp.matmul(x, matrix, preferred_element_type=dtype)
    values, scale = _rounded(x.astype(matrix.scale.dtype))
    if alone := len(values) == 1:
        values = jnp.pad(values, ((0, 1), (0, 0)))  # XLA's fast product on CPUs begins at two rows
    y = jax.lax.dot_general(values, matrix.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return ((y[:1] if alone else y).astype(scale.dtype) * scale * matrix.scale[None]).astype(dtype)


def _rounded(rows: Float[Array, "r n"]) -> tuple[Int8[Array, "r n"], Float[Array, "r 1"]]:
    """Each row as integers from -127 to 127 and what to multiply them by."""
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(rows / scale).astype(jnp.int8), scale
