"""The generator of dropout bits: its definition, and statistics that a poor generator fails."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.training.dropout_rng import HASH
from transformer_jax.training.sharding import make_mesh
from transformer_jax.training.step import dropout_rng

SHAPE = (256, 512)
MASK = 2**32 - 1
KEY, BITS = [108100235, 1675753785], [2185261027, 2217185121, 4044688813, 2681193468]


def number(key: tuple[int, int], index: int) -> int:
    """Return number `index` of a key, computed with Python integers."""
    x = index ^ key[0]
    x = (x ^ x >> 16) * 0x7FEB352D & MASK
    x = (x ^ x >> 15) + key[1] & MASK
    x = x * 0x846CA68B & MASK
    x = (x ^ x >> 16) * 0x31848BAB & MASK
    return x ^ x >> 14


def test_bits_equal_the_definition_in_integers():
    key = jax.random.key(7, impl=HASH)
    words = tuple(int(word) for word in jax.random.key_data(key))
    expected = np.array([number(words, i) for i in range(60)]).reshape(3, 4, 5)
    np.testing.assert_array_equal(jax.random.bits(key, (3, 4, 5)), expected)
    np.testing.assert_array_equal(jax.random.bits(key, (3, 4, 5), jnp.uint8), expected >> 24)


def test_bits_are_the_same_in_every_version():
    """A run that resumes after an upgrade gets the same dropout masks."""
    key = jax.random.fold_in(dropout_rng(0), 5)
    assert jax.random.key_data(key).tolist() == KEY
    assert jax.random.bits(key, (4,)).tolist() == BITS


def test_dropout_keys_are_distinct():
    key = dropout_rng(0)
    steps = jax.vmap(lambda step: jax.random.fold_in(key, step))(jnp.arange(1000))
    seeds = jax.vmap(lambda seed: jax.random.key(seed, impl=HASH))(jnp.arange(-500, 500))
    parts = jax.random.split(key, 1000)
    words = np.concatenate([jax.random.key_data(keys) for keys in (steps, seeds, parts)])
    for column in (words, words[:, :1], words[:, 1:]):
        assert len(np.unique(column, axis=0)) >= len(words) - (0 if column.shape[1] == 2 else 2)


def keep_masks(keys, rate):
    """Return the dropout masks of keys as NumPy arrays."""
    draw = jax.jit(jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, SHAPE)))
    return np.asarray(draw(keys))


def statistics(masks, rate):
    """Return {name: z-scores} of statistics that are standard normal for independent Bernoulli masks."""
    coins = (masks - (1 - rate)) / math.sqrt(rate * (1 - rate))  # mean 0, variance 1
    flat = coins.reshape(len(coins), -1)
    root = math.sqrt(flat.shape[1])
    lags = (1, 2, 3, 4, 8, 16, 64, 511, 512, 513, 1024, 4096, 65536)
    pairs = flat @ flat.T / root
    others = [flat[1:, lag:] * flat[:-1, : flat.shape[1] - lag] for lag in (1, 512)]
    return {
        "rate": flat.sum(axis=1) / root,
        "rate of a row": coins.sum(axis=2).ravel() / math.sqrt(SHAPE[1]),
        "rate of a column": coins.sum(axis=1).ravel() / math.sqrt(SHAPE[0]),
        "lag": np.array([(flat[:, lag:] * flat[:, :-lag]).sum(axis=1) / root for lag in lags]).ravel(),
        "two keys": pairs[np.triu_indices(len(pairs), 1)],
        "two keys, shifted": np.array([product.sum(axis=1) / root for product in others]).ravel(),
    }


def failures(masks, rate):
    """Return the statistics whose spread differs from 1 or that have an outlier."""
    found = {}
    for name, z in statistics(masks, rate).items():
        spread, far = float(np.mean(z**2)), float(np.abs(z).max())
        # z^2 of a coin has variance 2; 6 is reached once in 5e8.
        if abs(spread - 1) > 5 * math.sqrt(2 / len(z)) or far > 6:
            found[name] = (spread, far)
    return found


def keys_of(kind):
    """Return keys as training derives them: for 24 steps, for 24 layers of a step, or for 24 seeds."""
    key = dropout_rng(1)
    numbers = jnp.arange(24)
    if kind == "steps":
        return jax.vmap(lambda step: jax.random.fold_in(key, step))(numbers)
    if kind == "layers":
        step = jax.random.fold_in(key, 3)
        return jax.vmap(lambda layer: jax.random.fold_in(step, layer))(numbers)
    return jnp.stack([dropout_rng(seed) for seed in range(24)])


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("kind", ["steps", "layers", "seeds"])
def test_dropout_masks_are_independent_bernoulli(kind, rate):
    assert not failures(keep_masks(keys_of(kind), rate), rate)


def test_statistics_reject_a_poor_generator():
    """The poor generator is a hash with one multiplication, whose keys only shift it."""
    index = np.arange(math.prod(SHAPE), dtype=np.uint32)[None]
    starts = np.random.default_rng(0).integers(0, 2**32, (24, 1), np.uint32)
    poor = (index + starts) * np.uint32(0x9E3779B9) >= np.uint32(0.1 * 2**32)
    assert failures(poor.reshape(-1, *SHAPE), 0.1)
    near = np.stack([np.roll(keep_masks(keys_of("steps")[:1], 0.1)[0], shift, axis=0) for shift in range(24)])
    assert "two keys, shifted" in failures(near, 0.1)
    assert not failures(keep_masks(jax.random.split(jax.random.key(0), 24), 0.1), 0.1)  # threefry


@pytest.mark.parametrize("spec", [(("data", "fsdp"),), (None, "tensor"), ("data", "tensor")])
def test_dropout_bits_do_not_depend_on_sharding(spec):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    key = dropout_rng(2)
    draw = jax.jit(lambda key: jax.random.bits(key, (8, 16)), out_shardings=NamedSharding(mesh, PartitionSpec(*spec)))
    np.testing.assert_array_equal(draw(key), jax.random.bits(key, (8, 16)))
    assert "all-gather" not in draw.lower(key).compile().as_text()


def test_threefry_can_be_chosen():
    key = jax.random.fold_in(jax.random.key(4), 1)
    np.testing.assert_array_equal(jax.random.key_data(dropout_rng(4, "threefry")), jax.random.key_data(key))
