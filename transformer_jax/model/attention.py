"""Attention (paper section 3.2)."""

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.initializers import Initialization, attention_initializer, xavier_uniform
from transformer_jax.model.linear import Linear
from transformer_jax.model.masks import PaddedMask

AttentionKernel = Literal["auto", "xla"]


def masked_softmax(scores: Float[Array, "..."], mask: Bool[Array, "..."] | None) -> Float[Array, "..."]:
    """Return the softmax over the last axis, exactly 0 where the mask is False, even in a row without any True."""
    if mask is None:
        return jax.nn.softmax(scores)
    # A finite number instead of -inf: a row of -inf would give NaN here and in the gradient.
    return jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min)), 0)


def attention_weights(
    query: Float[Array, "b t h d_k"], key: Float[Array, "b s h d_k"], mask: Bool[Array, "#b #h #t s"] | None = None
) -> Float[Array, "b h t s"]:
    """Compute softmax(Q K^T / sqrt(d_k)), the weights of paper equation 1, in at least float32.

    Args:
        query: Queries of each head.
        key: Keys of each head.
        mask: True where a query may attend to a key. None lets every query attend to every key.

    Returns:
        The weights. They are exactly 0 where the mask is False; a query that may attend to nothing has only zeros.
    """
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=dtype) / math.sqrt(query.shape[-1])
    return masked_softmax(scores, mask)


def weighted_sum(weights: Float[Array, "b h t s"], value: Float[Array, "b s h d_v"]) -> Float[Array, "b t h d_v"]:
    """Multiply attention weights by the values (paper equation 1), in the dtype of the values."""
    return jnp.einsum("bhts,bshd->bthd", weights.astype(value.dtype), value)


def scaled_dot_product_attention(
    query: Float[Array, "b t h d_k"],
    key: Float[Array, "b s h d_k"],
    value: Float[Array, "b s h d_v"],
    mask: Bool[Array, "#b #h #t s"] | PaddedMask | None = None,
    kernel: AttentionKernel = "xla",
) -> Float[Array, "b t h d_v"]:
    """Compute softmax(Q K^T / sqrt(d_k)) V (paper equation 1).

    Args:
        query: Queries of each head.
        key: Keys of each head.
        value: Values of each head.
        mask: True where a query may attend to a key. None lets every query attend to every key.
        kernel: `auto` calls NVIDIA's fused kernel, which never writes the weights to memory, if the program is compiled
            for an NVIDIA GPU and `fits_cudnn` accepts the inputs. `xla` never calls it.

    Returns:
        The attended values. A query that may attend to nothing gives zeros, never NaN (but see `PaddedMask`).

    >>> scaled_dot_product_attention(jnp.zeros((1, 1, 1, 2)), jnp.zeros((1, 2, 1, 2)), jnp.array([[[[1.0]], [[3.0]]]]))
    Array([[[[2.]]]], dtype=float32)
    """

    def plain(query: Array, key: Array, value: Array) -> Array:
        return weighted_sum(attention_weights(query, key, _dense(mask)), value)

    if kernel == "auto" and fits_cudnn(query, key, value):
        cudnn = partial(fused_attention, mask=mask, implementation="cudnn")
        return jax.lax.platform_dependent(query, key, value, cuda=cudnn, default=plain)
    return plain(query, key, value)


def _dense(mask: Bool[Array, "#b #h #t s"] | PaddedMask | None) -> Bool[Array, "#b #h #t s"] | None:
    return mask.mask if isinstance(mask, PaddedMask) else mask


def fits_cudnn(
    query: Float[Array, "b t h d_k"], key: Float[Array, "b s h d_k"], value: Float[Array, "b s h d_v"]
) -> bool:
    """Return whether cuDNN's kernel is installed and supports these dtypes and widths (NVIDIA GPUs since Ampere)."""
    is_bfloat16 = all(array.dtype == jnp.bfloat16 for array in (query, key, value))
    return is_bfloat16 and query.shape[3] == value.shape[3] <= 128 and query.shape[3] % 8 == 0 and _has_cudnn()


