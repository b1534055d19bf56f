"""The decoder one position at a time, with a cache of keys and values, in float32, bfloat16 or int8 weights."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8

from transformer_jax.config import ModelConfig, StackSize
from transformer_jax.model.attention import masked_softmax
from transformer_jax.model.embedding import embed, mask_start
from transformer_jax.model.feed_forward import activate
from transformer_jax.model.layers import residual
from transformer_jax.model.normalization import layer_norm
from transformer_jax.model.positional import position_vectors
from transformer_jax.types import Params


class Int8Matrix(NamedTuple):
    """A matrix W [n, v] rounded to 8 bits: W[i, j] is about values[j, i] * scale[j]."""

    values: Int8[Array, "v n"]
    """Integers from -127 to 127. Outputs come first: XLA's integer product on CPUs is fast in this layout only."""
    scale: Float[Array, " v"]


def quantize(matrix: Float[Array, "n v"]) -> Int8Matrix:
    """Round a matrix to 8 bits, symmetrically and with one scale per output (column).

    The error of an entry is at most half the scale of its column.

    >>> quantize(jnp.array([[0.5, 0.0], [-1.27, 0.0]])).values.tolist()
    [[50, -127], [0, 0]]
    """
    matrix = matrix.astype(jnp.promote_types(matrix.dtype, jnp.float32))
    values, scale = _round_rows(matrix.T)
    return Int8Matrix(values, scale[:, 0])


def matmul(
    x: Float[Array, "rows n"], matrix: Float[Array, "n v"] | Int8Matrix, dtype: DTypeLike | None = None
) -> Float[Array, "rows v"]:
    """Return the product x W.

    Args:
        x: The left factor. With an `Int8Matrix` each of its rows is rounded to 8 bits with its own scale, so that the
            product is one of integers.
        matrix: W.
        dtype: Type of the result; None: that of `x`.
    """
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


class Linear(NamedTuple):
    """Parameters of x W + b."""

    matrix: Float[Array, "n v"] | Int8Matrix
    bias: Float[Array, " v"] | None

    def __call__(self, x: Float[Array, "rows n"]) -> Float[Array, "rows v"]:
        """Return x W + b in the dtype of `x`."""
        y = matmul(x, self.matrix)
        return y if self.bias is None else y + self.bias[None]


class Norm(NamedTuple):
    """Parameters of a LayerNorm."""

    scale: Float[Array, " d_model"]
    bias: Float[Array, " d_model"]


class LayerWeights(NamedTuple):
    """Parameters of one decoder layer. The heads of an attention are `h * d_k` columns or rows of one matrix."""

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
    """Every parameter that `decode_step` computes with."""

    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    embedding: Float[Array, "v d_model"]
    logits: Linear
    positions: Float[Array, "rows d_model"] | None
    """The learned position table; None: sinusoids are computed."""


class PastKeysValues(NamedTuple):
    """Keys and values of one attention layer, with a leading axis of b * h heads.

    There are three axes because XLA's CPU backend copies the complete cache at each position if there are four.
    """

    key: Float[Array, "heads n d_k"]
    value: Float[Array, "heads n d_v"]


class Cache(NamedTuple):
    """Decoding state that `decode_step` takes and returns: the cached keys and values, and the beam's ancestry."""

    position: Int[Array, ""]
    """Number of positions decoded so far."""
    past: tuple[PastKeysValues, ...]
    """Keys and values of each self-attention layer, n = capacity * k: hypothesis j wrote position i at index
    i * k + j."""
    ancestry: Int[Array, "b k l"]
    """Which hypothesis of the beam wrote each position of each hypothesis; -1 where nothing is written yet."""
    cross: tuple[PastKeysValues, ...]
    """Keys and values of the encoder's output for each cross-attention layer, n = s. They never change."""
    src_mask: Bool[Array, "b 1 1 s"]
    """Which source positions may be attended to."""


