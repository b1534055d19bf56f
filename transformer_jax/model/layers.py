"""The layers of the two stacks and the stacks (paper section 3.1)."""

import flax.linen as nn
import jax
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig, StackSize
from transformer_jax.model.attention import KeysValues, MultiHeadAttention
from transformer_jax.model.feed_forward import FeedForward
from transformer_jax.model.normalization import LayerNorm


def make_attention(config: ModelConfig, size: StackSize) -> MultiHeadAttention:
    """An attention sub-layer as the config says."""
    return MultiHeadAttention(
        d_model=config.d_model,
        num_heads=size.num_heads,
        d_k=size.d_k,
        d_v=size.d_v,
        use_bias=config.attention_bias,
        dropout_rate=config.attention_dropout,
        initialization=config.initialization,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )


def make_feed_forward(config: ModelConfig, size: StackSize) -> FeedForward:
    """A feed-forward sub-layer as the config says."""
    return FeedForward(
        d_model=config.d_model,
        d_ff=size.d_ff,
        activation=config.activation,
        dropout_rate=config.activation_dropout,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )


def make_norm(config: ModelConfig) -> LayerNorm:
    """A LayerNorm as the config says."""
    return LayerNorm(config.norm_epsilon, config.norm_variant, config.param_dtype)


class SublayerConnection(nn.Module):
    """What stands around a sub-layer: a layer calls `enter`, its sub-layer, then `leave`.

    post-norm    LayerNorm(x + Dropout(Sublayer(x)))    the paper, sections 3.1 and 5.4
    pre-norm     x + Dropout(Sublayer(LayerNorm(x)))    tensor2tensor since 2017-10
    """

    config: ModelConfig

    def setup(self) -> None:
        self.dropout = nn.Dropout(self.config.residual_dropout)

    def enter(self, x: Float[Array, "b t d_model"], norm: LayerNorm) -> Float[Array, "b t d_model"]:
        """What the sub-layer reads."""
        return norm(x) if self.config.norm_position == "pre" else x

    def leave(
        self,
        x: Float[Array, "b t d_model"],
        output: Float[Array, "b t d_model"],
        norm: LayerNorm,
        deterministic: bool,
    ) -> Float[Array, "b t d_model"]:
        """Dropout, residual and, post-norm, LayerNorm."""
        total = x + self.dropout(output, deterministic=deterministic)
        return total if self.config.norm_position == "pre" else norm(total)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.connection = SublayerConnection(config)
        self.self_attention = make_attention(config, config.encoder)
        self.self_attention_norm = make_norm(config)
        self.feed_forward = make_feed_forward(config, config.encoder)
        self.feed_forward_norm = make_norm(config)

    def __call__(
        self,
        x: Float[Array, "b s d_model"],
        src_mask: Bool[Array, "#b #h #t s"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b s d_model"]:
        """One layer of the encoder."""
        y = self.connection.enter(x, self.self_attention_norm)
        y = self.self_attention(y, y, src_mask, deterministic=deterministic)
        x = self.connection.leave(x, y, self.self_attention_norm, deterministic)
        y = self.connection.enter(x, self.feed_forward_norm)
        y = self.feed_forward(y, deterministic=deterministic)
        return self.connection.leave(x, y, self.feed_forward_norm, deterministic)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention over the encoder's output, then the feed-forward network."""

    config: ModelConfig

    def setup(self) -> None:
        config = self.config
        self.connection = SublayerConnection(config)
        self.self_attention = make_attention(config, config.decoder)
        self.self_attention_norm = make_norm(config)
        self.cross_attention = make_attention(config, config.decoder)
        self.cross_attention_norm = make_norm(config)
        self.feed_forward = make_feed_forward(config, config.decoder)
        self.feed_forward_norm = make_norm(config)

    def __call__(
        self,
        x: Float[Array, "b t d_model"],
        memory: Float[Array, "b s d_model"],
        tgt_mask: Bool[Array, "#b #h t t"] | None = None,
        src_mask: Bool[Array, "#b #h #t s"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """One layer of the decoder, all positions at once."""
        y = self.connection.enter(x, self.self_attention_norm)
        y = self.self_attention(y, y, tgt_mask, deterministic=deterministic)
        x = self.connection.leave(x, y, self.self_attention_norm, deterministic)
        return self._after_self_attention(x, self.cross_attention.keys_values(memory), src_mask, deterministic)

    def step(
        self,
        x: Float[Array, "b 1 d_model"],
        past: KeysValues,
        cross: KeysValues,
        position: Int[Array, ""],
        tgt_mask: Bool[Array, "1 1 1 l"],
        src_mask: Bool[Array, "#b #h #t s"] | None,
    ) -> tuple[Float[Array, "b 1 d_model"], KeysValues]:
        """One layer of the decoder at one position; `past` comes back with this position's keys and values in it."""
        y = self.connection.enter(x, self.self_attention_norm)
        new = self.self_attention.keys_values(y)
        past = KeysValues(
            *(jax.lax.dynamic_update_slice_in_dim(p, n, position, 1) for p, n in zip(past, new, strict=True))
        )
        y = self.self_attention.attend(y, past, tgt_mask)
        x = self.connection.leave(x, y, self.self_attention_norm, True)
        return self._after_self_attention(x, cross, src_mask, True), past

    def _after_self_attention(
        self,
        x: Float[Array, "b t d_model"],
        cross: KeysValues,
        src_mask: Bool[Array, "#b #h #t s"] | None,
        deterministic: bool,
    ) -> Float[Array, "b t d_model"]:
        y = self.connection.enter(x, self.cross_attention_norm)
        y = self.cross_attention.attend(y, cross, src_mask, deterministic=deterministic)
        x = self.connection.leave(x, y, self.cross_attention_norm, deterministic)
        y = self.connection.enter(x, self.feed_forward_norm)
        y = self.feed_forward(y, deterministic=deterministic)
        return self.connection.leave(x, y, self.feed_forward_norm, deterministic)


class Encoder(nn.Module):
    """A stack of encoder layers."""

    config: ModelConfig

    def setup(self) -> None:
        self.layer = [EncoderLayer(self.config) for _ in range(self.config.encoder.num_layers)]
        if self.config.final_norm:
            self.final_norm = make_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "b s d_model"],
        src_mask: Bool[Array, "#b #h #t s"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b s d_model"]:
        """From embedded source to memory."""
        for layer in self.layer:
            x = layer(x, src_mask, deterministic=deterministic)
        return self.final_norm(x) if self.config.final_norm else x


class Decoder(nn.Module):
    """A stack of decoder layers."""

    config: ModelConfig

    def setup(self) -> None:
        self.layer = [DecoderLayer(self.config) for _ in range(self.config.decoder.num_layers)]
        if self.config.final_norm:
            self.final_norm = make_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "b t d_model"],
        memory: Float[Array, "b s d_model"],
        tgt_mask: Bool[Array, "#b #h t t"] | None = None,
        src_mask: Bool[Array, "#b #h #t s"] | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """All positions at once."""
        for layer in self.layer:
            x = layer(x, memory, tgt_mask, src_mask, deterministic=deterministic)
        return self._finish(x)

    def cross_keys_values(self, memory: Float[Array, "b s d_model"]) -> tuple[KeysValues, ...]:
        """Every layer's keys and values of the encoder's output: computed once a sentence."""
        return tuple(layer.cross_attention.keys_values(memory) for layer in self.layer)

    def step(
        self,
        x: Float[Array, "b 1 d_model"],
        past: tuple[KeysValues, ...],
        cross: tuple[KeysValues, ...],
        position: Int[Array, ""],
        tgt_mask: Bool[Array, "1 1 1 l"],
        src_mask: Bool[Array, "#b #h #t s"] | None,
    ) -> tuple[Float[Array, "b 1 d_model"], tuple[KeysValues, ...]]:
        """One position, with the keys and values of those before it."""
        new_past = []
        for layer, layer_past, layer_cross in zip(self.layer, past, cross, strict=True):
            x, layer_past = layer.step(x, layer_past, layer_cross, position, tgt_mask, src_mask)
            new_past.append(layer_past)
        return self._finish(x), tuple(new_past)

    def _finish(self, x: Float[Array, "b t d_model"]) -> Float[Array, "b t d_model"]:
        return self.final_norm(x) if self.config.final_norm else x
