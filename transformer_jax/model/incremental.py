"""The decoder one position at a time, with a cache of keys and values, in float32, bfloat16 or int8 weights."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8

from transformer_jax.config import ModelConfig, StackSize
from transformer_jax.model.feed_forward import activate
from transformer_jax.model.normalization import layer_norm
from transformer_jax.model.positional import sinusoids
from transformer_jax.types import Params, UserError


class Int8Matrix(NamedTuple):
    """W [n, v], nearly: W[i, j] = values[j, i] * scale[j]."""

    values: Int8[Array, "v n"]
    """-127 to 127. Outputs first: XLA's integer product on CPUs is fast in this layout alone."""
    scale: Float[Array, " v"]


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


class Linear(NamedTuple):
    """x W + b."""

    matrix: Float[Array, "n v"] | Int8Matrix
    bias: Float[Array, " v"] | None

    def __call__(self, x: Float[Array, "rows n"]) -> Float[Array, "rows v"]:
        """In the dtype of `x`."""
        y = times(x, self.matrix)
        return y if self.bias is None else y + self.bias[None]


class Norm(NamedTuple):
    """Parameters of a LayerNorm."""

    scale: Float[Array, " d_model"]
    bias: Float[Array, " d_model"]


class LayerWeights(NamedTuple):
    """One decoder layer. The heads of an attention are parts of one matrix: `h * d_k` columns or rows."""

    query_key_value: Linear
    self_output: Linear
    self_norm: Norm
    cross_query: Linear
    cross_key_value: Linear
    cross_output: Linear
    cross_norm: Norm
    inner: Linear
    outer: Linear
    feed_forward_norm: Norm


class DecoderWeights(NamedTuple):
    """All that `decode_step` computes with."""

    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    embedding: Float[Array, "v d_model"]
    logits: Linear
    positions: Float[Array, "l d_model"] | None
    """Learned positions, the offset left out; sinusoids are computed."""


class PastKeysValues(NamedTuple):
    """Keys and values of one attention layer, an axis of b * h heads first.

    Three axes, as XLA's products on CPUs have them: with four the loop copies the whole cache at each position.
    """

    key: Float[Array, "heads n d_k"]
    value: Float[Array, "heads n d_v"]


class Cache(NamedTuple):
    """What decoding one position needs of those before it: an explicit value, handed in and handed back."""

    position: Int[Array, ""]
    """Positions decoded so far."""
    past: tuple[PastKeysValues, ...]
    """Each layer's self-attention: n = l * k, what hypothesis j wrote at position i stands at i * k + j."""
    ancestry: Int[Array, "b k l"]
    """Which hypothesis of the beam wrote position i of this one; -1 where nothing is written yet."""
    cross: tuple[PastKeysValues, ...]
    """Each layer's keys and values of the encoder's output, n = s: they never change."""
    src_mask: Bool[Array, "b 1 1 s"]
    """Which source positions may be attended to."""


def decoder_weights(params: Params, config: ModelConfig, *, int8: bool = False) -> DecoderWeights:
    """The parameters of a `Transformer`, as a step computes with them.

    Args:
        params: the tree of the whole model.
        config: of the model.
        int8: matrices rounded to 8 bits (`quantize`); not the embedding, biases and norms.
    """
    decoder, dtype = params["decoder"], config.dtype

    def linear(*parts: Params, inputs: int = 1) -> Linear:
        """Of parts that read the same; the first `inputs` axes of a kernel are inputs, the others outputs."""
        kernels = [part["kernel"] for part in parts]
        rows = math.prod(kernels[0].shape[:inputs])
        matrix = jnp.concatenate([kernel.reshape(rows, -1) for kernel in kernels], axis=1)
        bias = jnp.concatenate([part["bias"].reshape(-1) for part in parts]) if "bias" in parts[0] else None
        return Linear(quantize(matrix) if int8 else matrix.astype(dtype), None if bias is None else bias.astype(dtype))

    def layer(number: int) -> LayerWeights:
        own = decoder[f"layer_{number}"]
        attention, cross, network = own["self_attention"], own["cross_attention"], own["feed_forward"]
        return LayerWeights(
            query_key_value=linear(attention["query"], attention["key"], attention["value"]),
            self_output=linear(attention["output"], inputs=2),
            self_norm=Norm(**own["self_attention_norm"]),
            cross_query=linear(cross["query"]),
            cross_key_value=linear(cross["key"], cross["value"]),
            cross_output=linear(cross["output"], inputs=2),
            cross_norm=Norm(**own["cross_attention_norm"]),
            inner=linear(network["inner"]),
            outer=linear(network["outer"]),
            feed_forward_norm=Norm(**own["feed_forward_norm"]),
        )

    embedding = params["embedding" if config.tie_embeddings == "all" else "target_embedding"]["table"]
    kernel = params["output_projection"]["kernel"] if config.tie_embeddings == "none" else embedding.T
    logits = {"kernel": kernel} | ({"bias": params["logits_bias"]} if config.logits_bias else {})
    return DecoderWeights(
        layers=tuple(layer(number) for number in range(config.decoder.num_layers)),
        final_norm=Norm(**decoder["final_norm"]) if config.final_norm else None,
        embedding=embedding,
        logits=linear(logits),
        positions=params["target_positions"]["table"][config.position_offset :]
        if config.positions == "learned"
        else None,
    )


