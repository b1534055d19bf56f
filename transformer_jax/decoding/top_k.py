"""Top-k next tokens of each row, without sorting the vocabulary or materializing its log-probabilities."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_BLOCK = 64  # vocabulary entries per block in `_top_k_by_blocks`; 32 to 256 are about equally fast


class Constraints(NamedTuple):
    """Which tokens a search may generate at one step."""

    forbidden: Bool[Array, " v"]
    """True for tokens that may not be generated."""
    pad_id: int
    """Token id of padding, which is never generated."""
    renormalize_logits: bool = False
    """Exclude `forbidden` tokens, but not padding, from the softmax, instead of masking them after it."""
    forced: Int[Array, " rows"] | None = None
    """The only token that each row may generate, even if it is forbidden. A negative value sets no constraint."""


def top_k_tokens(
    logits: Float[Array, "rows v"], k: int, constraints: Constraints
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Return log P, in at least float32, and ids of the k most probable next tokens of each row, best first.

    Of equally probable tokens the lower id comes first. A token that may not be generated has log P = -inf and an
    arbitrary id.
    """
    masked, normalizer = mask_logits(logits, constraints)
    values, ids = top_k(masked, k)
    return jnp.where(values == -jnp.inf, -jnp.inf, values - normalizer), ids  # -inf - -inf would be NaN


def mask_logits(
    logits: Float[Array, "rows v"], constraints: Constraints
) -> tuple[Float[Array, "rows v"], Float[Array, "rows 1"]]:
    """Return the logits, in at least float32, and the normalizer to subtract from them for log P.

    Tokens that may not be generated have -inf. A forced token is normalized by the complete vocabulary.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    ids, forced = jnp.arange(logits.shape[-1]), constraints.forced
    excluded, impossible = constraints.forbidden[None], (constraints.forbidden | (ids == constraints.pad_id))[None]
    if forced is not None:
        is_forced = (forced >= 0)[:, None]
        excluded &= ~is_forced
        impossible = jnp.where(is_forced, ids[None] != forced[:, None], impossible)
    normalized = jnp.where(excluded, -jnp.inf, logits) if constraints.renormalize_logits else logits
    return jnp.where(impossible, -jnp.inf, logits), jax.nn.logsumexp(normalized, axis=-1, keepdims=True)


def top_k(x: Float[Array, "rows v"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Return what `jax.lax.top_k` does, but about 100 times faster on a CPU for a large vocabulary.

    The indices of entries that are -inf are arbitrary but distinct.
    """
    if x.shape[1] <= _BLOCK:
        return _top_k_by_sort(x, k)
    if k == 1:
        return _top_k_by_max(x, 1)
    return jax.lax.platform_dependent(x, cpu=partial(_top_k_by_blocks, k=k), default=partial(_top_k_by_sort, k=k))


def _top_k_by_sort(x: Float[Array, "rows v"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    values, indices = jax.lax.top_k(x, k)
    return values, indices


def _top_k_by_blocks(x: Float[Array, "rows v"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Search only the k blocks with the largest maxima: they contain the k largest values."""
    rows, v = x.shape
    if v <= k * _BLOCK:
        return _top_k_by_max(x, k)
    x = jnp.pad(x, ((0, 0), (0, -v % _BLOCK)), constant_values=-jnp.inf)
    blocks = x.reshape(rows, -1, _BLOCK)
    # Sorted by position, so that of equal values the lower index comes first.
    chosen = jnp.sort(_top_k_by_max(jnp.max(blocks, axis=2), k)[1], axis=1)
    values, index = _top_k_by_max(jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1), k)
    return values, jnp.take_along_axis(chosen, index // _BLOCK, axis=1) * _BLOCK + index % _BLOCK


def _top_k_by_max(x: Float[Array, "rows v"], k: int) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """Take the maximum k times, the first of equal values each time: k reductions at memory bandwidth."""
    v = x.shape[1]
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)

    def take_largest(carry: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        x, is_left = carry
        largest = jnp.max(x, axis=1, keepdims=True)
        # Taken entries become -inf too, so `is_left` keeps an index from being returned twice among several -inf.
        first = jnp.min(jnp.where((x == largest) & is_left, ids, v - 1), axis=1, keepdims=True)
        is_taken = ids == first
        return (jnp.where(is_taken, -jnp.inf, x), is_left & ~is_taken), (largest[:, 0], first[:, 0])

    _, (values, indices) = jax.lax.scan(take_largest, (x, jnp.ones(x.shape, bool)), length=k)
    return values.T, indices.T
