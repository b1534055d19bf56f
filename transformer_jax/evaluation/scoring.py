"""Log-probabilities of given translations (forced decoding)."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer_jax.config import ModelConfig
from transformer_jax.data.batching import Rows, Shape, make_batch
from transformer_jax.data.encoding import EncodedPairs, encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.search import length_penalty
from transformer_jax.decoding.translator import Translator, pair_batches
from transformer_jax.model.positional import max_sequence_length
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import Batch, Params, UserError

_MOST_LOGITS = 2**25  # of a batch, 128 MB in float32


class PairScore(NamedTuple):
    """What a run makes of a pair."""

    log_prob: float
    """log P(target | source), the sum over the target's tokens and EOS, in nats."""
    num_tokens: int
    """Of the target, EOS counted."""
    score: float
    """log-probability / length penalty, by which the run's search would rank the target. The softmax is one of all
    tokens, whatever `decoding.renormalize_logits` says."""


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
    for member in translator.members:
        check_lengths(encoded, pairs, member.config)
    target = encoded.target_lengths
    log_probs = np.zeros(len(pairs))
    lengths = encoded.source_lengths.tolist(), target.tolist()
    for chosen, shape in pair_batches(
        *lengths, translator.max_sequence_length, lambda source, target: _MOST_LOGITS // (target * config.vocab_size)
    ):
        batch = make_batch(encoded, Rows(Shape(*shape), np.array(chosen)), config)
        found = [
            jax.device_get(_log_probs(member.params, batch, model=Transformer(member.config)))
            for member in translator.members
        ]
        # Of an ensemble, log P of a token is the logarithm of its members' mean probability.
        mean = np.logaddexp.reduce(found, axis=0) - math.log(len(found))
        log_probs[chosen] = np.where(batch.tgt_out != config.pad_id, mean, 0).sum(axis=1, dtype=float)[: len(chosen)]
    penalties = np.asarray(length_penalty(decoding.length_penalty, target, decoding.alpha))
    return [
        PairScore(float(log_prob), int(count), float(log_prob / penalty))
        for log_prob, count, penalty in zip(log_probs, target, penalties, strict=True)
    ]


@partial(jax.jit, static_argnames="model")
def _log_probs(params: Params, batch: Batch, model: Transformer) -> Float[Array, "b t"]:
    """Of each target token."""
    logits: Array = model.apply(  # type: ignore[assignment]  # a tuple only with mutable collections
        {"params": params}, batch.src, batch.tgt_in
    )
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, jnp.asarray(batch.tgt_out)[..., None], axis=-1)[..., 0]


MAX_TOKENS = 8192  # of a pair's side, and of a batch: attention needs memory with the square of a length


def check_lengths(encoded: EncodedPairs, pairs: Pairs, model: ModelConfig) -> None:
    """Nothing is left out of an evaluation, so every pair must fit the model.

    Raises:
        UserError: one does not.
    """
    room = max_sequence_length(model)
    longest = np.maximum(encoded.source_lengths, encoded.target_lengths)
    if longest.max() > MAX_TOKENS:
        raise UserError(
            f"{pairs.origin}, pair {longest.argmax() + 1}: {longest.max()} tokens; an evaluation leaves nothing out, "
            f"at most {MAX_TOKENS} fit: take the pair out"
        )
    if longest.max() > room:
        raise UserError(
            f"{pairs.origin}, pair {longest.argmax() + 1}: {longest.max()} tokens, and the learned position table of "
            f"model.max_length {model.max_length} has room for {room}; take the pair out"
        )
