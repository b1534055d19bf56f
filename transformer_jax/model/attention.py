"""Attention (paper section 3.2)."""

import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from transformer_jax.model.initializers import Initialization, attention_initializer, xavier_uniform

AttentionKernel = Literal["auto", "xla"]


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
        kernel: xla: the two functions above. auto: where `fits_cudnn`, NVIDIA's fused kernel, which never writes the
            weights to memory.

    >>> scaled_dot_product_attention(jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 2, 1, 2)), jnp.array([[[[1.0]], [[3.0]]]]))
    Array([[[[2.]]]], dtype=float32)
    """
    if kernel == "auto" and fits_cudnn(query, key, value):
        return _fused_attention(query, key, value, mask, "cudnn")
    return weighted_sum(attention_weights(query, key, mask), value)


def fits_cudnn(
    query: Float[Array, "b t h d_k"], key: Float[Array, "b s h d_k"], value: Float[Array, "b s h d_v"]
) -> bool:
    """Whether cuDNN's kernel is there (NVIDIA GPUs since Ampere) and computes these dtypes and widths of heads."""
    device = jax.devices()[0]
    is_there = "NVIDIA" in device.device_kind and float(device.compute_capability) >= 8
    is_bfloat16 = all(array.dtype == jnp.bfloat16 for array in (query, key, value))
    return is_there and is_bfloat16 and query.shape[3] == value.shape[3] <= 128 and query.shape[3] % 8 == 0


def _fused_attention(
    query: Float[Array, "b t h d_k"],
    key: Float[Array, "b s h d_k"],
    value: Float[Array, "b s h d_v"],
    mask: Bool[Array, "#b #h #t s"] | None,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "b t h d_v"]:
    """As above, by one function of JAX, which spreads the weights of a row that may attend to nothing evenly."""
    t, s = query.shape[1], key.shape[1]
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], t, s))
    # The kernel's gradient is for even lengths alone.
    query, key, value = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, t % 2), (0, s % 2)))
    found = jax.nn.dot_product_attention(query, key, value, mask=mask, implementation=implementation)
    attends = jnp.any(mask, axis=-1, keepdims=True)  # #b #h t 1
    return jnp.where(jnp.swapaxes(attends, 1, 2), found, 0)[:, :t]


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
            return nn.DenseGeneral(
                (self.num_heads, d_head),
                use_bias=self.use_bias,
                kernel_init=init,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
            )

        self.query, self.key, self.value = projection(self.d_k), projection(self.d_k), projection(self.d_v)
        self.output = nn.DenseGeneral(
            self.d_model,
            axis=(-2, -1),
            use_bias=self.use_bias,
            kernel_init=xavier_uniform(v_width, self.d_model),
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        self.dropout = nn.Dropout(self.dropout_rate)

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
        has_dropout = self.dropout_rate > 0 and not deterministic
        if self.kernel == "auto" and not has_dropout and fits_cudnn(query, key, value):
            return self.output(_fused_attention(query, key, value, mask, "cudnn"))
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
