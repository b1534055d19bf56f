"""The layers of the two stacks and the stacks (paper section 3.1)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import ModelConfig, StackSize
from transformer_jax.model.attention import KeysValues, MultiHeadAttention
from transformer_jax.model.cache import Cache
from transformer_jax.model.feed_forward import FeedForward
from transformer_jax.model.masks import PaddedMask
from transformer_jax.model.normalization import LayerNorm
from transformer_jax.types import Params


def make_attention(config: ModelConfig, size: StackSize) -> MultiHeadAttention:
    """Return the attention sub-layer of a configuration."""
    return MultiHeadAttention(
        d_model=config.d_model,
        num_heads=size.num_heads,
        d_k=size.d_k,
        d_v=size.d_v,
        use_bias=config.attention_bias,
        dropout_rate=config.attention_dropout,
        kernel=config.attention_kernel,
        initialization=config.initialization,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )


def make_feed_forward(config: ModelConfig, size: StackSize) -> FeedForward:
    """Return the feed-forward sub-layer of a configuration."""
    return FeedForward(
        d_model=config.d_model,
        d_ff=size.d_ff,
        activation=config.activation,
        dropout_rate=config.activation_dropout,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )


def make_norm(config: ModelConfig) -> LayerNorm:
    """Return the LayerNorm of a configuration."""
    return LayerNorm(config.norm_epsilon, config.norm_variant, config.param_dtype)


Sublayer = Callable[[Float[Array, "b t d_model"]], Float[Array, "b t d_model"]]


class SublayerConnection(nn.Module):
    """Apply a sub-layer with residual connection, LayerNorm and dropout; `config.norm_position` selects the formula.

    post    LayerNorm(x + Dropout(Sublayer(x)))    paper sections 3.1 and 5.4
    pre     x + Dropout(Sublayer(LayerNorm(x)))    tensor2tensor since 2017-10
    """

    config: ModelConfig

    def setup(self) -> None:
        """Create the dropout."""
        self.dropout = nn.Dropout(self.config.residual_dropout)

    def __call__(
        self, x: Float[Array, "b t d_model"], sublayer: Sublayer, norm: LayerNorm, deterministic: bool
    ) -> Float[Array, "b t d_model"]:
        """Apply a sub-layer."""
        if self.config.norm_position == "pre":
            return x + self.dropout(sublayer(norm(x)), deterministic=deterministic)
        return norm(x + self.dropout(sublayer(x), deterministic=deterministic))


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network."""

    config: ModelConfig

    def setup(self) -> None:
        """Create the sub-layers and their norms."""
        config = self.config
        self.connection = SublayerConnection(config)
        self.self_attention = make_attention(config, config.encoder)
        self.self_attention_norm = make_norm(config)
        self.feed_forward = make_feed_forward(config, config.encoder)
        self.feed_forward_norm = make_norm(config)

    def __call__(
        self,
        x: Float[Array, "b s d_model"],
        src_mask: Bool[Array, "#b #h #t s"] | PaddedMask | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b s d_model"]:
        """Apply the layer to the source. `src_mask` is True where a position may be attended to; None: everywhere."""
        attend = partial(self.self_attention, mask=src_mask, deterministic=deterministic)
        feed_forward = partial(self.feed_forward, deterministic=deterministic)
        x = self.connection(x, attend, self.self_attention_norm, deterministic)
        return self.connection(x, feed_forward, self.feed_forward_norm, deterministic)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention over the encoder's output, then the feed-forward network."""

    config: ModelConfig

    def setup(self) -> None:
        """Create the sub-layers and their norms."""
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
        tgt_mask: Bool[Array, "#b #h t t"] | PaddedMask | None = None,
        src_mask: Bool[Array, "#b #h #t s"] | PaddedMask | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """Apply the layer to all target positions at once. A mask is True where a position may be attended to."""
        attend_to_target = partial(self.self_attention, mask=tgt_mask, deterministic=deterministic)
        attend_to_memory = partial(self.cross_attention, memory=memory, mask=src_mask, deterministic=deterministic)
        return self._connect(x, attend_to_target, attend_to_memory, deterministic)

    def step(
        self,
        x: Float[Array, "b k d_model"],
        past: KeysValues,
        cross: KeysValues,
        position: Int[Array, ""],
        tgt_mask: Bool[Array, "b 1 k n"],
        src_mask: Bool[Array, "b 1 1 s"],
    ) -> tuple[Float[Array, "b k d_model"], KeysValues]:
        """Apply the layer to one position of k hypotheses, and return `past` with its keys and values too."""

        def attend_to_target(y: Float[Array, "b k d_model"]) -> Float[Array, "b k d_model"]:
            nonlocal past
            y, past = self.self_attention.attend_and_store(y, past, position * y.shape[1], tgt_mask)
            return y

        attend_to_memory = partial(self.cross_attention.attend, past=cross, mask=src_mask)
        return self._connect(x, attend_to_target, attend_to_memory, True), past

    def _connect(
        self,
        x: Float[Array, "b t d_model"],
        attend_to_target: Sublayer,
        attend_to_memory: Sublayer,
        deterministic: bool,
    ) -> Float[Array, "b t d_model"]:
        """Apply the three sub-layers in the order of Figure 1."""
        feed_forward = partial(self.feed_forward, deterministic=deterministic)
        x = self.connection(x, attend_to_target, self.self_attention_norm, deterministic)
        x = self.connection(x, attend_to_memory, self.cross_attention_norm, deterministic)
        return self.connection(x, feed_forward, self.feed_forward_norm, deterministic)


# What `remat` stores for the backward pass inside a layer; None: nothing.
_REMAT_POLICIES = {"layers": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


def _run_stack(
    stack: "Encoder | Decoder", x: Float[Array, "b t d_model"], inputs: tuple[Any, ...], deterministic: bool
) -> Float[Array, "b t d_model"]:
    """Apply the layers of a stack to x, each with the same `inputs`."""
    config = stack.config

    def run_layer(layer: EncoderLayer | DecoderLayer, x: Float[Array, "b t d_model"]) -> Float[Array, "b t d_model"]:
        return layer(x, *inputs, deterministic=deterministic)

    if config.scan_layers and not stack.is_initializing():
        return _scan_stack(stack, x, run_layer, deterministic)
    if config.remat != "none":
        run_layer = nn.remat(run_layer, policy=_REMAT_POLICIES[config.remat])
    for layer in stack.layer:
        x = run_layer(layer, x)
    return x


def _scan_stack(
    stack: "Encoder | Decoder", x: Float[Array, "b t d_model"], run_layer: Callable[..., Array], deterministic: bool
) -> Float[Array, "b t d_model"]:
    """Apply the layers as one loop over their parameters, so that a layer is compiled once.

    `nn.scan` would store stacked parameters. Stacking them at each call lets a checkpoint load with `scan_layers` on or
    off.
    """
    layers = stack.layer
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(layer.variables["params"] for layer in layers))
    keys = None if deterministic else jax.random.split(stack.make_rng("dropout"), len(layers))
    layer = type(layers[0])(stack.config, parent=None)

    def advance(x: Array, xs: tuple[Params, Array | None]) -> tuple[Array, None]:
        layer_params, key = xs
        rngs = {} if key is None else {"dropout": key}
        out = layer.apply({"params": layer_params}, x, method=run_layer, rngs=rngs)
        return out, None  # type: ignore[return-value]  # a tuple only with mutable collections

    if stack.config.remat != "none":
        advance = jax.checkpoint(advance, prevent_cse=False, policy=_REMAT_POLICIES[stack.config.remat])
    return jax.lax.scan(advance, x, (params, keys))[0]


class Encoder(nn.Module):
    """A stack of encoder layers."""

    config: ModelConfig

    def setup(self) -> None:
        """Create the layers."""
        self.layer = [EncoderLayer(self.config) for _ in range(self.config.encoder.num_layers)]
        if self.config.final_norm:
            self.final_norm = make_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "b s d_model"],
        src_mask: Bool[Array, "#b #h #t s"] | PaddedMask | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b s d_model"]:
        """Map the embedded source to the encoder's output, `memory`."""
        x = _run_stack(self, x, (src_mask,), deterministic)
        return self.final_norm(x) if self.config.final_norm else x


