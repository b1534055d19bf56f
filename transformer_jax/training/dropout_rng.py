"""A cheap counter-based generator of random bits for dropout, which needs many bits of modest quality.

A key is two 32-bit words. Number i of an array is a hash of both words and of i, however the array is sharded. The hash
multiplies and shifts in rounds, as C. Wellons' `lowbias32` (hash-prospector) does. The second word enters in the
middle, so that two keys do not give the same numbers in another order. A key has 2^32 numbers. Not for cryptography.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.random import define_prng_impl
from jax.typing import ArrayLike
from jaxtyping import Array, UInt32

_GOLDEN = 0x9E3779B9  # 2^32 over the golden ratio: an odd number without a pattern


def _round(x: UInt32[Array, "..."], shift: int, factor: int) -> UInt32[Array, "..."]:
    return (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Hash a number so that every bit of the input changes about half of the bits of the output."""
    x = _round(_round(x, 16, 0x7FEB352D), 15, 0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _fold_in(key: UInt32[Array, "2"], data: ArrayLike) -> UInt32[Array, "2"]:
    """Derive a key per number. For a fixed number the map from key to key is one-to-one."""
    first = _mix(key[0] ^ _mix(jnp.asarray(data).astype(jnp.uint32) + jnp.uint32(_GOLDEN)))
    second = _mix(key[1] + first)
    return jnp.stack([_mix(first ^ second), second])


def _seed(seed: Array) -> UInt32[Array, "2"]:
    start = jnp.array([_GOLDEN, 0], jnp.uint32)
    high = seed >> 32 if seed.dtype.itemsize == 8 else jnp.zeros_like(seed)
    return _fold_in(_fold_in(start, seed), high)


def _split(key: UInt32[Array, "2"], shape: tuple[int, ...]) -> UInt32[Array, "*shape 2"]:
    numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    # One more fold than in _fold_in, so that the keys of split differ from those of fold_in.
    keys = jax.vmap(partial(_fold_in, _fold_in(key, jnp.uint32(_GOLDEN))))(numbers)
    return keys.reshape(*shape, 2)


def _element_numbers(shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """Number the elements in row-major order, from a counter per axis, so that each device makes its own numbers."""
    number = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        number += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return number


def _random_bits(key: UInt32[Array, "2"], bit_width: int, shape: tuple[int, ...]) -> Array:
    if bit_width == 64:
        high, low = (_random_bits(_fold_in(key, part), 32, shape).astype(jnp.uint64) for part in (1, 2))
        return (high << jnp.uint64(32)) | low
    x = _round(_element_numbers(shape) ^ key[0], 16, 0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) + key[1]
    x = _round(x * jnp.uint32(0x846CA68B), 16, 0x31848BAB)
    x = x ^ (x >> jnp.uint32(14))
    return (x >> jnp.uint32(32 - bit_width)).astype(f"uint{bit_width}")


HASH = define_prng_impl(
    key_shape=(2,), seed=_seed, split=_split, random_bits=_random_bits, fold_in=_fold_in, name="hash", tag="hash"
)
