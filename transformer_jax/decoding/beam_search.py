"""Beam search over a callback (paper section 6.1), and the rules that stop it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.search import (
    ResizeFn,
    SearchResult,
    SearchSpec,
    State,
    StepFn,
    Stopping,
    best_hypotheses,
    decode_loop,
    keep_state,
    score_dtype,
    take_hypotheses,
)
from transformer_jax.decoding.top_k import top_k, top_k_tokens

ReorderFn = Callable[[State, Int[Array, " rows"]], State]
"""Maps a state and, for each row, the row of the same sentence whose state it takes over, to the reordered state."""


class BeamState(NamedTuple):
    """The hypotheses of each sentence after a step."""

    live: SearchResult
    """The k best hypotheses that have not ended, best first."""
    finished: SearchResult
    """The k best hypotheses that have ended, best first; a score of -inf marks an empty slot."""
    num_finished: Int[Array, " b"]
    """Number of hypotheses that have ended so far, kept or not."""
    top_finished: Bool[Array, " b"]
    """Whether the best continuation of any step so far was an end."""


class Rule(NamedTuple):
    """Stopping rule of a beam search, with the differences in counting and masking that its library has."""

    is_done: Callable[[BeamState, Int[Array, ""], SearchSpec], Bool[Array, " b"]]
    """Whether each sentence is done, from its hypotheses and their length."""
    only_best_k: bool
    """Count an end only among the k best continuations of a step, not among all 2k, and count those k at the limit as
    finished even without EOS, instead of ranking them after the rest."""
    renormalize_logits: bool
    """Exclude forbidden tokens from the softmax, instead of masking them after it."""


def _paper_is_done(beam: BeamState, length: Int[Array, ""], spec: SearchSpec) -> Bool[Array, " b"]:
    """Stop when no live hypothesis can enter the n best any more; a tie with the n-th best does not enter.

    Log-probabilities only fall, so a live hypothesis scores at most its log-probability / the largest penalty ahead,
    which is the penalty at the limit or, for a negative alpha, at the next token.
    """
    log_probs = beam.live.log_probs[:, 0]
    bound = jnp.maximum(spec.score(log_probs, length + 1), spec.score(log_probs, spec.limits))
    return beam.finished.scores[:, spec.n_best - 1] >= bound


def _huggingface_is_done(beam: BeamState, length: Int[Array, ""], spec: SearchSpec) -> Bool[Array, " b"]:
    """Stop when k have finished and the best live hypothesis, scored at its current length, beats none of them."""
    worst = beam.finished.scores[:, -1]
    return (worst > -jnp.inf) & (worst >= spec.score(beam.live.log_probs[:, 0], length))


def _ctranslate2_is_done(beam: BeamState, length: Int[Array, ""], spec: SearchSpec) -> Bool[Array, " b"]:
    """Stop when k have finished; without a length penalty, when n have and the best continuation was once an end."""
    if spec.length_penalty == "none" or spec.alpha == 0:
        return beam.top_finished & (beam.num_finished >= spec.n_best)
    return beam.num_finished >= spec.beam_size


STOPPING_RULES: dict[Stopping, Rule] = {
    "paper": Rule(_paper_is_done, only_best_k=False, renormalize_logits=False),
    "huggingface": Rule(_huggingface_is_done, only_best_k=True, renormalize_logits=False),
    "ctranslate2": Rule(_ctranslate2_is_done, only_best_k=True, renormalize_logits=True),
}


def reorder_rows(state: State, rows: Int[Array, " rows"]) -> State:
    """Gather row `rows[i]` of every array in a state as row i. Scalars, such as a position, stay unchanged."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0) if jnp.ndim(leaf) else leaf, state)