def decoder_weights(params: Params, config: ModelConfig, *, int8: bool = False) -> DecoderWeights:
    """Convert the parameters of a `Transformer` to the layout of `decode_step`.

    Args:
        params: Parameter tree of the complete model.
        config: The model.
        int8: Round matrices to 8 bits (`quantize`), except the embedding, biases and norms.
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
        positions=params["target_positions"]["table"] if config.positions == "learned" else None,
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
    """Return an empty cache for k hypotheses, with the keys and values of `memory`.

    Args:
        weights: Parameters of the decoder.
        memory: Output of the encoder.
        src_mask: Which source positions may be attended to.
        config: The model.
        max_length: Number of positions that will be decoded.
        beam_size: k, the number of hypotheses of each sentence.
        capacity: Number of positions to allocate before the cache is resized; None: `max_length`.

    Raises:
        UserError: `max_length` exceeds the learned position table.
    """
    position_vectors(config, max_length, weights.positions)  # raises here, and not when a loop is compiled
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
    """Return the cache in which row i continues row `rows[i]`, which is a row of the same sentence.

    Only the small ancestry table changes; keys and values stay where they were written.
    """
    ancestry = cache.ancestry
    return cache._replace(ancestry=ancestry.reshape(len(rows), -1)[rows].reshape(ancestry.shape))


def resize_cache(cache: Cache, max_length: int) -> Cache:
    """Return the cache with capacity for `max_length` positions."""
    more = max_length - cache.ancestry.shape[2]
    k = cache.ancestry.shape[1]
    return cache._replace(
        past=jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, more * k), (0, 0))), cache.past),
        ancestry=jnp.pad(cache.ancestry, ((0, 0), (0, 0), (0, more)), constant_values=-1),
    )


def decode_step(
    weights: DecoderWeights, tokens: Int[Array, " rows"], cache: Cache, *, config: ModelConfig
) -> tuple[Float[Array, "rows v"], Cache]:
    """Decode one position: read one token per row and return the logits of the next token and the updated cache.

    The first call reads the start token. Logits are at least float32. The position is a traced value, so decoding
    beyond the cache's capacity is not detected.

    Args:
        weights: Parameters of the decoder.
        tokens: The last token of each of b * k rows: row i is hypothesis i % k of sentence i // k.
        cache: The result of `init_cache` or of the previous step.
        config: The model.
    """
    _, k, length = cache.ancestry.shape
    x = embed(weights.embedding, tokens, scale=config.scale_embeddings, dtype=config.dtype)
    if config.decoder_start == "zeros":
        x = mask_start(x, cache.position[None])
    positions = position_vectors(config, length, weights.positions)
    x += jax.lax.dynamic_slice_in_dim(positions, cache.position, 1)

    own = jnp.arange(k, dtype=jnp.int32)
    written = jnp.broadcast_to(own[None, :, None], (*cache.ancestry.shape[:2], 1))
    ancestry = jax.lax.dynamic_update_slice_in_dim(cache.ancestry, written, cache.position, 2)
    tgt_mask = (ancestry[:, :, :, None] == own[None, None, None]).reshape(-1, 1, k, length * k)

    past = []
    for layer, layer_past, layer_cross in zip(weights.layers, cache.past, cache.cross, strict=True):
        x, new = _layer_step(layer, x, layer_past, layer_cross, cache.position, tgt_mask, cache.src_mask, config)
        past.append(new)
    if weights.final_norm is not None:
        x = _normalize(weights.final_norm, config)(x)
    logits = matmul(x, weights.logits.matrix, jnp.promote_types(x.dtype, jnp.float32))
    if weights.logits.bias is not None:
        logits += weights.logits.bias.astype(logits.dtype)[None]
    return logits, cache._replace(position=cache.position + 1, past=tuple(past), ancestry=ancestry)


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
    """Apply one layer at one position, and return `past` with the keys and values of this position."""
    size, (batch, _, k, _) = config.decoder, tgt_mask.shape

    def attend_to_target(y: Float[Array, "rows d_model"]) -> Float[Array, "rows d_model"]:
        nonlocal past
        width = size.num_heads * size.d_k
        projected = layer.query_key_value(y).reshape(batch, k, -1)
        query, key, value = (_by_head(part, size) for part in jnp.split(projected, [width, 2 * width], axis=2))
        past = PastKeysValues(
            jax.lax.dynamic_update_slice_in_dim(past.key, key, position * k, 1),
            jax.lax.dynamic_update_slice_in_dim(past.value, value, position * k, 1),
        )
        return layer.self_output(_attend(query, past, tgt_mask))

    def attend_to_memory(y: Float[Array, "rows d_model"]) -> Float[Array, "rows d_model"]:
        query = _by_head(layer.cross_query(y).reshape(batch, k, -1), size)
        return layer.cross_output(_attend(query, cross, src_mask))

    def feed_forward(y: Float[Array, "rows d_model"]) -> Float[Array, "rows d_model"]:
        return layer.outer(activate(layer.inner(y), config.activation))

    x = residual(x, attend_to_target, _normalize(layer.self_norm, config), config.norm_position)
    x = residual(x, attend_to_memory, _normalize(layer.cross_norm, config), config.norm_position)
    return residual(x, feed_forward, _normalize(layer.feed_forward_norm, config), config.norm_position), past


def _attend(
    query: Float[Array, "heads k d_k"], past: PastKeysValues, mask: Bool[Array, "b 1 #k n"]
) -> Float[Array, "rows width"]:
    """Compute paper equation 1 in the layout of the cache, and concatenate the heads."""
    dtype, (heads, k, d_k), batch = jnp.promote_types(query.dtype, jnp.float32), query.shape, len(mask)
    scores = jnp.einsum("hkd,hnd->hkn", query, past.key, preferred_element_type=dtype) / math.sqrt(d_k)
    weights = masked_softmax(scores.reshape(batch, heads // batch, k, -1), mask)
    y = jnp.einsum("hkn,hnd->hkd", weights.astype(past.value.dtype).reshape(heads, k, -1), past.value)
    return jnp.swapaxes(y.reshape(batch, heads // batch, k, -1), 1, 2).reshape(batch * k, -1)


def _by_head(x: Float[Array, "b n width"], size: StackSize) -> Float[Array, "heads n d"]:
    batch, n, _ = x.shape
    return jnp.swapaxes(x.reshape(batch, n, size.num_heads, -1), 1, 2).reshape(batch * size.num_heads, n, -1)


def _normalize(norm: Norm, config: ModelConfig) -> Callable[[Float[Array, "..."]], Float[Array, "..."]]:
    """Return the LayerNorm with these parameters as a function."""
    return partial(
        layer_norm, scale=norm.scale, bias=norm.bias, epsilon=config.norm_epsilon, variant=config.norm_variant
    )
