"""How likely a run finds given translations, pair by pair."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.data.batching import Rows, Shape, make_batch
from transformer_jax.data.encoding import encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.scoring import length_penalty
from transformer_jax.decoding.translator import Translator, padded_length
from transformer_jax.evaluation.evaluate import check_lengths
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import Batch, Params

_MOST_LOGITS = 2**25  # of a batch, 128 MB in float32
_MOST_TOKENS = 4096  # of a batch's longer side


class PairScore(NamedTuple):
    """What a run makes of a pair."""

    log_prob: float
    """log P(target | source), the sum over the target's tokens and EOS, in nats."""
    num_tokens: int
    """Of the target, EOS counted."""
    score: float
    """log-probability / length penalty, by which the run's search would rank the target."""


def score_pairs(translator: Translator, pairs: Pairs) -> list[PairScore]:
    """The log-probability of each target given its source.

    Args:
        translator: the run.
        pairs: the pairs; an empty target is an EOS alone.

    Returns:
        One score for each pair, in their order.

    Raises:
        UserError: a pair that is too long.
    """
    config, decoding = translator.config.model, translator.config.decoding
    encoded = encode_pairs(pairs, translator.tokenizers, config)
    check_lengths(encoded, pairs, config)
    source, target = encoded.source_lengths, encoded.target_lengths
    room = config.max_length - config.position_offset if config.positions == "learned" else 1 << 30
    log_probs, model = np.zeros(len(pairs)), Transformer(config)
    # Pairs of about one length go together; few shapes, each compiled once.
    groups: dict[tuple[int, int], list[int]] = {}
    for index, sides in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
        src_length, tgt_length = (min(padded_length(max(length, 1)), room) for length in sides)
        groups.setdefault((src_length, tgt_length), []).append(index)
    for (src_length, tgt_length), indices in groups.items():
        most = min(_MOST_TOKENS // max(src_length, tgt_length), _MOST_LOGITS // (tgt_length * config.vocab_size))
        size = max(1, min(most, len(indices)))
        for start in range(0, len(indices), size):
            chosen = np.array(indices[start : start + size])
            batch = make_batch(encoded, Rows(Shape(size, src_length, tgt_length), chosen), config)
            found = jax.device_get(_row_log_probs(translator.params, batch, model=model))
            log_probs[chosen] = found[: len(chosen)]
    penalties = np.asarray(length_penalty(decoding.length_penalty, target, decoding.alpha))
    return [
        PairScore(float(log_prob), int(count), float(log_prob / penalty))
        for log_prob, count, penalty in zip(log_probs, target, penalties, strict=True)
    ]


@partial(jax.jit, static_argnames="model")
def _row_log_probs(params: Params, batch: Batch, model: Transformer) -> Float[Array, "b"]:
    config: ModelConfig = model.config
    logits = model.apply({"params": params}, batch.src, batch.tgt_in)
    targets = jnp.asarray(batch.tgt_out)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return jnp.where(targets != config.pad_id, log_probs, 0).sum(axis=1)