class Decoder(nn.Module):
    """A stack of decoder layers."""

    config: ModelConfig

    def setup(self) -> None:
        """Create the layers."""
        self.layer = [DecoderLayer(self.config) for _ in range(self.config.decoder.num_layers)]
        if self.config.final_norm:
            self.final_norm = make_norm(self.config)

    def __call__(
        self,
        x: Float[Array, "b t d_model"],
        memory: Float[Array, "b s d_model"],
        tgt_mask: Bool[Array, "#b #h t t"] | PaddedMask | None = None,
        src_mask: Bool[Array, "#b #h #t s"] | PaddedMask | None = None,
        *,
        deterministic: bool = True,
    ) -> Float[Array, "b t d_model"]:
        """Map the embedded target, all positions at once, to the hidden states that logits are computed from."""
        x = _run_stack(self, x, (memory, tgt_mask, src_mask), deterministic)
        return self.final_norm(x) if self.config.final_norm else x

    def step(
        self, x: Float[Array, "b k d_model"], cache: Cache, tgt_mask: Bool[Array, "b 1 k n"]
    ) -> tuple[Float[Array, "b k d_model"], tuple[KeysValues, ...]]:
        """Apply the layers to one position of k hypotheses, and return `cache.past` with its keys and values."""
        new = []
        for layer, past, cross in zip(self.layer, cache.past, cache.cross, strict=True):
            x, past = layer.step(x, past, cross, cache.position, tgt_mask, cache.src_mask)
            new.append(past)
        return self.final_norm(x) if self.config.final_norm else x, tuple(new)

    def cross_keys_values(self, memory: Float[Array, "b s d_model"]) -> tuple[KeysValues, ...]:
        """Return the keys and values that each layer's cross-attention projects from the encoder output."""
        return tuple(layer.cross_attention.keys_values(memory) for layer in self.layer)