def init_cache(
    weights: DecoderWeights,
    memory: Float[Array, "b s d_model"],
    src_mask: Bool[Array, "b 1 1 s"],
    *,
    config: ModelConfig,
    max_length: int,
    beam_size: int = 1,
    capacity: int | None = None,
) -> Cache:
    """An empty cache of k hypotheses; keys and values of `memory` are computed here.

    Args:
        weights: see `decoder_weights`.
        memory: the encoder's output.
        src_mask: which of it may be attended to.
        config: of the model.
        max_length: positions that will be decoded.
        beam_size: k.
        capacity: Number of positions to allocate before the cache is resized; None: `max_length`.

    Raises:
        UserError: more positions than the learned table has.
    """
    if weights.positions is not None and max_length > len(weights.positions):
        raise UserError(
            f"a translation of {max_length} tokens (plus position_offset {config.position_offset}) is longer than the "
            f"learned position table of model.max_length {config.max_length} rows"
        )
    size, (batch, length, _) = config.decoder, memory.shape
    capacity = max_length if capacity is None else capacity

    def cross(layer: LayerWeights) -> PastKeysValues:
        flat = layer.cross_key_value(memory.reshape(batch * length, -1))
        key, value = jnp.split(flat.reshape(batch, length, -1), [size.num_heads * size.d_k], axis=2)
        return PastKeysValues(_by_head(key, size), _by_head(value, size))

    def empty(width: int) -> Array:
        return jnp.zeros((batch * size.num_heads, capacity * beam_size, width), memory.dtype)

    return Cache(
        position=jnp.zeros((), jnp.int32),
        past=tuple(PastKeysValues(empty(size.d_k), empty(size.d_v)) for _ in weights.layers),
        ancestry=jnp.full((batch, beam_size, capacity), -1, jnp.int32),
        cross=tuple(cross(layer) for layer in weights.layers),
        src_mask=src_mask,
    )


def reorder_cache(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
    """Row i of the beams becomes what row `rows[i]` was, which is one of the same sentence."""
    ancestry = cache.ancestry
    return cache._replace(ancestry=ancestry.reshape(len(rows), -1)[rows].reshape(ancestry.shape))


def resize_cache(cache: Cache, max_length: int) -> Cache:
    """The same with room for more positions."""
    more = max_length - cache.ancestry.shape[2]
    k = cache.ancestry.shape[1]
    return cache._replace(
        past=jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, more * k), (0, 0))), cache.past),
        ancestry=jnp.pad(cache.ancestry, ((0, 0), (0, 0), (0, more)), constant_values=-1),
    )


def decode_step(
    weights: DecoderWeights, tokens: Int[Array, " rows"], cache: Cache, *, config: ModelConfig
) -> tuple[Float[Array, "rows v"], Cache]:
    """Reads one more token a row (the start token first) and gives the logits of the next one, at least float32.

    Calls beyond the cache's `max_length` are not noticed: the position is not known when this is compiled.

    Args:
        weights: see `decoder_weights`.
        tokens: rows = b * k: row i is hypothesis i % k of sentence i // k.
        cache: what `init_cache` or the last step gave.
        config: of the model.
    """
    _, k, length = cache.ancestry.shape
    x = jnp.take(weights.embedding, tokens, axis=0).astype(config.dtype)
    if config.scale_embeddings:
        x *= math.sqrt(config.d_model)
    if config.decoder_start == "zeros":
        x = jnp.where(cache.position == 0, jnp.zeros_like(x), x)
    x += jax.lax.dynamic_slice_in_dim(_positions(weights, length, config), cache.position, 1)

    own = jnp.arange(k, dtype=jnp.int32)
    written = jnp.broadcast_to(own[None, :, None], (*cache.ancestry.shape[:2], 1))
    ancestry = jax.lax.dynamic_update_slice_in_dim(cache.ancestry, written, cache.position, 2)
    tgt_mask = (ancestry[:, :, :, None] == own[None, None, None]).reshape(-1, 1, k, length * k)

    past = []
    for layer, layer_past, layer_cross in zip(weights.layers, cache.past, cache.cross, strict=True):
        x, new = _layer_step(layer, x, layer_past, layer_cross, cache.position, tgt_mask, cache.src_mask, config)
        past.append(new)
    if weights.final_norm is not None:
        x = _normed(x, weights.final_norm, config)
    logits = times(x, weights.logits.matrix, jnp.promote_types(x.dtype, jnp.float32))
    if weights.logits.bias is not None:
        logits += weights.logits.bias.astype(logits.dtype)[None]
    return logits, cache._replace(position=cache.position + 1, past=tuple(past), ancestry=ancestry)


