"""Embeddings and logits (paper section 3.4)."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.model.initializers import Initialization, embedding_initializer


class OutputWeights(NamedTuple):
    """The pre-softmax linear transformation."""

    table: Float[Array, "v d_model"]
    bias: Float[Array, " v"] | None


def logits_from(x: Float[Array, "*positions d_model"], output: OutputWeights) -> Float[Array, "*positions v"]:
    """x E^T + b, in at least float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    logits = jnp.einsum("...d,vd->...v", x, output.table.astype(x.dtype), preferred_element_type=dtype)
    if output.bias is None:
        return logits
    return logits + output.bias.astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,))


class Embedding(nn.Module):
    """A table of `rows` vectors; section 3.4 multiplies by sqrt(d_model) where it embeds, not in the logits."""

    rows: int
    d_model: int
    scale: bool = True
    initialization: Initialization = "tensor2tensor"
    dtype: str = "float32"
    param_dtype: str = "float32"

    def setup(self) -> None:
        init = embedding_initializer(self.initialization, self.rows, self.d_model)
        self.table = self.param("table", init, (self.rows, self.d_model), jnp.dtype(self.param_dtype))

    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t d_model"]:
        """The vectors of the tokens."""
        vectors = jnp.take(self.table, tokens, axis=0).astype(self.dtype)
        return vectors * math.sqrt(self.d_model) if self.scale else vectors
