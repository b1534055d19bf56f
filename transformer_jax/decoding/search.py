"""What all searches share, and the searches without a beam: greedy search and sampling."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int, Key

from transformer_jax.config import Sampling
from transformer_jax.decoding.sampling import draw_tokens
from transformer_jax.decoding.top_k import best_tokens


class SearchResult(NamedTuple):
    """Hypotheses of each sentence, best first."""

    tokens: Int[Array, "b n l"]
    """The start token left out, EOS included where the hypothesis came to one, PAD after it."""
    scores: Float[Array, "b n"]
    """What the hypotheses are ranked by: log-probability / length penalty. -inf: there is no such hypothesis."""
    lengths: Int[Array, "b n"]
    """Tokens that are not padding, EOS counted."""
    log_probs: Float[Array, "b n"]
    """log P(y | x), the sum over the tokens."""


def divide(log_probs: Float[Array, "..."], penalty: Float[Array, "..."]) -> Float[Array, "..."]:
    """The quotient in the dtype of the log-probabilities."""
    return log_probs / penalty.astype(log_probs.dtype)


def take(hypotheses: SearchResult, places: Int[Array, "#b n"]) -> SearchResult:
    """The hypotheses at these places of each sentence."""

    def take_leaf(leaf: Array) -> Array:
        index = jnp.broadcast_to(places, (leaf.shape[0], places.shape[-1]))
        return jnp.take_along_axis(leaf, index.reshape(index.shape + (1,) * (leaf.ndim - 2)), axis=1)

    return jax.tree.map(take_leaf, hypotheses)


def concatenate(first: SearchResult, second: SearchResult) -> SearchResult:
    """Both lists, one after the other."""
    return jax.tree.map(lambda one, other: jnp.concatenate([one, other], axis=1), first, second)


def best_of(hypotheses: SearchResult, n: int) -> SearchResult:
    """The n best, best first; of equal ones the earlier."""
    return take(hypotheses, jax.lax.top_k(hypotheses.scores, n)[1])


def where(condition: Bool[Array, "..."], yes: Array, no: Array) -> Array:
    """`jnp.where` with a condition on the leading axes."""
    return jnp.where(condition.reshape(condition.shape + (1,) * (yes.ndim - condition.ndim)), yes, no)


State = Any  # a pytree of arrays: the key-value cache of a model, say
StepFn = Callable[[Int[Array, " rows"], State], tuple[Float[Array, "rows v"], State]]
GrowFn = Callable[[State, int], State]


class Watched(NamedTuple):
    """What a search did in one step: handed to `watch`, as NumPy arrays."""

    length: Int[Array, ""]
    """Tokens of each hypothesis after this step."""
    candidates: SearchResult
    """The continuations that were looked at, best first; a log-probability of -inf: there was none."""
    parents: Int[Array, "b n"]
    """For each, which of the live hypotheses of the step before it continues."""
    finishes: Bool[Array, "b n"]
    """Which of them count as ended."""
    live: SearchResult
    """The hypotheses that go on, best first; log-probability -inf: none."""
    finished: SearchResult
    """The best that ended so far, best first; score -inf: none."""
    bound: Float[Array, " b"]
    """What the best live hypothesis is taken to be able to score; NaN where the search compares no scores."""
    at_limit: Bool[Array, " b"]
    """Whether this is the last step that the sentence may take."""
    done: Bool[Array, " b"]
    """Whether the sentence is done after this step."""
    skipped: Bool[Array, " b"]
    """Whether it was done before, so that this step changed nothing."""


Watch = Callable[[Watched], None]


def until_done(advance: Callable[[Any], Any], search: Any, lengths: Sequence[int], grow_fn: GrowFn) -> Any:
    """Steps until every sentence is done, in one loop for each of these lengths; the state is grown between them."""
    search = jax.lax.while_loop(lambda search: ~jnp.all(search.done) & (search.step < lengths[0]), advance, search)
    if len(lengths) == 1:
        return search._replace(state=None)

    def go_on(search: Any) -> Any:
        return until_done(advance, search._replace(state=grow_fn(search.state, lengths[1])), lengths[1:], grow_fn)

    return jax.lax.cond(jnp.all(search.done), lambda search: search._replace(state=None), go_on, search)


def forced_tokens(prefix: Int[Array, "b p"] | None, step: Int[Array, ""], n: int = 1) -> Int[Array, " rows"] | None:
    """The tokens of the prefixes at this step, for n hypotheses each; -1: none."""
    if prefix is None:
        return None
    at = jnp.take(prefix, step, axis=1, mode="fill", fill_value=-1)
    return jnp.repeat(at, n, total_repeat_length=len(prefix) * n)


def show(watch: Watch, watched: Watched) -> None:
    """Calls `watch` while the compiled search runs, step after step."""
    io_callback(lambda shown: watch(jax.tree.map(np.asarray, shown)), None, watched, ordered=True)


def score_dtype(step_fn: StepFn, tokens: Int[Array, " rows"], state: State) -> jnp.dtype:
    """The dtype of the log-probabilities, found without computing anything."""
    logits, _ = jax.eval_shape(step_fn, tokens, state)
    return jnp.promote_types(logits.dtype, jnp.float32)


def greedy_search(
    step_fn: StepFn,
    state: State,
    *,
    max_lengths: Int[Array, " b"],
    max_length: int,
    start_id: int,
    eos_id: int,
    pad_id: int,
    forbidden_ids: Sequence[int] = (),
    renormalize_logits: bool = False,
    prefix: Int[Array, "b p"] | None = None,
    spans: Sequence[int] = (),
    grow_fn: GrowFn = lambda state, length: state,
    watch: Watch | None = None,
) -> SearchResult:
    """The most probable token, again and again, until EOS or the limit. Of equal tokens the lowest id is taken.

    Args:
        step_fn: see `search_loop`. Rows are sentences.
        state: what `step_fn` gets first; it must return a state of the same structure, shapes and dtypes.
        max_lengths: most tokens for each sentence, EOS counted.
        max_length: the same for all of them, a Python number: the width of the result.
        start_id: the token read first.
        eos_id: the token that ends a sentence.
        pad_id: what follows it; never generated.
        forbidden_ids: more tokens that are never generated.
        renormalize_logits: these leave the softmax, rather than being struck out after it.
        prefix: the tokens that a sentence begins with, whatever their probability; below 0 after the last of them.
        spans: lengths below `max_length`, ascending, at which the state grows: what a step costs then follows them.
        grow_fn: makes room in the state, which begins with room for the first span, up to the length of the next.
        watch: is told what each step did.

    Returns:
        One hypothesis a sentence (n = 1); its score is its log-probability.
    """

    def choose(logits: Array, step: Array) -> tuple[Array, Array]:
        must = forced_tokens(prefix, step)
        log_probs, ids = best_tokens(
            logits, 1, pad_id, forbidden_ids, renormalize_logits=renormalize_logits, forced=must
        )
        return log_probs[:, 0], ids[:, 0]

    return _token_by_token(
        step_fn,
        state,
        choose,
        max_lengths=max_lengths,
        max_length=max_length,
        start_id=start_id,
        eos_id=eos_id,
        pad_id=pad_id,
        spans=spans,
        grow_fn=grow_fn,
        watch=watch,
    )


def sample(
    step_fn: StepFn,
    state: State,
    keys: Key[Array, "b n"],
    sampling: Sampling,
    *,
    max_lengths: Int[Array, " b"],
    max_length: int,
    start_id: int,
    eos_id: int,
    pad_id: int,
    forbidden_ids: Sequence[int] = (),
    renormalize_logits: bool = False,
    prefix: Int[Array, "b p"] | None = None,
    spans: Sequence[int] = (),
    grow_fn: GrowFn = lambda state, length: state,
) -> SearchResult:
    """n hypotheses a sentence, each drawn token after token, and independently of the others.

    Args:
        step_fn: see `search_loop`. Rows are b * n: row i is draw i % n of sentence i // n.
        state: what `step_fn` gets first, for b * n rows.
        keys: a random key for each draw: what is drawn depends on it and on no other draw.
        sampling: what is drawn from.
        The others are those of `greedy_search`.

    Returns:
        The draws, the most probable first; the score of each is its log-probability, that of the model as it is.
    """
    b, n = keys.shape
    rows = keys.reshape(b * n)

    def choose(logits: Array, step: Array) -> tuple[Array, Array]:
        must = forced_tokens(prefix, step, n)
        return draw_tokens(
            logits,
            jax.vmap(jax.random.fold_in, in_axes=(0, None))(rows, step),
            sampling,
            pad_id,
            forbidden_ids,
            renormalize_logits=renormalize_logits,
            forced=must,
        )

    drawn = _token_by_token(
        step_fn,
        state,
        choose,
        max_lengths=jnp.repeat(max_lengths, n, total_repeat_length=b * n),
        max_length=max_length,
        start_id=start_id,
        eos_id=eos_id,
        pad_id=pad_id,
        spans=spans,
        grow_fn=grow_fn,
    )
    return best_of(jax.tree.map(lambda leaf: leaf.reshape(b, n, *leaf.shape[2:]), drawn), n)


def _token_by_token(
    step_fn: StepFn,
    state: State,
    choose: Callable[[Float[Array, "rows v"], Int[Array, ""]], tuple[Float[Array, " rows"], Int[Array, " rows"]]],
    *,
    max_lengths: Int[Array, " rows"],
    max_length: int,
    start_id: int,
    eos_id: int,
    pad_id: int,
    spans: Sequence[int],
    grow_fn: GrowFn,
    watch: Watch | None = None,
) -> SearchResult:
    """One hypothesis a row; `choose(logits, step)` gives each its next token, and log P of that."""
    (rows,) = max_lengths.shape
    limits = jnp.minimum(max_lengths, max_length).astype(jnp.int32)
    start = jnp.full((rows,), start_id, jnp.int32)
    dtype = score_dtype(step_fn, start, state)

    def advance(search: _Single) -> _Single:
        logits, state = step_fn(search.last, search.state)
        log_prob, chosen = choose(logits, search.step)
        stopped = search.done | (log_prob == -jnp.inf)  # the latter: every token is impossible
        chosen = jnp.where(stopped, pad_id, chosen)
        length = search.step + 1
        after = _Single(
            step=length,
            tokens=search.tokens.at[:, search.step].set(chosen),
            last=chosen,
            log_probs=jnp.where(search.done, search.log_probs, search.log_probs + log_prob),
            lengths=jnp.where(stopped, search.lengths, length),
            done=stopped | (chosen == eos_id) | (length >= limits),
            state=state,
        )
        if watch is not None:
            show(watch, _watched_single(search, after, eos_id, limits))
        return after

    found = until_done(
        advance,
        _Single(
            step=jnp.zeros((), jnp.int32),
            tokens=jnp.full((rows, max_length), pad_id, jnp.int32),
            last=start,
            log_probs=jnp.zeros((rows,), dtype),
            lengths=jnp.zeros((rows,), jnp.int32),
            done=limits <= 0,
            state=state,
        ),
        (*spans, max_length),
        grow_fn,
    )
    log_probs = found.log_probs[:, None]
    return SearchResult(
        tokens=found.tokens[:, None], scores=log_probs, lengths=found.lengths[:, None], log_probs=log_probs
    )


class _Single(NamedTuple):
    """What the loop of a search with one hypothesis a row carries."""

    step: Int[Array, ""]
    tokens: Int[Array, "rows l"]
    last: Int[Array, " rows"]
    log_probs: Float[Array, " rows"]
    lengths: Int[Array, " rows"]
    done: Bool[Array, " rows"]
    state: State


def _watched_single(before: _Single, after: _Single, eos_id: int, limits: Int[Array, " b"]) -> Watched:
    """A step without a beam: one continuation, which ends or goes on."""
    candidates = SearchResult(
        tokens=after.tokens[:, None],
        scores=after.log_probs[:, None],
        lengths=after.lengths[:, None],
        log_probs=after.log_probs[:, None],
    )
    ends = (after.last == eos_id)[:, None]

    def only(chosen: Bool[Array, "b 1"]) -> SearchResult:
        scores = jnp.where(chosen, candidates.scores, -jnp.inf)
        return candidates._replace(scores=scores, log_probs=scores)

    parents, bound = jnp.zeros_like(candidates.lengths), jnp.full_like(after.log_probs, jnp.nan)
    lists = candidates, parents, ends, only(~ends), only(ends)
    return Watched(after.step, *lists, bound, after.step >= limits, after.done, before.done)
