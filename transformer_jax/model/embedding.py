"""Embeddings and logits (paper section 3.4)."""

import math

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.model.initializers import Initialization, embedding_initializer


def logits_from(x: Float[Array, "b t d_model"], table: Float[Array, "v d_model"]) -> Float[Array, "b t v"]:
    """x E^T, the pre-softmax linear transformation, in at least float32."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("btd,vd->btv", x, table.astype(x.dtype), preferred_element_type=dtype)


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

    def logits(self, x: Float[Array, "b t d_model"]) -> Float[Array, "b t v"]:
        """The pre-softmax linear transformation, with the same table."""
        return logits_from(x, self.table)
