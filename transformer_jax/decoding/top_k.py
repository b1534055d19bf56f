"""The few best next tokens of each row, without sorting a vocabulary or writing its log-probabilities down."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_BLOCK = 64  # of the vocabulary, in `_top_by_blocks`: 32 to 256 are about as good


def best_tokens(
    logits: Float[Array, "rows v"],
    n: int,
    pad_id: int,
    forbidden_ids: Sequence[int] = (),
    *,
    renormalize_logits: bool = False,
    forced: Int[Array, " rows"] | None = None,
) -> tuple[Float[Array, "rows n"], Int[Array, "rows n"]]:
    """log P of the n most probable tokens of each row, best first, and their ids; of equal ones the lower id first.

    In at least float32. PAD and the forbidden ids have -inf; what has -inf may come under any id.

    Args:
        logits: of the next token.
        n: how many; at most v.
        pad_id: never generated.
        forbidden_ids: more tokens that are never generated.
        renormalize_logits: the forbidden ids leave the softmax (PAD does not), rather than being struck out after it.
        forced: the only token that a row may have, whatever is forbidden; below 0: any.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    possible, normalizer = possible_tokens(logits, pad_id, forbidden_ids, renormalize_logits=renormalize_logits)
    best, ids = top(possible, n)
    log_probs = jnp.where(best == -jnp.inf, -jnp.inf, best - normalizer)  # where: -inf - -inf is NaN
    if forced is None:
        return log_probs, ids
    is_forced, is_first_rank = (forced >= 0)[:, None], (jnp.arange(n) == 0)[None]
    own = jnp.where(is_first_rank, forced_log_probs(logits, forced)[:, None], -jnp.inf)
    return jnp.where(is_forced, own, log_probs), jnp.where(is_forced, forced[:, None], ids)


def forced_log_probs(logits: Float[Array, "rows v"], forced: Int[Array, " rows"]) -> Float[Array, " rows"]:
    """log P of the forced token of each row, in a softmax of all tokens: it may be one that is forbidden elsewhere."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(forced, 0)[:, None], axis=1)[:, 0]


def possible_tokens(
    logits: Float[Array, "rows v"], pad_id: int, forbidden_ids: Sequence[int], *, renormalize_logits: bool
) -> tuple[Float[Array, "rows v"], Float[Array, "rows 1"]]:
    """The logits with -inf for what may not be generated, and what is taken from a logit to make it log P.

    The arguments are those of `best_tokens`.
    """
    forbidden, impossible = np.zeros((2, 1, logits.shape[-1]), bool)
    forbidden[:, list(forbidden_ids)] = True
    impossible[:, [*forbidden_ids, pad_id]] = True
    allowed = jnp.where(forbidden, -jnp.inf, logits) if renormalize_logits else logits
    return jnp.where(impossible, -jnp.inf, logits), jax.nn.logsumexp(allowed, axis=-1, keepdims=True)


def top(x: Float[Array, "rows v"], n: int) -> tuple[Float[Array, "rows n"], Int[Array, "rows n"]]:
    """`jax.lax.top_k`, which is a hundred times slower on CPUs where v is large; what is -inf may come at any place."""
    if x.shape[1] <= _BLOCK:
        return _top_sorted(x, n)
    if n == 1:
        return _top_one_by_one(x, 1)
    return jax.lax.platform_dependent(x, cpu=partial(_top_by_blocks, n=n), default=partial(_top_sorted, n=n))


def _top_sorted(x: Float[Array, "rows v"], n: int) -> tuple[Float[Array, "rows n"], Int[Array, "rows n"]]:
    best, ids = jax.lax.top_k(x, n)
    return best, ids


def _top_by_blocks(x: Float[Array, "rows v"], n: int) -> tuple[Float[Array, "rows n"], Int[Array, "rows n"]]:
    """The n best are in the n blocks whose best are best: only these are searched."""
    rows, v = x.shape
    if v <= n * _BLOCK:
        return _top_one_by_one(x, n)
    x = jnp.pad(x, ((0, 0), (0, -v % _BLOCK)), constant_values=-jnp.inf)
    blocks = x.reshape(rows, -1, _BLOCK)
    chosen = jnp.sort(_top_one_by_one(jnp.max(blocks, axis=2), n)[1], axis=1)  # in order, so that the lower id is first
    best, places = _top_one_by_one(jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1), n)
    return best, jnp.take_along_axis(chosen, places // _BLOCK, axis=1) * _BLOCK + places % _BLOCK


def _top_one_by_one(x: Float[Array, "rows v"], n: int) -> tuple[Float[Array, "rows n"], Int[Array, "rows n"]]:
    """n times the largest, of equal ones the first: reductions, which run as fast as memory is read."""
    v = x.shape[1]
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)

    def take_largest(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        x, is_left = carry
        largest = jnp.max(x, axis=1, keepdims=True)
        # Those that were taken are -inf too: of several -inf the first that is left is taken, no place twice.
        first = jnp.min(jnp.where((x == largest) & is_left, ids, v - 1), axis=1, keepdims=True)
        is_taken = ids == first
        return (jnp.where(is_taken, -jnp.inf, x), is_left & ~is_taken), (largest[:, 0], first[:, 0])

    _, (best, places) = jax.lax.scan(take_largest, (x, jnp.ones(x.shape, bool)), length=n)
    return best.T, places.T