def beam_search(
    step_fn: StepFn,
    state: State,
    spec: SearchSpec,
    *,
    reorder_fn: ReorderFn = reorder_rows,
    resize_fn: ResizeFn = keep_state,
) -> SearchResult:
    """Find the hypotheses of highest log P(y | x) / length penalty that a beam of k = `spec.beam_size` reaches.

    Each step considers the 2k best continuations of the k live hypotheses. Only one continuation of a live
    hypothesis is EOS, so at least k of the 2k do not end. Ties go to the better hypothesis, then to the lower id. The
    paper terminates "early when possible"; `spec.stopping` defines when:

        paper         When no live hypothesis can enter the n best, so stopping does not change the result. EOS counts
                      among all 2k. If fewer than n have ended at the limit, the best live ones follow, without EOS.
        huggingface   As `generate(early_stopping=False)`: when k have ended and the best live hypothesis, scored at its
                      current length, is no better than the worst of them.
        ctranslate2   As `translate_batch` with patience 1: when k have ended; without a penalty, when n have and a
                      step's best continuation was EOS. The softmax excludes forbidden ids (PAD only if listed).

    Under `huggingface` and `ctranslate2` EOS counts only among the k best continuations, and at the limit the k best
    hypotheses count as ended even without EOS.

    Args:
        step_fn: Maps the last token of each row and a state to logits `rows v` and the next state, which has the same
            structure, shapes and dtypes. There are b * k rows: row i is hypothesis i % k of sentence i // k.
        state: The initial state, for b * k rows.
        spec: Beam, limits, special tokens, length penalty and stopping rule.
        reorder_fn: Copies to each row the state of a row of the same sentence. It may skip arrays that are equal
            for all hypotheses of a sentence.
        resize_fn: Resizes the state to the next of `spec.cache_sizes`.

    Returns:
        The n = `spec.n_best` best hypotheses of each sentence.

    Here a bigram model replaces the Transformer. Its best sentence does not begin with its best token:

    >>> bigrams = jnp.log(jnp.array([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0.6, 0.1, 0.3], [0, 0.1, 0.5, 0.4]]))
    >>> spec = SearchSpec(jnp.array([4]), max_length=4, start_id=3, eos_id=1, pad_id=0, beam_size=2, n_best=2)
    >>> beam_search(lambda tokens, state: (bigrams[tokens], state), None, spec).tokens.tolist()
    [[[2, 1, 0, 0], [3, 2, 1, 0]]]
    """
    rule, (b,), k = STOPPING_RULES[spec.stopping], spec.max_lengths.shape, spec.beam_size
    start = jnp.full((b * k,), spec.start_id, jnp.int32)

    def advance(carry: _Loop) -> _Loop:
        logits, state = step_fn(carry.last, carry.state)
        step = _continue_live(carry.beam.live, logits, carry.step, spec, rule)
        beam, done, chosen = _update(carry.beam, step, carry.step + 1, spec, rule)
        rows = jnp.arange(b)[:, None] * k + jnp.take_along_axis(step.parents, chosen, axis=1)
        return _Loop(
            step=carry.step + 1,
            last=jnp.take_along_axis(step.tokens, chosen, axis=1).reshape(b * k),
            beam=jax.tree.map(lambda old, new: _where(carry.done, old, new), carry.beam, beam),
            done=carry.done | done,
            state=reorder_fn(state, rows.reshape(b * k)),
        )

    empty = _empty_hypotheses(b, spec, score_dtype(step_fn, start, state))
    # The k hypotheses of a sentence begin equal, so only the first is continued: otherwise all would be found k times.
    first = empty._replace(scores=empty.scores.at[:, 0].set(0), log_probs=empty.log_probs.at[:, 0].set(0))
    beam = BeamState(first, empty, jnp.zeros((b,), jnp.int32), jnp.zeros((b,), bool))
    carry = _Loop(jnp.zeros((), jnp.int32), start, beam, spec.limits <= 0, state)
    final = decode_loop(advance, carry, (*spec.cache_sizes, spec.max_length), resize_fn)

    # The finished hypotheses, then the live ones if slots are left; slots that stay empty hold padding.
    live, finished, _, _ = final.beam
    num_kept = jnp.sum(finished.scores > -jnp.inf, axis=1)[:, None]
    slot = jnp.arange(spec.n_best)[None]
    result = take_hypotheses(_concatenate(finished, live), jnp.where(slot < num_kept, slot, k + slot - num_kept))
    empty = take_hypotheses(empty, slot)
    return jax.tree.map(lambda padding, leaf: _where(result.scores == -jnp.inf, padding, leaf), empty, result)