@cache
def _has_cudnn() -> bool:
    """Return whether JAX can trace cuDNN's kernel here. An NVIDIA GPU of this machine must support it."""
    x = jax.ShapeDtypeStruct((1, 2, 1, 8), jnp.bfloat16)
    try:
        jax.eval_shape(partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
        return all(float(device.compute_capability) >= 8 for device in jax.local_devices(backend="cuda"))
    except RuntimeError as error:  # no cuDNN, or cuDNN without a GPU, where programs may be compiled for one
        return "cuDNN" not in str(error)


def fused_attention(
    query: Float[Array, "b t h d_k"],
    key: Float[Array, "b s h d_k"],
    value: Float[Array, "b s h d_v"],
    mask: Bool[Array, "#b #h #t s"] | PaddedMask | None,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "b t h d_v"]:
    """Compute attention by JAX's function. Without a `PaddedMask`, a query that may attend to nothing gives zeros."""
    t, s = query.shape[1], key.shape[1]
    # The gradient of cuDNN's kernel requires even lengths.
    query, key, value = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (query, key, value))
    attend = partial(jax.nn.dot_product_attention, query, key, value, implementation=implementation)
    if isinstance(mask, PaddedMask):
        return attend(key_value_seq_lengths=mask.key_lengths, is_causal=mask.is_causal)[:, :t]
    mask = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], t, s))
    mask = jnp.pad(mask, ((0, 0), (0, 0), (0, t % 2), (0, s % 2)))
    attends = jnp.any(mask, axis=-1, keepdims=True)  # #b #h t 1
    return jnp.where(jnp.swapaxes(attends, 1, 2), attend(mask=mask), 0)[:, :t]


class KeysValues(NamedTuple):
    """Stored keys and values of b * h heads. XLA's CPU backend copies a cache of four axes at each position."""

    key: Float[Array, "heads n d_k"]
    value: Float[Array, "heads n d_v"]


def _by_head(x: Float[Array, "b n h d"]) -> Float[Array, "heads n d"]:
    b, n, h, d = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(b * h, n, d)


