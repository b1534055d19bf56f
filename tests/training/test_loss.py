"""Label-smoothed cross-entropy against the paper's definition in NumPy float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from transformer_jax.training.loss import LossSpec, cross_entropy

MASSES = ("non_target", "all", "non_target_non_pad")
V = 7


def example(pad_id=0, rows=6):
    """Return logits `b t v`, and targets of which about a quarter are padding."""
    rng = np.random.default_rng(pad_id)
    targets = rng.integers(0, V, (rows, 4))
    targets[rng.random((rows, 4)) < 0.2] = pad_id
    return (3 * rng.normal(size=(rows, 4, V))).astype(np.float32), targets.astype(np.int32)


@partial(jax.jit, static_argnames=("smoothing", "mass", "pad_id"))
def loss_of(logits, targets, smoothing=0.1, mass="non_target", pad_id=0):
    """Return `cross_entropy` over all positions that are not padding."""
    return cross_entropy(logits, targets, targets != pad_id, LossSpec(smoothing, mass, pad_id))


@pytest.mark.parametrize("mass", MASSES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("pad_id", [0, 3])
def test_each_label_smoothing_variant_equals_its_definition(mass, smoothing, pad_id):
    logits, targets = example(pad_id)
    sums = loss_of(logits, targets, smoothing, mass, pad_id)
    loss_sum, num_tokens = reference.label_smoothed_loss(logits, targets, pad_id, smoothing, mass)
    nll_sum, _ = reference.label_smoothed_loss(logits, targets, pad_id, 0.0, mass)
    assert 0 < num_tokens < targets.size
    assert sums.num_tokens == num_tokens
    np.testing.assert_allclose(sums.loss_sum, loss_sum, rtol=1e-5)
    np.testing.assert_allclose(sums.nll_sum, nll_sum, rtol=1e-5)


@pytest.mark.parametrize("mass", MASSES)
def test_gradient_is_softmax_minus_the_smoothed_target(mass):
    logits, targets = example()
    grad = jax.grad(lambda x: loss_of(x, targets, 0.1, mass).loss_sum)(jnp.asarray(logits))
    scores = logits.astype(np.float64)
    softmax = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    for row, position in np.ndindex(targets.shape):
        target = targets[row, position]
        if target == 0:
            assert not np.any(grad[row, position])
            continue
        expected = softmax[row, position] - reference.smoothed_target(target, V, 0, 0.1, mass)
        np.testing.assert_allclose(grad[row, position], expected, atol=2e-6)


@examples(25)
@given(parts=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_loss_sums_do_not_depend_on_the_batch_split(parts):
    logits, targets = example()
    full = loss_of(logits, targets)
    split = [loss_of(logits[rows], targets[rows]) for part in set(parts) for rows in [np.equal(parts, part)]]
    assert sum(sums.num_tokens for sums in split) == full.num_tokens
    np.testing.assert_allclose(sum(sums.loss_sum for sums in split), full.loss_sum, rtol=1e-5)
    np.testing.assert_allclose(sum(sums.nll_sum for sums in split), full.nll_sum, rtol=1e-5)


def test_positions_of_weight_zero_do_not_affect_the_loss():
    logits, targets = example()
    changed = np.where((targets == 0)[..., None], 50.0, logits).astype(np.float32)
    assert loss_of(changed, targets) == loss_of(logits, targets)


def test_perplexity_of_uniform_logits_is_the_vocabulary_size():
    sums = loss_of(np.full((2, 3, V), 5.0, np.float32), np.ones((2, 3), np.int32))
    np.testing.assert_allclose(np.exp(sums.nll_sum / sums.num_tokens), V, rtol=1e-6)


@pytest.mark.parametrize("mass", MASSES)
def test_large_logits_do_not_overflow(mass):
    logits, targets = np.zeros((1, 1, V), np.float32), np.ones((1, 1), np.int32)
    logits[..., 2] = 1e4
    sums = loss_of(logits, targets, mass=mass)
    np.testing.assert_allclose(
        sums.loss_sum, reference.label_smoothed_loss(logits, targets, 0, 0.1, mass)[0], rtol=1e-5
    )