def _positions(weights: DecoderWeights, length: int, config: ModelConfig) -> Float[Array, "l d_model"]:
    """At least `length` of them."""
    if weights.positions is not None:
        return weights.positions.astype(config.dtype)
    assert config.positions != "learned"  # for the type checker
    table = sinusoids(length, config.d_model, config.positions, config.position_exponent, config.position_offset)
    return jnp.asarray(table, jnp.promote_types(config.dtype, jnp.float32)).astype(config.dtype)


def _layer_step(
    layer: LayerWeights,
    x: Float[Array, "rows d_model"],
    past: PastKeysValues,
    cross: PastKeysValues,
    position: Int[Array, ""],
    tgt_mask: Bool[Array, "b 1 k n"],
    src_mask: Bool[Array, "b 1 1 s"],
    config: ModelConfig,
) -> tuple[Float[Array, "rows d_model"], PastKeysValues]:
    """One layer at one position; `past` comes back with this position's keys and values in it."""
    size, (batch, _, k, _) = config.decoder, tgt_mask.shape
    pre = config.norm_position == "pre"

    def enter(x: Array, norm: Norm) -> Array:
        return _normed(x, norm, config) if pre else x

    def leave(x: Array, output: Array, norm: Norm) -> Array:
        return x + output if pre else _normed(x + output, norm, config)

    flat = layer.query_key_value(enter(x, layer.self_norm)).reshape(batch, k, -1)
    width = size.num_heads * size.d_k
    query, key, value = (_by_head(part, size) for part in jnp.split(flat, [width, 2 * width], axis=2))
    past = PastKeysValues(
        jax.lax.dynamic_update_slice_in_dim(past.key, key, position * k, 1),
        jax.lax.dynamic_update_slice_in_dim(past.value, value, position * k, 1),
    )
    x = leave(x, layer.self_output(_attend(query, past, tgt_mask)), layer.self_norm)

    query = _by_head(layer.cross_query(enter(x, layer.cross_norm)).reshape(batch, k, -1), size)
    x = leave(x, layer.cross_output(_attend(query, cross, src_mask)), layer.cross_norm)

    hidden = activate(layer.inner(enter(x, layer.feed_forward_norm)), config.activation)
    return leave(x, layer.outer(hidden), layer.feed_forward_norm), past


def _attend(
    query: Float[Array, "heads k d_k"], past: PastKeysValues, mask: Bool[Array, "b 1 #k n"]
) -> Float[Array, "rows width"]:
    """Paper eq. 1, and the heads' results side by side. All masked: zeros."""
    dtype, (heads, k, d_k), batch = jnp.promote_types(query.dtype, jnp.float32), query.shape, len(mask)
    scores = jnp.einsum("hkd,hnd->hkn", query, past.key, preferred_element_type=dtype) / math.sqrt(d_k)
    scores = scores.reshape(batch, heads // batch, k, -1)
    weights = jnp.where(mask, jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(dtype).min)), 0)
    y = jnp.einsum("hkn,hnd->hkd", weights.astype(past.value.dtype).reshape(heads, k, -1), past.value)
    return jnp.swapaxes(y.reshape(batch, heads // batch, k, -1), 1, 2).reshape(batch * k, -1)


def _by_head(x: Float[Array, "b n width"], size: StackSize) -> Float[Array, "heads n d"]:
    batch, n, _ = x.shape
    return jnp.swapaxes(x.reshape(batch, n, size.num_heads, -1), 1, 2).reshape(batch * size.num_heads, n, -1)


def _normed(x: Float[Array, "rows d_model"], norm: Norm, config: ModelConfig) -> Float[Array, "rows d_model"]:
    return layer_norm(x, norm.scale, norm.bias, config.norm_epsilon, config.norm_variant)