class MultiHeadAttention(nn.Module):
    """Concat(head_1, ..., head_h) W^O with head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V) (paper section 3.2.2).

    `d_k` and `d_v` default to d_model / num_heads, as in the paper.

    Parameters: `query`, `key` [d_model, h, d_k], `value` [d_model, h, d_v], `output` [h, d_v, d_model].

    >>> attention = MultiHeadAttention(d_model=8, num_heads=2)
    >>> x = jnp.ones((1, 3, 8))
    >>> params = attention.init(jax.random.key(0), x)["params"]
    >>> attention.apply({"params": params}, x).shape
    (1, 3, 8)
    """

    d_model: int
    num_heads: int
    d_k: int | None = None
    d_v: int | None = None
    use_bias: bool = False
    dropout_rate: float = 0.0
    kernel: AttentionKernel = "xla"
    initialization: Initialization = "tensor2tensor"
    dtype: DTypeLike = "float32"
    param_dtype: DTypeLike = "float32"

    def setup(self) -> None:
        """Create the projections."""
        if None in (self.d_k, self.d_v) and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}. "
                "Set num_heads to a divisor, or set d_k and d_v."
            )
        h, (d_k, d_v) = self.num_heads, (size or self.d_model // self.num_heads for size in (self.d_k, self.d_v))
        self.widths, fused_width = (h * d_k, h * d_v), h * (2 * d_k + d_v)
        linear = partial(Linear, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype)
        initializer = partial(attention_initializer, self.initialization, self.d_model, fused_width=fused_width)
        self.query, self.key = (linear((h, d_k), initializer(h * d_k)) for _ in range(2))
        self.value = linear((h, d_v), initializer(h * d_v))
        self.output = linear((self.d_model,), xavier_uniform(h * d_v, self.d_model), num_inputs=2)
        # Several as one product, for decoding; `prepare_for_decoding` makes their parameters.
        self.query_key_value = linear((fused_width,), initializer(fused_width))
        self.key_value = linear((sum(self.widths),), initializer(sum(self.widths)))
        self.dropout = nn.Dropout(self.dropout_rate)

    def __call__(
        self,
        x: Float[Array, "*b t d_model"],
        memory: Float[Array, "*b s d_model"] | None = None,
        mask: Bool[Array, "#b #h #t s"] | PaddedMask | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """Attend from `x`, which gives the queries, to `memory`, which gives keys and values.

        Args:
            x: Input of the queries.
            memory: Input of the keys and values. None: `x`, which is self-attention.
            mask: True where a query may attend to a key. None lets every query attend to every key.
            deterministic: Turn dropout of the attention weights off.

        Raises:
            ValueError: `x` or `memory` is not of shape [batch, length, d_model].
        """
        memory = x if memory is None else memory
        for name, array in (("x", x), ("memory", memory)):
            if array.ndim != 3 or array.shape[2] != self.d_model:
                raise ValueError(
                    f"{name} has shape {list(array.shape)}; [batch, length, d_model={self.d_model}] is needed. "
                    f"Add the batch axis of a single sequence with {name}[None]."
                )
        query, key, value = self.query(x), self.key(memory), self.value(memory)
        has_dropout = self.dropout_rate > 0 and not deterministic
        if self.kernel == "auto" and not has_dropout and fits_cudnn(query, key, value):
            return self.output(scaled_dot_product_attention(query, key, value, mask, "auto"))
        weights = self.dropout(self.weights(query, key, _dense(mask)), deterministic=deterministic)
        return self.output(weighted_sum(weights, value))

    def weights(
        self, query: Float[Array, "b t h d_k"], key: Float[Array, "b s h d_k"], mask: Bool[Array, "#b #h #t s"] | None
    ) -> Float[Array, "b h t s"]:
        """Return `attention_weights`, for `transformer.attention_maps` to capture."""
        return attention_weights(query, key, mask)

    def keys_values(self, memory: Float[Array, "b s d_model"]) -> KeysValues:
        """Return the keys and values of `memory` for `attend`."""
        return KeysValues(*self._split_heads(self.key_value(memory), self.widths))

    def attend(
        self, x: Float[Array, "b t d_model"], past: KeysValues, mask: Bool[Array, "b 1 #t n"]
    ) -> Float[Array, "b t d_model"]:
        """Attend from `x` to stored keys and values, without dropout."""
        return self._attend(_by_head(self.query(x)), past, mask)

    def attend_and_store(
        self, x: Float[Array, "b t d_model"], past: KeysValues, start: Int[Array, ""], mask: Bool[Array, "b 1 t n"]
    ) -> tuple[Float[Array, "b t d_model"], KeysValues]:
        """Store the keys and values of `x` in `past` from index `start`, attend to `past`, and return both results."""
        query, key, value = self._split_heads(self.query_key_value(x), (self.widths[0], *self.widths))
        past = KeysValues(
            jax.lax.dynamic_update_slice_in_dim(past.key, key, start, 1),
            jax.lax.dynamic_update_slice_in_dim(past.value, value, start, 1),
        )
        return self._attend(query, past, mask), past

    def _split_heads(self, projected: Float[Array, "b n d"], widths: Sequence[int]) -> list[Array]:
        """Split the result of several linear maps and give each part the layout of `KeysValues`."""
        parts = jnp.split(projected, list(accumulate(widths))[:-1], axis=2)
        return [_by_head(part.reshape(*part.shape[:2], self.num_heads, -1)) for part in parts]

    def _attend(
        self, query: Float[Array, "heads t d_k"], past: KeysValues, mask: Bool[Array, "b 1 #t n"]
    ) -> Float[Array, "b t d_model"]:
        """Compute paper equation 1 and the output projection in the layout of `KeysValues`."""
        dtype, (_, t, d_k) = jnp.promote_types(query.dtype, jnp.float32), query.shape
        scores = jnp.einsum("htd,hnd->htn", query, past.key, preferred_element_type=dtype) / math.sqrt(d_k)
        weights = masked_softmax(scores.reshape(len(mask), self.num_heads, t, -1), mask).astype(past.value.dtype)
        y = jnp.einsum("htn,hnd->htd", weights.reshape(scores.shape), past.value)
        return self.output(jnp.swapaxes(y.reshape(len(mask), self.num_heads, t, -1), 1, 2))
