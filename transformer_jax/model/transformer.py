"""The Transformer (paper section 3, Figure 1)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import KeysValues
from transformer_jax.model.cache import Cache
from transformer_jax.model.embedding import Embedding, Unembedding, unembed
from transformer_jax.model.initializers import xavier_uniform
from transformer_jax.model.layers import Decoder, Encoder
from transformer_jax.model.linear import concatenate_linear_maps, matmul, prepare_linear_maps, quantize
from transformer_jax.model.masks import PaddedMask, causal_mask, padding_mask, segment_mask, target_mask
from transformer_jax.model.positional import LearnedPositions, segment_positions, sinusoids
from transformer_jax.types import Params, UserError


class Transformer(nn.Module):
    """The encoder-decoder model of Figure 1, with the sizes and choices of its `config`.

    >>> model = Transformer(ModelConfig(vocab_size=11, d_model=8, num_heads=2, d_ff=16, num_layers=1))
    >>> src, tgt_in = jnp.array([[5, 6, 2]]), jnp.array([[1, 7]])
    >>> params = model.init(jax.random.key(0), src, tgt_in)["params"]
    >>> model.apply({"params": params}, src, tgt_in).shape
    (1, 2, 11)
    """

    config: ModelConfig

    def setup(self) -> None:
        """Create the embeddings and the two stacks."""
        config = self.config
        if "float64" in (config.dtype, config.param_dtype) and jnp.result_type(float) != jnp.float64:
            raise UserError(
                f"model.dtype is {config.dtype!r} and model.param_dtype {config.param_dtype!r}: "
                "float64 needs jax.config.update('jax_enable_x64', True) or JAX_ENABLE_X64=1"
            )
        sizes = config.d_model, config.scale_embeddings, config.initialization, config.dtype, config.param_dtype
        if config.tie_embeddings == "all":
            self.embedding = Embedding(config.vocab_size, *sizes)
            self.source_embedding = self.target_embedding = self.embedding
        else:
            self.source_embedding = Embedding(config.source_rows, *sizes)
            self.target_embedding = Embedding(config.vocab_size, *sizes)
        if config.tie_embeddings == "none":
            self.output_projection = OutputProjection(config.vocab_size, config.d_model, config.param_dtype)
        if config.logits_bias:
            self.logits_bias = self.param(
                "logits_bias", nn.initializers.zeros, (config.vocab_size,), jnp.dtype(config.param_dtype)
            )
        if config.positions == "learned":
            table = config.max_length, config.d_model, config.position_offset, config.param_dtype
            self.source_positions, self.target_positions = LearnedPositions(*table), LearnedPositions(*table)
        self.dropout = nn.Dropout(config.residual_dropout)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def __call__(
        self,
        src: Int[Array, "b s"],
        tgt_in: Int[Array, "b t"],
        *,
        src_mask: Bool[Array, " b #h #t s"] | PaddedMask | None = None,
        tgt_mask: Bool[Array, " b #h t t"] | PaddedMask | None = None,
        src_segments: Int[Array, "b s"] | None = None,
        tgt_segments: Int[Array, "b t"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "b t v"]:
        """Return the logits of the next token at each target position.

        Args:
            src: Source token ids, ending with EOS, then padding.
            tgt_in: Target token ids that the decoder reads, beginning with the start token.
            src_mask: Which source positions may be attended to. None: all tokens except padding.
            tgt_mask: Which target positions each target position may attend to. None: `target_mask`.
            src_segments: Sentence number of each source token of packed rows, from 1; 0 for padding. Segments define
                the masks, and each sentence's positions start at 0.
            tgt_segments: Sentence number of each target token of packed rows.
            deterministic: Turn dropout off. With False, pass `rngs={"dropout": key}`.

        Raises:
            ValueError: Segments are given for one side only, or together with masks.
            UserError: A sequence is longer than the learned position table, or the mesh has Explicit axes.
        """
        x, unembedding = self.hidden_states(
            src,
            tgt_in,
            src_mask=src_mask,
            tgt_mask=tgt_mask,
            src_segments=src_segments,
            tgt_segments=tgt_segments,
            deterministic=deterministic,
        )
        return unembed(x, unembedding)

    def hidden_states(
        self,
        src: Int[Array, "b s"],
        tgt_in: Int[Array, "b t"],
        *,
        src_mask: Bool[Array, " b #h #t s"] | PaddedMask | None = None,
        tgt_mask: Bool[Array, " b #h t t"] | PaddedMask | None = None,
        src_segments: Int[Array, "b s"] | None = None,
        tgt_segments: Int[Array, "b t"] | None = None,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "b t d_model"], Unembedding]:
        """Return the decoder's output and the unembedding, for a loss that computes the logits in chunks."""
        if (src_segments is None) != (tgt_segments is None):
            raise ValueError("segments are given for one side only. Pass both src_segments and tgt_segments.")
        if src_segments is not None and (src_mask is not None or tgt_mask is not None):
            raise ValueError("masks and segments are given together. Leave the masks out: segments define them.")
        memory = self.encode(src, src_mask=src_mask, segments=src_segments, deterministic=deterministic)
        if src_segments is not None and tgt_segments is not None:
            src_mask = segment_mask(tgt_segments, src_segments)
        elif src_mask is None:
            src_mask = padding_mask(src, self.config.pad_id)
        x = self.decode_hidden(
            tgt_in, memory, src_mask, tgt_mask=tgt_mask, segments=tgt_segments, deterministic=deterministic
        )
        return x, self.unembedding()

    def encode(
        self,
        src: Int[Array, "b s"],
        *,
        src_mask: Bool[Array, " b #h #t s"] | PaddedMask | None = None,
        segments: Int[Array, "b s"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "b s d_model"]:
        """Return the encoder's output, `memory`; see `__call__` for the arguments."""
        if src_mask is None:
            src_mask = padding_mask(src, self.config.pad_id) if segments is None else segment_mask(segments, segments)
        x = self.source_embedding(src) + self._positions("source", src.shape[1], segments)
        return self.encoder(self.dropout(x, deterministic=deterministic), src_mask, deterministic=deterministic)

    def decode(
        self,
        tgt_in: Int[Array, "b t"],
        memory: Float[Array, "b s d_model"],
        src_mask: Bool[Array, " b #h #t s"] | PaddedMask,
        *,
        tgt_mask: Bool[Array, " b #h t t"] | PaddedMask | None = None,
        segments: Int[Array, "b t"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "b t v"]:
        """Return the logits of the next token at each target position, from the encoder's output; see `__call__`."""
        x = self.decode_hidden(
            tgt_in, memory, src_mask, tgt_mask=tgt_mask, segments=segments, deterministic=deterministic
        )
        return unembed(x, self.unembedding())

    def decode_hidden(
        self,
        tgt_in: Int[Array, "b t"],
        memory: Float[Array, "b s d_model"],
        src_mask: Bool[Array, " b #h #t s"] | PaddedMask,
        *,
        tgt_mask: Bool[Array, " b #h t t"] | PaddedMask | None = None,
        segments: Int[Array, "b t"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """Return the decoder's output at each target position, from the encoder's output; see `__call__`."""
        length = tgt_in.shape[1]
        if tgt_mask is None and segments is not None:
            tgt_mask = causal_mask(length) & segment_mask(segments, segments)
        elif tgt_mask is None:
            tgt_mask = target_mask(tgt_in, self.config.pad_id)
        positions = jnp.arange(length)[None] if segments is None else segment_positions(segments)
        x = self._embed_target(tgt_in, positions) + self._positions("target", length, segments)
        x = self.dropout(x, deterministic=deterministic)
        return self.decoder(x, memory, tgt_mask, src_mask, deterministic=deterministic)

    def init_cache(
        self,
        memory: Float[Array, "b s d_model"],
        src_mask: Bool[Array, "b 1 1 s"],
        *,
        max_length: int,
        beam_size: int = 1,
        capacity: int | None = None,
    ) -> Cache:
        """Return an empty cache for `beam_size` hypotheses of each sentence, with the keys and values of `memory`.

        It has `capacity` positions, by default all `max_length`; `resize_cache` adds the others.
        """
        self._positions("target", max_length)  # raises UserError here, and not when a loop is compiled
        size, b, capacity = self.config.decoder, len(memory), capacity or max_length
        key, value = (
            jnp.zeros((b * size.num_heads, capacity * beam_size, width), memory.dtype) for width in (size.d_k, size.d_v)
        )
        return Cache(
            position=jnp.zeros((), jnp.int32),
            past=(KeysValues(key, value),) * size.num_layers,
            ancestry=jnp.full((b, beam_size, capacity), -1, jnp.int32),
            cross=self.decoder.cross_keys_values(memory),
            src_mask=src_mask,
        )

    def decode_step(self, tokens: Int[Array, " rows"], cache: Cache) -> tuple[Float[Array, "rows v"], Cache]:
        """Read the last token of each row, and return the logits of its next token, at least float32, and the cache.

        Row i is hypothesis i % k of sentence i // k. The first call reads the start token. The position is a traced
        value, so decoding beyond the cache's capacity is not detected. The parameters are the result of
        `prepare_for_decoding`.
        """
        b, k, capacity = cache.ancestry.shape
        x = self._embed_target(tokens.reshape(b, k), cache.position[None, None])
        x += jax.lax.dynamic_slice_in_dim(self._positions("target", capacity), cache.position, 1, axis=1)

        own = jnp.arange(k, dtype=jnp.int32)
        written = jnp.broadcast_to(own[None, :, None], (b, k, 1))
        ancestry = jax.lax.dynamic_update_slice_in_dim(cache.ancestry, written, cache.position, 2)
        tgt_mask = (ancestry[:, :, :, None] == own[None, None, None]).reshape(b, 1, k, capacity * k)

        x, past = self.decoder.step(x, cache, tgt_mask)
        x = x.reshape(b * k, -1)
        logits = matmul(x, self.get_variable("params", "logits_matrix"), jnp.promote_types(x.dtype, jnp.float32))
        if self.config.logits_bias:
            logits += self.logits_bias.astype(logits.dtype)[None]
        return logits, cache._replace(position=cache.position + 1, past=past, ancestry=ancestry)

    def _embed_target(self, tokens: Int[Array, "b t"], positions: Int[Array, "#b #t"]) -> Float[Array, "b t d_model"]:
        x = self.target_embedding(tokens)
        if self.config.decoder_start == "zeros":  # tensor2tensor's first input
            return jnp.where((positions == 0)[..., None], jnp.zeros_like(x), x)
        return x

    def _positions(
        self, side: str, length: int, segments: Int[Array, "b t"] | None = None
    ) -> Float[Array, "#b t d_model"]:
        """Return the vectors of positions 0 to length - 1, or of each token's position in its segment."""
        config = self.config
        if config.positions == "learned":
            learned = self.source_positions if side == "source" else self.target_positions
            x = learned(length)[None] if segments is None else learned.at(segment_positions(segments))
            return x.astype(config.dtype)
        sines = sinusoids(length, config.d_model, config.positions, config.position_exponent, config.position_offset)
        table = jnp.asarray(sines, jnp.promote_types(config.dtype, jnp.float32)).astype(config.dtype)
        return table[None] if segments is None else jnp.take(table, segment_positions(segments), axis=0)

    def unembedding(self) -> Unembedding:
        """Return the parameters that map the decoder's output to logits."""
        is_tied = self.config.tie_embeddings != "none"
        table = self.target_embedding.table if is_tied else self.output_projection.kernel.T
        return Unembedding(table, self.logits_bias if self.config.logits_bias else None)


class OutputProjection(nn.Module):
    """Own the `kernel` [d_model, vocab_size] of the logits, in a model that does not tie it to an embedding table."""

    vocab_size: int
    d_model: int
    param_dtype: str = "float32"

    def setup(self) -> None:
        """Create the kernel."""
        init = xavier_uniform(self.d_model, self.vocab_size)
        self.kernel = self.param("kernel", init, (self.d_model, self.vocab_size), jnp.dtype(self.param_dtype))


def attention_maps(
    model: Transformer, params: Params, src: Int[Array, "b s"], tgt_in: Int[Array, "b t"]
) -> dict[str, Float[Array, "b h t s"]]:
    """Return the attention weights of every layer: {"encoder/layer_0/self_attention": ..., ...}.

    Args:
        model: The model, whose dropout stays off.
        params: Its parameters.
        src: Source token ids.
        tgt_in: Target token ids that the decoder reads.

    Returns:
        Weights by path. Each row sums to 1, or to 0 for a query that may attend to nothing.
    """
    # Neither a loop over layers nor a fused kernel exposes its weights.
    model = Transformer(dataclasses.replace(model.config, scan_layers=False, attention_kernel="xla"))
    _, state = model.apply({"params": params}, src, tgt_in, capture_intermediates=lambda _, method: method == "weights")
    paths = jax.tree_util.tree_flatten_with_path(state["intermediates"], is_leaf=lambda x: isinstance(x, tuple))[0]
    return {jax.tree_util.keystr(path[:-1], simple=True, separator="/"): values[0] for path, values in paths}


def prepare_for_decoding(params: Params, config: ModelConfig, *, int8: bool = False) -> Params:
    """Return the parameters in the layout and dtypes that `Transformer.decode_step` computes with.

    Queries, keys and values of a self-attention get one kernel, as do keys and values of a cross-attention, and
    `logits_matrix` maps hidden states to logits. With `int8` the matrices of the decoder and of the logits are rounded
    to 8 bits (`quantize`).
    """

    def fuse(attention: Params, name: str, *parts: str) -> Params:
        fused = {name: concatenate_linear_maps([attention[part] for part in parts])}
        return fused | {part: value for part, value in attention.items() if part not in parts}

    decoder = dict(params["decoder"])
    for name, layer in params["decoder"].items():
        if name != "final_norm":
            decoder[name] = layer | {
                "self_attention": fuse(layer["self_attention"], "query_key_value", "query", "key", "value"),
                "cross_attention": fuse(layer["cross_attention"], "key_value", "key", "value"),
            }
    table = params["embedding" if config.tie_embeddings == "all" else "target_embedding"]["table"]
    matrix = params["output_projection"]["kernel"] if config.tie_embeddings == "none" else table.T
    return params | {
        "decoder": prepare_linear_maps(decoder, config.dtype, int8=int8),
        "logits_matrix": quantize(matrix) if int8 else matrix.astype(config.dtype),
    }


def count_parameters(config: ModelConfig) -> int:
    """Return the number of parameters of the model without initializing them.

    >>> count_parameters(ModelConfig.base(37_000))
    63045632
    """
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))


def abstract_params(config: ModelConfig) -> Params:
    """Return the parameter tree as shapes and dtypes (`jax.ShapeDtypeStruct`) without initializing it."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]
