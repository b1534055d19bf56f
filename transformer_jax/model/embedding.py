"""Embeddings and the pre-softmax linear transformation (paper section 3.4)."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from transformer_jax.model.initializers import Initialization, embedding_initializer
from transformer_jax.types import UserError


class Unembedding(NamedTuple):
    """Parameters of the pre-softmax linear transformation."""

    table: Float[Array, "v d_model"]
    bias: Float[Array, " v"] | None


def embed(
    table: Float[Array, "v d_model"], tokens: Int[Array, "*n"], *, scale: bool, dtype: DTypeLike
) -> Float[Array, "*n d_model"]:
    """Return the rows of the table, multiplied by sqrt(d_model) if `scale` (paper section 3.4)."""
    for array in (table, tokens):
        mesh = jax.typeof(array).sharding.mesh
        if any(axis_type == AxisType.Explicit for axis_type in mesh.axis_types):
            raise UserError(
                f"the model's inputs are sharded over a mesh with Explicit axes {mesh.axis_names}, but XLA has to find "
                f"the model's shardings. Pass axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)} to "
                "jax.make_mesh, or wrap the call in jax.sharding.auto_axes."
            )
    vectors = jnp.take(table, tokens, axis=0).astype(dtype)
    return vectors * math.sqrt(table.shape[1]) if scale else vectors


def unembed(x: Float[Array, "*n d_model"], unembedding: Unembedding) -> Float[Array, "*n v"]:
    """Return the logits x E^T + b in at least float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("...d,vd->...v", x, unembedding.table.astype(x.dtype), preferred_element_type=dtype)
    if unembedding.bias is None:
        return logits
    return logits + unembedding.bias.astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Embedding(nn.Module):
    """A `table` [rows, d_model] whose rows are multiplied by sqrt(d_model) on lookup, but not in the logits."""

    rows: int
    d_model: int
    scale: bool = True
    initialization: Initialization = "tensor2tensor"
    dtype: DTypeLike = "float32"
    param_dtype: DTypeLike = "float32"

    def setup(self) -> None:
        """Create the table."""
        init = embedding_initializer(self.initialization, self.rows, self.d_model)
        self.table = self.param("table", init, (self.rows, self.d_model), jnp.dtype(self.param_dtype))

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d_model"]:
        """Return the vectors of the tokens."""
        return embed(self.table, tokens, scale=self.scale, dtype=self.dtype)
