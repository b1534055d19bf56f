"""Beam search (paper section 6.1). See `search_loop` for the callback."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer_jax.decoding.search import (
    GrowFn,
    SearchResult,
    State,
    StepFn,
    Watch,
    Watched,
    best_of,
    concatenate,
    divide,
    forced_tokens,
    score_dtype,
    show,
    take,
    until_done,
    where,
)
from transformer_jax.decoding.stopping import RULES, LengthPenalty, Progress, Setting, Stopping
from transformer_jax.decoding.top_k import best_tokens, top

ReorderFn = Callable[[State, Int[Array, " rows"]], State]


class _Beam(NamedTuple):
    """What the loop of `beam_search` carries."""

    step: Int[Array, ""]
    last: Int[Array, " b*k"]
    progress: Progress
    done: Bool[Array, " b"]
    state: State


def reorder_rows(state: State, rows: Int[Array, " rows"]) -> State:
    """Row i of every array becomes what row `rows[i]` was; scalars (a position, say) stay as they are."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=0) if jnp.ndim(leaf) else leaf, state)


def beam_search(
    step_fn: StepFn,
    state: State,
    reorder_fn: ReorderFn = reorder_rows,
    *,
    beam_size: int,
    max_lengths: Int[Array, " b"],
    max_length: int,
    start_id: int,
    eos_id: int,
    pad_id: int,
    alpha: float = 0.6,
    length_penalty: LengthPenalty = "gnmt",
    stopping: Stopping = "paper",
    n_best: int = 1,
    forbidden_ids: Sequence[int] = (),
    renormalize_logits: bool = False,
    prefix: Int[Array, "b p"] | None = None,
    spans: Sequence[int] = (),
    grow_fn: GrowFn = lambda state, length: state,
    watch: Watch | None = None,
) -> SearchResult:
    """The hypotheses of the highest log P(y | x) / penalty(length) that a beam of k finds, k = `beam_size`.

    At each step the 2k best continuations of the k live hypotheses are looked at: a live one has one continuation that
    ends, so at least k of them go on. Of equal ones the lower beam comes first, then the lower id.

    The paper says "terminating early when possible"; what that is, and which ends count, is `stopping`:

        paper         until no live hypothesis can enter the n best: the result is that of never stopping early. Ends
                      count among all 2k. If fewer than n ended by the limit, the best live ones follow, without EOS.
        huggingface   `generate(early_stopping=False)`: until k ended and the best live hypothesis, scored at the length
                      it has now, is no better than the worst of them.
        ctranslate2   `translate_batch`, patience 1: until k ended; with no penalty until n ended and the best
                      continuation of a step was an end. Forbidden ids (PAD only if named there) leave the softmax.
        Both:         ends count among the k best continuations; at the limit these count as ended whatever they are.

    Args:
        step_fn: see `search_loop`. Rows are b * k: row i is beam i % k of sentence i // k.
        state: what `step_fn` gets first, for b * k rows; it must return one of the same structure, shapes and dtypes.
        reorder_fn: gives each row of the state the state of another row, always of the same sentence: what all beams
            of a sentence have in common may be left alone.
        beam_size: k.
        max_lengths: most tokens for each sentence, EOS counted (the paper: those of the source plus 50).
        max_length: the same for all of them, a Python number: the width of the result.
        start_id: the token read first.
        eos_id: the token that ends a hypothesis.
        pad_id: what follows it; never generated.
        alpha: exponent of the length penalty.
        length_penalty: which penalty.
        stopping: which rule.
        n_best: n: how many hypotheses to return, at most k.
        forbidden_ids: more tokens that are never generated.
        renormalize_logits: exclude these from the softmax instead of masking them after it; ctranslate2 always does.
        prefix: the tokens that a sentence begins with, whatever their probability; below 0 after the last of them.
        spans: lengths below `max_length`, ascending, at which the state grows: what a step costs then follows them.
        grow_fn: makes room in the state, which begins with room for the first span, up to the length of the next.
        watch: is told what each step did.

    Returns:
        n hypotheses a sentence.
    """
    if not 1 <= n_best <= beam_size:
        raise ValueError(f"n_best is {n_best} and beam_size {beam_size}; n_best must be from 1 to beam_size")
    if stopping not in RULES:
        raise ValueError(f"stopping is {stopping!r}; it must be one of {', '.join(RULES)}")
    rule = RULES[stopping]
    (b,), k = max_lengths.shape, beam_size
    limits = jnp.minimum(max_lengths, max_length).astype(jnp.int32)
    setting = Setting(beam_size, n_best, alpha, length_penalty, limits)
    start = jnp.full((b * k,), start_id, jnp.int32)
    dtype = score_dtype(step_fn, start, state)

    def advance(search: _Beam) -> _Beam:
        live, finished, num_finished, top_finished = search.progress
        length = search.step + 1

        # The 2k best continuations, best first.
        logits, state = step_fn(search.last, search.state)
        v = logits.shape[-1]
        n = min(2 * k, v)  # of one hypothesis no more can be among the 2k best of all
        next_log_probs, ids = best_tokens(
            logits,
            n,
            pad_id,
            forbidden_ids,
            renormalize_logits=renormalize_logits or rule.renormalize_logits,
            forced=forced_tokens(prefix, search.step, k),
        )
        log_probs = live.log_probs[:, :, None] + next_log_probs.reshape(b, k, n)
        log_probs, places = top(log_probs.reshape(b, k * n), 2 * k)
        parents, tokens = places // n, jnp.take_along_axis(ids.reshape(b, k * n), places, axis=1)
        candidates = SearchResult(
            tokens=take(live, parents).tokens.at[:, :, search.step].set(tokens),
            scores=divide(log_probs, setting.penalty(length)),
            lengths=jnp.full_like(tokens, length),
            log_probs=log_probs,
        )

        # Those that end join the finished ones, of which the k best stay.
        at_limit = length >= limits
        ends = tokens == eos_id
        finishes = ends | at_limit[:, None] if rule.ends_at_limit else ends
        if rule.only_best_k:
            finishes &= (jnp.arange(2 * k) < k)[None]
        finishes &= log_probs > -jnp.inf
        offered = candidates._replace(scores=jnp.where(finishes, candidates.scores, -jnp.inf))
        finished = best_of(concatenate(finished, offered), k)

        # The k best of the others live on.
        live_log_probs, chosen = top(jnp.where(ends | finishes, -jnp.inf, log_probs), k)
        live = take(candidates, chosen)._replace(log_probs=live_log_probs)
        live = live._replace(scores=divide(live_log_probs, setting.penalty(length)))

        progress = Progress(
            live, finished, num_finished + jnp.sum(finishes, axis=1, dtype=jnp.int32), top_finished | finishes[:, 0]
        )
        done = rule.is_done(progress, length, setting) | at_limit | (live_log_probs[:, 0] == -jnp.inf)
        if watch is not None:
            bound = rule.bound(progress, length, setting) if rule.bound else jnp.full((b,), jnp.nan, dtype)
            lists = candidates, parents, finishes, live, finished
            show(watch, Watched(length, *lists, bound, at_limit, search.done | done, search.done))
        rows = jnp.arange(b)[:, None] * k + jnp.take_along_axis(parents, chosen, axis=1)
        return _Beam(
            step=length,
            last=jnp.take_along_axis(tokens, chosen, axis=1).reshape(b * k),
            progress=jax.tree.map(lambda old, new: where(search.done, old, new), search.progress, progress),
            done=search.done | done,
            state=reorder_fn(state, rows.reshape(b * k)),
        )

    nothing = SearchResult(
        tokens=jnp.full((b, k, max_length), pad_id, jnp.int32),
        scores=jnp.full((b, k), -jnp.inf, dtype),
        lengths=jnp.zeros((b, k), jnp.int32),
        log_probs=jnp.full((b, k), -jnp.inf, dtype),
    )
    # The k beams begin alike, so only the first may be continued: a step would find everything k times.
    first = nothing._replace(scores=nothing.scores.at[:, 0].set(0), log_probs=nothing.log_probs.at[:, 0].set(0))
    found = until_done(
        advance,
        _Beam(
            step=jnp.zeros((), jnp.int32),
            last=start,
            progress=Progress(first, nothing, jnp.zeros((b,), jnp.int32), jnp.zeros((b,), bool)),
            done=limits <= 0,
            state=state,
        ),
        (*spans, max_length),
        grow_fn,
    )

    # The finished ones, then the live ones if places are left; places that stay empty hold padding.
    live, finished, _, _ = found.progress
    num_kept = jnp.sum(finished.scores > -jnp.inf, axis=1)[:, None]
    place = jnp.arange(n_best)[None]
    result = take(concatenate(finished, live), jnp.where(place < num_kept, place, k + place - num_kept))
    return jax.tree.map(lambda empty, full: where(result.scores == -jnp.inf, empty, full), take(nothing, place), result)
