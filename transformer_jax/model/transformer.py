"""The Transformer (paper section 3, Figure 1)."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.attention import KeysValues
from transformer_jax.model.embedding import Embedding, logits_from
from transformer_jax.model.initializers import xavier_uniform
from transformer_jax.model.layers import Decoder, Encoder
from transformer_jax.model.masks import padding_mask, target_mask
from transformer_jax.model.positional import LearnedPositions, sinusoids
from transformer_jax.types import Params


class Cache(NamedTuple):
    """What decoding one position needs of those before it: an explicit value, handed in and handed back."""

    position: Int[Array, ""]
    """Positions decoded so far."""
    past: tuple[KeysValues, ...]
    """Each decoder layer's self-attention keys and values, `b l h d`, filled up to `position`."""
    cross: tuple[KeysValues, ...]
    """Each decoder layer's keys and values of the encoder's output, `b s h d`: they never change."""
    src_mask: Bool[Array, "b 1 1 s"]
    """Which source positions may be attended to."""


class Transformer(nn.Module):
    """Encoder, decoder, embeddings and logits, as a `ModelConfig` says.

    >>> model = Transformer(ModelConfig(vocab_size=11, d_model=8, num_heads=2, d_ff=16, num_layers=1))
    >>> src, tgt_in = jnp.array([[5, 6, 2]]), jnp.array([[1, 7]])
    >>> params = model.init(jax.random.key(0), src, tgt_in)["params"]
    >>> model.apply({"params": params}, src, tgt_in).shape
    (1, 2, 11)
    """

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        has_float64 = jnp.result_type(float) == jnp.float64
        if "float64" in (config.dtype, config.param_dtype) and not has_float64:
            raise UserError(
                f"model.dtype is {config.dtype!r} and model.param_dtype {config.param_dtype!r}: "
                "float64 needs jax.config.update('jax_enable_x64', True) or JAX_ENABLE_X64=1"
            )
        if config.tie_embeddings == "all":
            self.embedding = self._make_embedding(config.vocab_size)
        else:
            self.source_embedding = self._make_embedding(config.source_rows)
            self.target_embedding = self._make_embedding(config.vocab_size)
        if config.tie_embeddings == "none":
            self.output_projection = OutputProjection(config.vocab_size, config.d_model, config.param_dtype)
        if config.logits_bias:
            self.logits_bias = self.param(
                "logits_bias", nn.initializers.zeros, (config.vocab_size,), jnp.dtype(config.param_dtype)
            )
        if config.positions == "learned":
            self.source_positions = self._make_positions()
            self.target_positions = self._make_positions()
        self.dropout = nn.Dropout(config.residual_dropout)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    def __call__(
        self,
        src: Int[Array, "b s"],
        tgt_in: Int[Array, "b t"],
        *,
        src_mask: Bool[Array, "b #h #t s"] | None = None,
        tgt_mask: Bool[Array, "b #h t t"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "b t v"]:
        """Logits of the next token at each target position. Masks default to those that follow from `pad_id`.

        With `deterministic=False` dropout is on and needs `rngs={"dropout": key}`.
        """
        if src_mask is None:
            src_mask = padding_mask(src, self.config.pad_id)
        memory = self.encode(src, src_mask=src_mask, deterministic=deterministic)
        return self.decode(tgt_in, memory, src_mask, tgt_mask=tgt_mask, deterministic=deterministic)

    def encode(
        self,
        src: Int[Array, "b s"],
        *,
        src_mask: Bool[Array, "b #h #t s"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "b s d_model"]:
        """The encoder's output, `memory`."""
        if src_mask is None:
            src_mask = padding_mask(src, self.config.pad_id)
        x = self._source_embedding(src) + self._positions("source", src.shape[1])
        return self.encoder(self.dropout(x, deterministic=deterministic), src_mask, deterministic=deterministic)

    def decode(
        self,
        tgt_in: Int[Array, "b t"],
        memory: Float[Array, "b s d_model"],
        src_mask: Bool[Array, "b #h #t s"],
        *,
        tgt_mask: Bool[Array, "b #h t t"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "b t v"]:
        """Logits at every position of `tgt_in`."""
        if tgt_mask is None:
            tgt_mask = target_mask(tgt_in, self.config.pad_id)
        length = tgt_in.shape[1]
        x = self._embed_target(tgt_in, jnp.arange(length)) + self._positions("target", length)
        x = self.dropout(x, deterministic=deterministic)
        return self._logits(self.decoder(x, memory, tgt_mask, src_mask, deterministic=deterministic))

    def init_cache(
        self, memory: Float[Array, "b s d_model"], src_mask: Bool[Array, "b 1 1 s"], max_length: int
    ) -> Cache:
        """An empty cache for decoding up to `max_length` positions; keys and values of `memory` are computed here."""
        size, batch = self.config.decoder, memory.shape[0]

        def empty(width: int) -> Array:
            return jnp.zeros((batch, max_length, size.num_heads, width), memory.dtype)

        past = tuple(KeysValues(empty(size.d_k), empty(size.d_v)) for _ in range(size.num_layers))
        return Cache(jnp.zeros((), jnp.int32), past, self.decoder.cross_keys_values(memory), src_mask)

    def decode_step(self, tokens: Int[Array, "b"], cache: Cache) -> tuple[Float[Array, "b v"], Cache]:
        """Reads one more token a row (the start token first) and gives the logits of the next one.

        Calls beyond the cache's `max_length` are not noticed: the position is not known when this is compiled.
        """
        max_length = cache.past[0].key.shape[1]
        x = self._embed_target(tokens[:, None], cache.position[None])
        x += jax.lax.dynamic_slice_in_dim(self._positions("target", max_length), cache.position, 1, axis=1)
        tgt_mask = (jnp.arange(max_length) <= cache.position)[None, None, None, :]
        x, past = self.decoder.step(x, cache.past, cache.cross, cache.position, tgt_mask, cache.src_mask)
        return self._logits(x)[:, 0], cache._replace(position=cache.position + 1, past=past)

    def _make_embedding(self, rows: int) -> Embedding:
        config = self.config
        return Embedding(
            rows, config.d_model, config.scale_embeddings, config.initialization, config.dtype, config.param_dtype
        )

    def _make_positions(self) -> LearnedPositions:
        config = self.config
        return LearnedPositions(config.max_length, config.d_model, config.position_offset, config.param_dtype)

    def _source_embedding(self, src: Int[Array, "b s"]) -> Float[Array, "b s d_model"]:
        return (self.embedding if self.config.tie_embeddings == "all" else self.source_embedding)(src)

    def _target_table(self) -> Embedding:
        return self.embedding if self.config.tie_embeddings == "all" else self.target_embedding

    def _embed_target(self, tokens: Int[Array, "b t"], positions: Int[Array, "t"]) -> Float[Array, "b t d_model"]:
        x = self._target_table()(tokens)
        if self.config.decoder_start == "zeros":
            return jnp.where((positions == 0)[None, :, None], jnp.zeros_like(x), x)
        return x

    def _positions(self, side: str, length: int) -> Float[Array, "1 t d_model"]:
        config = self.config
        if config.positions == "learned":
            table = (self.source_positions if side == "source" else self.target_positions)(length)
        else:
            table = jnp.asarray(
                sinusoids(length, config.d_model, config.positions, config.position_exponent, config.position_offset),
                jnp.promote_types(config.dtype, jnp.float32),
            )
        return table.astype(config.dtype)[None]

    def _logits(self, x: Float[Array, "b t d_model"]) -> Float[Array, "b t v"]:
        projection = self.output_projection if self.config.tie_embeddings == "none" else self._target_table()
        logits = projection.logits(x)
        return logits + self.logits_bias.astype(logits.dtype)[None, None] if self.config.logits_bias else logits


class OutputProjection(nn.Module):
    """The pre-softmax linear transformation where no embedding table serves for it."""

    vocab_size: int
    d_model: int
    param_dtype: str = "float32"

    def setup(self) -> None:
        init = xavier_uniform(self.d_model, self.vocab_size)
        self.kernel = self.param("kernel", init, (self.d_model, self.vocab_size), jnp.dtype(self.param_dtype))

    def logits(self, x: Float[Array, "b t d_model"]) -> Float[Array, "b t v"]:
        """x W, in at least float32."""
        return logits_from(x, self.kernel.T)


def attention_maps(
    model: Transformer, params: Params, src: Int[Array, "b s"], tgt_in: Int[Array, "b t"]
) -> dict[str, Float[Array, "b h t s"]]:
    """The attention weights of every layer: {"encoder/layer_0/self_attention": ..., ...}, rows sum to 1."""
    _, state = model.apply({"params": params}, src, tgt_in, capture_intermediates=lambda _, method: method == "weights")
    paths = jax.tree_util.tree_flatten_with_path(state["intermediates"], is_leaf=lambda x: isinstance(x, tuple))[0]
    return {"/".join(str(key.key) for key in path[:-1]): values[0] for path, values in paths}


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model, without making them.

    >>> count_parameters(ModelConfig.base(37_000))
    63045632
    """
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config)))


def abstract_params(config: ModelConfig) -> Params:
    """The parameter tree as shapes and dtypes (`jax.ShapeDtypeStruct`), without making it."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)["params"]
