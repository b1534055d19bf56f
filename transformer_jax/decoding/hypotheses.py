"""Lists of hypotheses of a batch of sentences, and what a search does with such lists."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
