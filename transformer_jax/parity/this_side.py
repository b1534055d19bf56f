"""This side of a comparison: a model of this package, which answers what an `Oracle` answers."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer_jax.config import DecodingConfig, ModelConfig, TrainingConfig
from transformer_jax.decoding.decode import prepare, search, search_spec
from transformer_jax.decoding.translator import pad
from transformer_jax.interop.tables import flatten
from transformer_jax.model.attention import MultiHeadAttention
from transformer_jax.model.feed_forward import FeedForward
from transformer_jax.model.masks import padding_mask, target_mask
from transformer_jax.model.normalization import LayerNorm
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.loss import LossSpec
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import TrainState, dropout_rng, train_step
from transformer_jax.types import Batch, Params

Arrays = dict[str, np.ndarray]
"""Outputs of sub-layers, parameters or gradients by path."""
Hypothesis = tuple[list[int], float]
"""Token ids with EOS and without the start token, and the score that ranks them."""


class Trained(NamedTuple):
    """Results of a few updates."""

    losses: list[float]  # before each update
    gradients: Arrays  # of the first update's loss
    params: Arrays  # after the last update


class Masks(NamedTuple):
    """Which masks `Side.sublayers` uses."""

    encoder_padding: bool = True  # hides padding from the encoder's self-attention
    cross_padding: bool = True  # hides padding from the decoder's attention over the encoder's output
    causal: bool = True  # hides later positions from the decoder's self-attention

    def logits(self, model: Transformer, src: jax.Array, tgt_in: jax.Array) -> jax.Array:
        """Return the model's logits `b t v`, computed with these masks."""
        seen, tgt_mask = padding_mask(src, model.config.pad_id), target_mask(tgt_in, model.config.pad_id)
        everything = jnp.ones_like(seen)
        memory = model.encode(src, src_mask=seen if self.encoder_padding else everything)
        if not self.causal:  # the last position may attend to everything but padding, and now all positions may
            tgt_mask = jnp.broadcast_to(tgt_mask[:, :, -1:], tgt_mask.shape)
        return model.decode(tgt_in, memory, seen if self.cross_padding else everything, tgt_mask=tgt_mask)


ALL_MASKS = Masks()


@dataclass(frozen=True)
class Side:
    """A model of this package."""

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

    def sublayers(self, src: np.ndarray, tgt_in: np.ndarray) -> Arrays:
        """Return the output of every sub-layer by its path, the sums of embeddings and positions, and the logits."""

        def is_wanted(module: nn.Module, method: str) -> bool:
            # The model's own dropout receives the sums of embeddings and positions.
            is_sublayer = isinstance(module, MultiHeadAttention | FeedForward | LayerNorm)
            return method == "__call__" and (is_sublayer or module.path == ("dropout",))

        # Not jitted, because the search for a cause runs many variants, which share their compiled operations.
        logits, state = Transformer(self.config).apply(
            {"params": jax.tree.map(jnp.asarray, self.params)},
            jnp.asarray(src),
            jnp.asarray(tgt_in),
            method=self.masks.logits,
            capture_intermediates=is_wanted,
        )
        # Each module's path has the values that its method returned, one per call.
        seen = {path.rpartition("/")[0]: values for path, values in flatten(state["intermediates"]).items()}
        embeddings = dict(zip(("encoder/embedding", "decoder/embedding"), seen.pop("dropout"), strict=True))
        return _numpy(embeddings | {name: values[0] for name, values in seen.items()} | {"logits": logits})

    def train(self, batches: Sequence[Batch], training: TrainingConfig) -> Trained:
        """Run one update per batch with the package's own training step."""
        optimizer = optax.chain(_recorder(), make_optimizer(training, self.config.d_model))
        loss = LossSpec(training.label_smoothing, training.label_smoothing_over)
        step = jax.jit(partial(train_step, model=Transformer(self.config), optimizer=optimizer, loss=loss))
        params = jax.tree.map(jnp.asarray, self.params)
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
        losses, gradients = [], Arrays()
        for batch in batches:
            state, metrics = step(state, batch, dropout_rng(0))
            losses.append(float(metrics.loss))
            gradients = gradients or _numpy(flatten(state.opt_state[0]))
        return Trained(losses, gradients, _numpy(flatten(state.params)))

    def search(self, src: np.ndarray, limits: Sequence[int], decoding: DecodingConfig) -> list[Hypothesis]:
        """Return the best hypothesis of each row, by greedy search if beam_size is 1."""
        spec = search_spec(
            self.config,
            decoding,
            max_lengths=np.asarray(limits, np.int32),
            max_length=max(limits),
            forbidden_ids=decoding.forbidden_ids,
        )
        params = (prepare(self.params, self.config, decoding.quantization),)
        models, quantization = (Transformer(self.config),), decoding.quantization
        found = search(params, jnp.asarray(src, jnp.int32), spec, models=models, quantization=quantization)
        tokens, lengths, scores = (np.asarray(leaf)[:, 0] for leaf in (found.tokens, found.lengths, found.scores))
        return [(row[:end].tolist(), float(score)) for row, end, score in zip(tokens, lengths, scores, strict=True)]


def convert_source(src: np.ndarray, origin: ModelConfig, target: ModelConfig) -> np.ndarray:
    """Return padded source ids `b s` of one configuration with the BOS and EOS of another configuration."""
    if (origin.source_bos, origin.source_eos) == (target.source_bos, target.source_eos):
        return src
    start, end = [target.bos_id] * target.source_bos, [target.eos_id] * target.source_eos
    rows = []
    for row in src:
        ids = row[row != origin.pad_id].tolist()
        rows.append([*start, *ids[int(origin.source_bos) : len(ids) - origin.source_eos], *end])
    return padded(rows, target.pad_id)


def padded(rows: Sequence[Sequence[int]], pad_id: int) -> np.ndarray:
    """Return rows of token ids as one array, padded on the right."""
    return pad(rows, (len(rows), max(map(len, rows))), pad_id)


def _recorder() -> optax.GradientTransformation:
    """Return a transformation that changes nothing and whose state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda gradients, *_: (gradients, gradients)
    )


def _numpy(leaves: dict[str, jax.Array]) -> Arrays:
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}
