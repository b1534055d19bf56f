"""The state of incremental decoding: cached keys and values, and the ancestry of a beam's hypotheses."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from transformer_jax.model.attention import KeysValues


class Cache(NamedTuple):
    """What `Transformer.decode_step` takes and returns for k hypotheses of each of b sentences."""

    position: Int[Array, ""]
    """Number of positions decoded so far."""
    past: tuple[KeysValues, ...]
    """Keys and values of each self-attention layer, n = capacity * k: hypothesis j wrote position i at index
    i * k + j."""
    ancestry: Int[Array, "b k l"]
    """Which hypothesis of the beam wrote each position of each hypothesis; -1 where nothing is written yet."""
    cross: tuple[KeysValues, ...]
    """Keys and values of the encoder's output for each cross-attention layer, n = s. They never change."""
    src_mask: Bool[Array, "b 1 1 s"]
    """Which source positions may be attended to."""


def reorder_cache(cache: Cache, rows: Int[Array, " rows"]) -> Cache:
    """Return the cache in which row i continues `rows[i]` of the same sentence; only the small ancestry changes."""
    ancestry = cache.ancestry
    return cache._replace(ancestry=ancestry.reshape(len(rows), -1)[rows].reshape(ancestry.shape))


def resize_cache(cache: Cache, max_length: int) -> Cache:
    """Return the cache with capacity for `max_length` positions."""
    _, k, capacity = cache.ancestry.shape
    more = max_length - capacity
    return cache._replace(
        past=jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, more * k), (0, 0))), cache.past),
        ancestry=jnp.pad(cache.ancestry, ((0, 0), (0, 0), (0, more)), constant_values=-1),
    )
