"""This side of a comparison: the outputs of this package's model, sub-layer by sub-layer, in training and search."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.config import DecodingConfig, ModelConfig, TrainingConfig
from transformer_jax.decoding.decode import search, search_spec
from transformer_jax.interop.tables import flatten
from transformer_jax.model.attention import MultiHeadAttention
from transformer_jax.model.feed_forward import FeedForward
from transformer_jax.model.masks import padding_mask, target_mask
from transformer_jax.model.normalization import LayerNorm
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.loss import LossSpec
from transformer_jax.training.optimizer import make_optimizer, make_schedule
from transformer_jax.training.step import TrainState, dropout_rng, train_step
from transformer_jax.types import Batch, Params

Arrays = dict[str, np.ndarray]


class Masks(NamedTuple):
    """Which masks a side uses."""

    encoder_padding: bool = True
    """Padding of the source is hidden from the encoder's self-attention."""
    cross_padding: bool = True
    """Padding of the source is hidden from the decoder's attention over the encoder's output."""
    causal: bool = True
    """Later positions are hidden from the decoder's self-attention."""


ALL_MASKS = Masks()


class MaskedTransformer(Transformer):
    """The model without some of its masks."""

    masks: Masks = ALL_MASKS

    def hidden_states(self, src: Any, tgt_in: Any, *, deterministic: bool = True, **_: Any) -> Any:
        """Return the decoder's output and the unembedding, as `Transformer` does."""
        seen = padding_mask(src, self.config.pad_id)
        everything = jnp.ones_like(seen)
        memory = self.encode(
            src, src_mask=seen if self.masks.encoder_padding else everything, deterministic=deterministic
        )
        tgt_mask = target_mask(tgt_in, self.config.pad_id)
        x = self.decode_hidden(
            tgt_in,
            memory,
            seen if self.masks.cross_padding else everything,
            # The last position may attend to everything but padding. Without causality all positions may.
            tgt_mask=tgt_mask if self.masks.causal else jnp.broadcast_to(tgt_mask[:, :, -1:], tgt_mask.shape),
            deterministic=deterministic,
        )
        return x, self.unembedding()


@dataclass(frozen=True)
class Side:
    """A model of this package: configuration, parameters, masks."""

    config: ModelConfig
    params: Params
    masks: Masks = ALL_MASKS

    def astype(self, dtype: str) -> "Side":
        """Return the side in another dtype, without dropout, and computed so that every sub-layer is visible."""
        off = dict.fromkeys(("residual_dropout", "attention_dropout", "activation_dropout"), 0.0)
        plain = {"attention_kernel": "xla", "remat": "none", "scan_layers": False}
        changes = {"dtype": dtype, "param_dtype": dtype, **off, **plain}
        config = dataclasses.replace(self.config, **changes)  # type: ignore[arg-type]  # values of mixed types
        params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), self.params)
        return dataclasses.replace(self, config=config, params=params)

    @property
    def model(self) -> Transformer:
        """Module that computes the side."""
        return Transformer(self.config) if all(self.masks) else MaskedTransformer(self.config, masks=self.masks)


def convert_source(src: np.ndarray, origin: ModelConfig, target: ModelConfig) -> np.ndarray:
    """Return source ids `b s` with the start and end symbols of another configuration.

    Args:
        src: Padded source ids.
        origin: Configuration whose BOS and EOS the ids have.
        target: Configuration whose BOS and EOS the result has.
    """
    if (origin.source_bos, origin.source_eos) == (target.source_bos, target.source_eos):
        return src
    start, end = [target.bos_id] * target.source_bos, [target.eos_id] * target.source_eos
    rows = []
    for row in src:
        ids = row[row != origin.pad_id].tolist()
        rows.append([*start, *ids[int(origin.source_bos) : len(ids) - origin.source_eos], *end])
    width = max(map(len, rows))
    return np.array([row + [target.pad_id] * (width - len(row)) for row in rows], src.dtype)


def sublayers(side: Side, src: np.ndarray, tgt_in: np.ndarray) -> Arrays:
    """Return the output of every sub-layer by its path, the sums of embeddings and positions, and `logits` last."""
    wanted = (MultiHeadAttention, FeedForward, LayerNorm)

    def is_wanted(module: Any, method: str) -> bool:
        # The model's own dropout receives the sums of embeddings and positions.
        return method == "__call__" and (isinstance(module, wanted) or module.path == ("dropout",))

    # Not jitted, because the search for a cause runs many variants, which share their compiled operations.
    logits, state = side.model.apply(
        {"params": jax.tree.map(jnp.asarray, side.params)},
        jnp.asarray(src),
        jnp.asarray(tgt_in),
        capture_intermediates=is_wanted,
    )
    # Each module's path has the values that its method returned, one per call.
    seen = {path.rpartition("/")[0]: values for path, values in flatten(state["intermediates"]).items()}
    embeddings = dict(zip(("encoder/embedding", "decoder/embedding"), seen.pop("dropout"), strict=True))
    outputs = embeddings | {name: values[0] for name, values in seen.items()} | {"logits": logits}
    return {name: np.asarray(value) for name, value in outputs.items()}


def learning_rates(training: TrainingConfig, d_model: int, count: int) -> list[float]:
    """Return the optimizer's learning rate of each of the first `count` updates."""
    return np.asarray(jax.jit(make_schedule(training, d_model))(jnp.arange(count))).tolist()


class Trained(NamedTuple):
    """Results of a few updates."""

    losses: list[float]
    """Mean loss over the target tokens before each update."""
    gradients: Arrays
    """Gradients of the first update's loss."""
    params: Arrays
    """Parameters after the last update."""


def train(side: Side, batches: Sequence[Batch], training: TrainingConfig) -> Trained:
    """Run one update per batch with the package's own training step."""
    optimizer = optax.chain(_recorder(), make_optimizer(training, side.config.d_model))
    step = jax.jit(
        partial(
            train_step,
            model=side.model,
            optimizer=optimizer,
            loss=LossSpec(training.label_smoothing, training.label_smoothing_over),
        )
    )
    params = jax.tree.map(jnp.asarray, side.params)
    state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    losses, gradients = [], Arrays()
    for batch in batches:
        state, metrics = step(state, batch, dropout_rng(0))
        losses.append(float(metrics.loss))
        gradients = gradients or _numpy(state.opt_state[0])
    return Trained(losses, gradients, _numpy(state.params))


def _recorder() -> optax.GradientTransformation:
    """Return a transformation that changes nothing and whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda gradients, *_: (gradients, gradients)
    )


def lines(
    side: Side, src: np.ndarray, limits: Sequence[int], decoding: DecodingConfig
) -> list[tuple[list[int], float]]:
    """Return the best hypothesis of each row: its tokens with EOS, and the score that ranks it."""
    spec = search_spec(
        side.config,
        decoding,
        max_lengths=np.asarray(limits, np.int32),
        max_length=max(limits),
        forbidden_ids=decoding.forbidden_ids,
    )
    found = search(
        side.params,
        jnp.asarray(src, jnp.int32),
        spec,
        model=Transformer(side.config),
        quantization=decoding.quantization,
    )
    tokens, lengths, scores = (np.asarray(leaf)[:, 0] for leaf in (found.tokens, found.lengths, found.scores))
    return [(row[:length].tolist(), float(score)) for row, length, score in zip(tokens, lengths, scores, strict=True)]


def _numpy(params: Params) -> Arrays:
    return {name: np.asarray(leaf) for name, leaf in flatten(params).items()}
