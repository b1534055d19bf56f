"""Attention (paper section 3.2)."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.model.initializers import Initialization, attention_initializer, xavier_uniform


class KeysValues(NamedTuple):
    """Projected keys and values of one attention layer: what a decoder's cache keeps."""

    key: Float[Array, "b s h d_k"]
    value: Float[Array, "b s h d_v"]


def attention_weights(
    query: Float[Array, "b t h d_k"], key: Float[Array, "b s h d_k"], mask: Bool[Array, "#b #h #t s"] | None
) -> Float[Array, "b h t s"]:
    """softmax(Q K^T / sqrt(d_k)) of paper eq. 1, in at least float32.

    Where the mask is False the weight is exactly 0; a query that may attend to nothing has only zeros, never NaN.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=dtype) / math.sqrt(query.shape[-1])
    if mask is None:
        return jax.nn.softmax(scores)
    # A finite number and not -inf: a row of -inf would give NaN here and in the gradient.
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(dtype).min)), 0)


def weighted_sum(weights: Float[Array, "b h t s"], value: Float[Array, "b s h d_v"]) -> Float[Array, "b t h d_v"]:
    """The second product of paper eq. 1, in the dtype of the values."""
    return jnp.einsum("bhts,bshd->bthd", weights.astype(value.dtype), value)


def scaled_dot_product_attention(
    query: Float[Array, "b t h d_k"],
    key: Float[Array, "b s h d_k"],
    value: Float[Array, "b s h d_v"],
    mask: Bool[Array, "#b #h #t s"] | None = None,
) -> Float[Array, "b t h d_v"]:
    """softmax(Q K^T / sqrt(d_k)) V   (paper eq. 1). A row that may attend to nothing gives zeros, never NaN.

    >>> scaled_dot_product_attention(jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 2, 1, 2)), jnp.array([[[[1.0]], [[3.0]]]]))
    Array([[[[2.]]]], dtype=float32)
    """
    return weighted_sum(attention_weights(query, key, mask), value)


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)   (paper section 3.2.2).

    Parameters: `query`, `key` [d_model, h, d_k], `value` [d_model, h, d_v], `output` [h, d_v, d_model].
    """

    d_model: int
    num_heads: int
    d_k: int
    d_v: int
    use_bias: bool = False
    dropout_rate: float = 0.0
    initialization: Initialization = "tensor2tensor"
    dtype: str = "float32"
    param_dtype: str = "float32"

    def setup(self) -> None:
        qk_width, v_width = self.num_heads * self.d_k, self.num_heads * self.d_v
        fused_width = 2 * qk_width + v_width

        def projection(d_head: int) -> nn.DenseGeneral:
            init = attention_initializer(self.initialization, self.d_model, self.num_heads * d_head, fused_width)
            return nn.DenseGeneral((self.num_heads, d_head), use_bias=self.use_bias, kernel_init=init, **self._dtypes)

        self.query, self.key, self.value = projection(self.d_k), projection(self.d_k), projection(self.d_v)
        self.output = nn.DenseGeneral(
            self.d_model,
            axis=(-2, -1),
            use_bias=self.use_bias,
            kernel_init=xavier_uniform(v_width, self.d_model),
            **self._dtypes,
        )
        self.dropout = nn.Dropout(self.dropout_rate)

    @property
    def _dtypes(self) -> dict[str, str]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def __call__(
        self,
        x: Float[Array, "b t d_model"],
        memory: Float[Array, "b s d_model"],
        mask: Bool[Array, "#b #h #t s"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """Queries from `x`, keys and values from `memory` (for self-attention, `x` again)."""
        return self.attend(x, self.keys_values(memory), mask, deterministic=deterministic)

    def keys_values(self, memory: Float[Array, "b s d_model"]) -> KeysValues:
        """Keys and values of `memory`: they may be kept and given to `attend` again."""
        return KeysValues(self.key(memory), self.value(memory))

    def attend(
        self,
        x: Float[Array, "b t d_model"],
        keys_values: KeysValues,
        mask: Bool[Array, "#b #h #t s"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """Queries from `x` over keys and values that are projected already."""
        weights = self.weights(self.query(x), keys_values.key, mask)
        weights = self.dropout(weights, deterministic=deterministic)
        return self.output(weighted_sum(weights, keys_values.value))

    def weights(
        self,
        query: Float[Array, "b t h d_k"],
        key: Float[Array, "b s h d_k"],
        mask: Bool[Array, "#b #h #t s"] | None,
    ) -> Float[Array, "b h t s"]:
        """`attention_weights` as a method, so that `transformer.attention_maps` can look at what it returns."""
        return attention_weights(query, key, mask)