class _Loop(NamedTuple):
    """The loop carry of `beam_search`."""

    step: Int[Array, ""]
    last: Int[Array, " b*k"]
    beam: BeamState
    done: Bool[Array, " b"]
    state: State


class _Continuations(NamedTuple):
    """The 2k best continuations of the live hypotheses by one token, best first."""

    hypotheses: SearchResult
    parents: Int[Array, "b 2*k"]
    """Index of the live hypothesis that each one continues."""
    tokens: Int[Array, "b 2*k"]
    """The last token of each."""


def _continue_live(
    live: SearchResult, logits: Float[Array, "rows v"], step: Int[Array, ""], spec: SearchSpec, rule: Rule
) -> _Continuations:
    """Return the 2k best continuations of the live hypotheses of each sentence."""
    (b, k), v = live.scores.shape, logits.shape[1]
    n = min(2 * k, v)  # no more continuations of one hypothesis can be among the 2k best of all
    constraints = spec.constraints(step, v, k)
    if rule.renormalize_logits:
        constraints = constraints._replace(renormalize_logits=True)
    next_log_probs, ids = top_k_tokens(logits, n, constraints)
    log_probs = live.log_probs[:, :, None] + next_log_probs.reshape(b, k, n)
    log_probs, index = top_k(log_probs.reshape(b, k * n), 2 * k)
    parents, tokens = index // n, jnp.take_along_axis(ids.reshape(b, k * n), index, axis=1)
    hypotheses = SearchResult(
        tokens=take_hypotheses(live, parents).tokens.at[:, :, step].set(tokens),
        scores=spec.score(log_probs, step + 1),
        lengths=jnp.full_like(tokens, step + 1),
        log_probs=log_probs,
    )
    return _Continuations(hypotheses, parents, tokens)


def _update(
    beam: BeamState, step: _Continuations, length: Int[Array, ""], spec: SearchSpec, rule: Rule
) -> tuple[BeamState, Bool[Array, " b"], Int[Array, "b k"]]:
    """Return the beam after a step, which sentences are done, and the indices of the continuations that stay live."""
    k, candidates, at_limit = spec.beam_size, step.hypotheses, length >= spec.limits
    ends = step.tokens == spec.eos_id
    finishes = (ends | at_limit[:, None]) & (jnp.arange(2 * k) < k)[None] if rule.only_best_k else ends
    finishes &= candidates.log_probs > -jnp.inf
    ended = candidates._replace(scores=jnp.where(finishes, candidates.scores, -jnp.inf))

    live_log_probs, chosen = top_k(jnp.where(ends | finishes, -jnp.inf, candidates.log_probs), k)
    live = take_hypotheses(candidates, chosen)._replace(
        log_probs=live_log_probs, scores=spec.score(live_log_probs, length)
    )
    beam = BeamState(
        live,
        best_hypotheses(_concatenate(beam.finished, ended), k),
        beam.num_finished + jnp.sum(finishes, axis=1, dtype=jnp.int32),
        beam.top_finished | finishes[:, 0],
    )
    done = rule.is_done(beam, length, spec) | at_limit | (live_log_probs[:, 0] == -jnp.inf)
    return beam, done, chosen


def _empty_hypotheses(b: int, spec: SearchSpec, dtype: jnp.dtype) -> SearchResult:
    """Return k empty slots for each sentence."""
    k = spec.beam_size
    return SearchResult(
        tokens=jnp.full((b, k, spec.max_length), spec.pad_id, jnp.int32),
        scores=jnp.full((b, k), -jnp.inf, dtype),
        lengths=jnp.zeros((b, k), jnp.int32),
        log_probs=jnp.full((b, k), -jnp.inf, dtype),
    )


def _concatenate(first: SearchResult, second: SearchResult) -> SearchResult:
    """Return the hypotheses of both lists, sentence by sentence."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)


def _where(condition: Bool[Array, "..."], x: Array, y: Array) -> Array:
    """Return `jnp.where` with a condition on the leading axes."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim)), x, y)
