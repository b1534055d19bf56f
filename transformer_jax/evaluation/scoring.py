"""Compute log-probabilities of existing translations (forced decoding), and the loss of a corpus."""

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batching import Rows, Shape, choose_shapes, eval_batches, make_batch
from transformer_jax.data.encoding import EncodedPairs, encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.search import length_penalty
from transformer_jax.decoding.translator import Translator, pair_batches
from transformer_jax.model.positional import max_sequence_length
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.distributed import gather
from transformer_jax.training.sharding import put_batch
from transformer_jax.training.step import eval_step
from transformer_jax.types import ALL_ROWS, Batch, Params, RowParts, UserError

MAX_TOKENS = 8192
"""Maximum tokens of a sentence, and of a batch: the memory of attention grows with the square of the length."""

_MAX_LOGITS = 2**25  # of a batch: 128 MB in float32


class PairScore(NamedTuple):
    """Score of a translation given its source."""

    log_prob: float
    """Log-probability in nats, summed over the target's tokens and EOS."""
    num_tokens: int
    """Number of target tokens, including EOS."""
    score: float
    """Log-probability / length penalty, by which the run's search ranks the target. The softmax covers all tokens,
    whatever `decoding.renormalize_logits` is."""


def score_pairs(translator: Translator, pairs: Pairs | Sequence[tuple[str, str]]) -> list[PairScore]:
    """Return the log-probability of each target given its source.

    Args:
        translator: The run, or an ensemble.
        pairs: Sources and targets, as `Pairs` or as a list of tuples (source, target). An empty target is EOS alone.

    Returns:
        One score per pair, in the order of the pairs.

    Raises:
        UserError: A pair is too long for the model.
    """
    if not isinstance(pairs, Pairs):
        for index, pair in enumerate(pairs):
            if not (isinstance(pair, tuple | list) and list(map(type, pair)) == [str, str]):
                raise UserError(f"pairs[{index}] is {pair!r:.80}; give tuples of two strings, source and target")
        pairs = Pairs([source for source, _ in pairs], [target for _, target in pairs], "pairs")
    config, decoding = translator.config.model, translator.config.decoding
    encoded = encode_pairs(pairs, translator.tokenizers, config)
    for member in translator.members:
        check_lengths(encoded, pairs, member.config)
    tgt_lengths = encoded.target_lengths
    log_probs = np.zeros(len(pairs))
    lengths = encoded.source_lengths.tolist(), tgt_lengths.tolist()
    for indices, shape in pair_batches(
        *lengths, translator.max_sequence_length, lambda source, target: _MAX_LOGITS // (target * config.vocab_size)
    ):
        batch = make_batch(encoded, Rows(Shape(*shape), np.array(indices)), config)
        by_member = [
            jax.device_get(_log_probs(member.params, batch, model=Transformer(member.config)))
            for member in translator.members
        ]
        # The probability of a token under an ensemble is the mean of its members' probabilities.
        mean = np.logaddexp.reduce(by_member, axis=0) - math.log(len(by_member))
        sums = np.where(batch.tgt_out != config.pad_id, mean, 0).sum(axis=1, dtype=float)
        log_probs[indices] = sums[: len(indices)]
    penalties = np.asarray(length_penalty(decoding.length_penalty, tgt_lengths, decoding.alpha))
    return [
        PairScore(float(log_prob), int(count), float(log_prob / penalty))
        for log_prob, count, penalty in zip(log_probs, tgt_lengths, penalties, strict=True)
    ]


@partial(jax.jit, static_argnames="model")
def _log_probs(params: Params, batch: Batch, model: Transformer) -> Float[Array, "b t"]:
    """Return the log-probability of each target token."""
    logits: Array = model.apply(  # type: ignore[assignment]  # a tuple only with mutable collections
        {"params": params}, batch.src, batch.tgt_in
    )
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, jnp.asarray(batch.tgt_out)[..., None], axis=-1)[..., 0]


def check_lengths(encoded: EncodedPairs, pairs: Pairs, model: ModelConfig) -> None:
    """Raise UserError if a pair is too long for the model, because an evaluation leaves no pair out."""
    capacity = max_sequence_length(model)
    longest = np.maximum(encoded.source_lengths, encoded.target_lengths)
    where = f"{pairs.origin}, pair {longest.argmax() + 1}: {longest.max()} tokens"
    if longest.max() > MAX_TOKENS:
        raise UserError(f"{where}; an evaluation accepts at most {MAX_TOKENS}. Remove the pair")
    if longest.max() > capacity:
        raise UserError(
            f"{where}, and the learned position table of model.max_length {model.max_length} has capacity for "
            f"{capacity}. Remove the pair"
        )


def validation_batches(
    encoded: EncodedPairs, config: Config, multiple: int = 1, parts: RowParts = ALL_ROWS
) -> Iterable[Batch]:
    """Return batches for evaluation: few shapes, and at most MAX_TOKENS tokens where training batches are larger."""
    budget = min(config.data.batch_tokens, MAX_TOKENS)
    shapes = choose_shapes(encoded.source_lengths, encoded.target_lengths, budget, max_shapes=4)
    return eval_batches(encoded, shapes, budget, config.model, multiple, parts)


_eval_step = partial(jax.jit, static_argnames=("model", "max_logits"))(eval_step)


def corpus_loss(
    params: Params,
    batches: Iterable[Batch],
    model: Transformer,
    mesh: Mesh | None = None,
    max_logits: int | None = None,
) -> float:
    """Return the mean negative log-likelihood of a target token in nats, summed on the host in float64.

    With a mesh, each process has its rows of every batch; without one, each computes its share of the same batches.
    """
    loss_sum, num_tokens = 0.0, 0
    own = batches if mesh else itertools.islice(batches, jax.process_index(), None, jax.process_count())
    for batch in own:
        placed = put_batch(batch, mesh) if mesh else batch
        sums = jax.device_get(_eval_step(params, placed, model=model, max_logits=max_logits))
        loss_sum, num_tokens = loss_sum + float(sums.loss_sum), num_tokens + int(sums.num_tokens)
    if mesh is None:
        loss_sum, num_tokens = (sum(values) for values in zip(*gather([loss_sum, num_tokens]), strict=True))
    return loss_sum / max(num_tokens, 1)


def perplexity(loss: float) -> float:
    """Return exp(loss), or infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf
