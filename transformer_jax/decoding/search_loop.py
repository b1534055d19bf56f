"""What all searches have in common: the callback, the loop over the positions, and how a step is watched.

The callback `step_fn(tokens, state) -> logits, state` reads the tokens just emitted (the start token first), one for
each row, and answers with the logits of the next. Searches are pure functions over it, to be called under `jax.jit`; no
model is known to them. Their loop ends as soon as every sentence of the batch is done, and a sentence that is done
changes no more: what comes out for it does not depend on the others.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding.hypotheses import SearchResult

State = Any  # a pytree of arrays: the key-value cache of a model, say
StepFn = Callable[[Int[Array, "rows"], State], tuple[Float[Array, "rows v"], State]]
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
    bound: Float[Array, "b"]
    """What the best live hypothesis is taken to be able to score; NaN where the search compares no scores."""
    at_limit: Bool[Array, "b"]
    """Whether this is the last step that the sentence may take."""
    done: Bool[Array, "b"]
    """Whether the sentence is done after this step."""
    skipped: Bool[Array, "b"]
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


def forced_tokens(prefix: Int[Array, "b p"] | None, step: Int[Array, ""], n: int = 1) -> Int[Array, "rows"] | None:
    """The tokens of the prefixes at this step, for n hypotheses each; -1: none."""
    if prefix is None:
        return None
    at = jnp.take(prefix, step, axis=1, mode="fill", fill_value=-1)
    return jnp.repeat(at, n, total_repeat_length=len(prefix) * n)


def show(watch: Watch, watched: Watched) -> None:
    """Calls `watch` while the compiled search runs, step after step."""
    io_callback(lambda shown: watch(jax.tree.map(np.asarray, shown)), None, watched, ordered=True)


def score_dtype(step_fn: StepFn, tokens: Int[Array, "rows"], state: State) -> jnp.dtype:
    """The dtype of the log-probabilities, found without computing anything."""
    logits, _ = jax.eval_shape(step_fn, tokens, state)
    return jnp.promote_types(logits.dtype, jnp.float32)
