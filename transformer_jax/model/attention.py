"""Attention (paper section 3.2)."""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.errors import UserError
from transformer_jax.model.initializers import Initialization, attention_initializer, xavier_uniform

AttentionKernel = Literal["auto", "xla", "cudnn"]


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
    kernel: AttentionKernel = "xla",
) -> Float[Array, "b t h d_v"]:
    """softmax(Q K^T / sqrt(d_k)) V   (paper eq. 1). A row that may attend to nothing gives zeros, never NaN.

    Args:
        query, key, value, mask: as in the paper; True = may attend.
        kernel: xla: the two functions above. cudnn: NVIDIA's fused kernel, which never writes the weights to memory.
            auto: cudnn where `fits_cudnn`.

    Raises:
        UserError: cudnn was asked for and cannot compute this.

    >>> scaled_dot_product_attention(jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 2, 1, 2)), jnp.array([[[[1.0]], [[3.0]]]]))
    Array([[[[2.]]]], dtype=float32)
    """
    fits = fits_cudnn(query, key, value)
    if kernel == "cudnn" and not fits:
        raise UserError(
            f"model.attention_kernel is 'cudnn' and the queries are {query.dtype} of shape {query.shape}, on "
            f"{jax.default_backend()}: it needs an NVIDIA GPU, bfloat16, even lengths and heads of at most 128, a "
            "multiple of 8"
        )
    if kernel == "xla" or not fits:
        return weighted_sum(attention_weights(query, key, mask), value)
    return _fused_attention(query, key, value, mask, "cudnn")


def fits_cudnn(
    query: Float[Array, "b t h d_k"], key: Float[Array, "b s h d_k"], value: Float[Array, "b s h d_v"]
) -> bool:
    """Whether cuDNN's kernel is there and has a gradient for these dtypes and shapes."""
    t, d_k, s, d_v = query.shape[1], query.shape[3], *value.shape[1::2]
    is_even = t % 2 == 0 and s % 2 == 0
    is_bfloat16 = all(array.dtype == jnp.bfloat16 for array in (query, key, value))
    is_nvidia = "NVIDIA" in jax.devices()[0].device_kind
    return is_nvidia and is_bfloat16 and is_even and d_k == d_v <= 128 and d_k % 8 == 0


def _fused_attention(
    query: Float[Array, "b t h d_k"],
    key: Float[Array, "b s h d_k"],
    value: Float[Array, "b s h d_v"],
    mask: Bool[Array, "#b #h #t s"] | None,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "b t h d_v"]:
    """As above, by one function of JAX, which spreads the weights of a row that may attend to nothing evenly."""
    if mask is None:
        return jax.nn.dot_product_attention(query, key, value, implementation=implementation)
    whole = jnp.broadcast_to(mask, (*mask.shape[:2], query.shape[1], key.shape[1]))
    found = jax.nn.dot_product_attention(query, key, value, mask=whole, implementation=implementation)
    attends = jnp.any(mask, axis=-1, keepdims=True)  # #b #h #t 1
    return jnp.where(jnp.swapaxes(attends, 1, 2), found, 0)


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
    kernel: AttentionKernel = "xla"
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
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        is_fused = self.kernel == "cudnn" or (self.kernel == "auto" and fits_cudnn(query, key, value))
        if is_fused and (deterministic or not self.dropout_rate):
            return self.output(scaled_dot_product_attention(query, key, value, mask, "cudnn"))
        weights = self.dropout(self.weights(query, key, mask), deterministic=deterministic)
        return self.output(weighted_sum(weights, value))

    def weights(
        self,
        query: Float[Array, "b t h d_k"],
        key: Float[Array, "b s h d_k"],
        mask: Bool[Array, "#b #h #t s"] | None,
    ) -> Float[Array, "b h t s"]:
        """`attention_weights` as a method, so that `transformer.attention_maps` can look at what it returns."""
        return attention_weights(query, key, mask)
