"""Linear maps, whose matrices decoding may round to 8 bits."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

from transformer_jax.types import Params


class Int8Matrix(NamedTuple):
    """A matrix W [n, v] rounded to 8 bits: W[i, j] is about values[j, i] * scale[j]."""

    values: Int8[Array, "v n"]
    """Integers from -127 to 127. Outputs come first: XLA's integer product on CPUs is fast in this layout only."""
    scale: Float[Array, " v"]


def quantize(matrix: Float[Array, "n v"]) -> Int8Matrix:
    """Round a matrix to 8 bits with one scale per output (column). No entry is off by more than half its scale.

    >>> quantize(jnp.array([[0.5, 0.0], [-1.27, 0.0]])).values.tolist()
    [[50, -127], [0, 0]]
    """
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    values, scale = _round_rows(matrix.T)
    return Int8Matrix(values, scale[:, 0])


def matmul(
    x: Float[Array, "rows n"], matrix: Float[Array, "n v"] | Int8Matrix, dtype: DTypeLike | None = None
) -> Float[Array, "rows v"]:
    """Return x W in `dtype`, by default the dtype of x. With an `Int8Matrix`, x is also rounded to 8 bits."""
    dtype = x.dtype if dtype is None else dtype
    if not isinstance(matrix, Int8Matrix):
        return jnp.matmul(x, matrix, preferred_element_type=dtype)
    values, scale = _round_rows(x.astype(matrix.scale.dtype))
    if is_single := len(values) == 1:
        values = jnp.pad(values, ((0, 1), (0, 0)))  # XLA's fast integer product on CPUs needs at least two rows
    y = jax.lax.dot_general(values, matrix.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return ((y[:1] if is_single else y).astype(scale.dtype) * scale * matrix.scale[None]).astype(dtype)


def _round_rows(rows: Float[Array, "r n"]) -> tuple[Int8[Array, "r n"], Float[Array, "r 1"]]:
    """Return each row as integers from -127 to 127, and the factor that maps them back."""
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    scale = jnp.where(largest > 0, largest / 127, 1)
    return jnp.round(rows / scale).astype(jnp.int8), scale


class Linear(nn.Module):
    """Compute x W + b over the last axes of x.

    Parameters: `kernel` [*inputs, *features], or an `Int8Matrix` (see `prepare_linear_maps`); `bias` [*features].
    """

    features: tuple[int, ...]
    kernel_init: Initializer
    num_inputs: int = 1
    """Number of axes of x that the product sums over."""
    use_bias: bool = True
    dtype: DTypeLike = "float32"
    param_dtype: DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return x W + b in `dtype`."""
        first = x.ndim - self.num_inputs
        batch, inputs, x = x.shape[:first], x.shape[first:], x.astype(self.dtype)
        matrix: Array | Int8Matrix | None = self.get_variable("params", "kernel")
        if isinstance(matrix, Int8Matrix):
            y = matmul(x.reshape(-1, math.prod(inputs)), matrix).reshape(*batch, *self.features)
        else:
            kernel = self.param("kernel", self.kernel_init, (*inputs, *self.features), jnp.dtype(self.param_dtype))
            axes = tuple(range(first, x.ndim)), tuple(range(self.num_inputs))
            y = jax.lax.dot_general(x, kernel.astype(self.dtype), (axes, ((), ())))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, self.features, jnp.dtype(self.param_dtype))
            y += bias.astype(self.dtype).reshape((1,) * first + self.features)
        return y


def concatenate_linear_maps(maps: Sequence[Params]) -> Params:
    """Concatenate the parameters of linear maps with the same input into those of one map."""
    kernel = jnp.concatenate([part["kernel"].reshape(len(part["kernel"]), -1) for part in maps], axis=1)
    if "bias" not in maps[0]:
        return {"kernel": kernel}
    return {"kernel": kernel, "bias": jnp.concatenate([part["bias"].reshape(-1) for part in maps])}


def prepare_linear_maps(params: Params, dtype: DTypeLike, *, int8: bool) -> Params:
    """Return parameters whose linear maps are in `dtype`, with kernels in 8 bits if `int8`; others stay unchanged."""
    prepared = {}
    for name, value in params.items():
        if not isinstance(value, Mapping):
            prepared[name] = value
        elif "kernel" not in value:
            prepared[name] = prepare_linear_maps(value, dtype, int8=int8)
        else:
            prepared[name] = {key: leaf.astype(dtype) for key, leaf in value.items()}
            if int8:
                kernel = value["kernel"]  # the output projection of an attention reads two axes, h and d_v
                rows = math.prod(kernel.shape[:2]) if name == "output" else kernel.shape[0]
                prepared[name]["kernel"] = quantize(kernel.reshape(rows, -1))
    return prepared
