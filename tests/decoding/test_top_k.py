"""The best next tokens against NumPy's sort of all log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding.top_k import Constraints, top_k, top_k_tokens


def best_tokens(logits, k, pad, forbidden_ids=(), **options):
    """Call `top_k_tokens` with the forbidden ids as a list."""
    forbidden = jnp.isin(jnp.arange(logits.shape[1]), jnp.array(forbidden_ids, jnp.int32))
    return top_k_tokens(logits, k, Constraints(forbidden, pad, **options))


@pytest.mark.parametrize(("v", "n"), [(1, 1), (5, 3), (40, 40), (700, 1), (700, 10), (1000, 3), (641, 10)])
def test_top_k_equals_lax_top_k_including_ties(v, n):
    """Few distinct values give ties within a block of the vocabulary and across blocks."""
    for values in (3, 40, 10**6):
        x = jnp.asarray(np.random.default_rng(v).integers(0, values, (6, v)).astype(np.float32))
        for found, expected in zip(jax.jit(top_k, static_argnums=1)(x, n), jax.lax.top_k(x, n), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("v", [6, 900])
@pytest.mark.parametrize("renormalize_logits", [False, True])
def test_best_tokens_equal_top_k_of_log_softmax(v, renormalize_logits):
    logits = np.random.default_rng(0).normal(0, 3, (4, v))
    forbidden, pad = (1, 4), 2
    kept = np.delete(np.exp(logits), forbidden, axis=1) if renormalize_logits else np.exp(logits)
    expected = logits - np.log(kept.sum(axis=1, keepdims=True))
    expected[:, [*forbidden, pad]] = -np.inf
    n = 3
    log_probs, ids = best_tokens(
        jnp.asarray(logits, np.float32), n, pad, forbidden, renormalize_logits=renormalize_logits
    )
    np.testing.assert_array_equal(ids, np.argsort(-expected, axis=1)[:, :n])
    np.testing.assert_allclose(log_probs, -np.sort(-expected, axis=1)[:, :n], rtol=1e-5)


@pytest.mark.parametrize("renormalize_logits", [False, True])
def test_impossible_tokens_have_minus_infinity_and_no_nan(renormalize_logits):
    logits = jnp.array([[1.0, 2.0, 3.0], [-jnp.inf, 0.0, -jnp.inf], [-jnp.inf, -jnp.inf, -jnp.inf]])
    log_probs, _ = best_tokens(logits, 3, 0, (2,), renormalize_logits=renormalize_logits)
    assert not np.isnan(log_probs).any()
    assert np.isfinite(log_probs).tolist() == [[True, False, False], [True, False, False], [False] * 3]
    log_probs, _ = best_tokens(logits, 3, 0, (0, 1, 2), renormalize_logits=renormalize_logits)
    assert np.all(log_probs == -np.inf)


def test_dtypes_are_at_least_float32():
    assert best_tokens(jnp.zeros((1, 9), jnp.bfloat16), 2, 0)[0].dtype == np.float32
    with jax.enable_x64(True):
        assert best_tokens(jnp.zeros((1, 9), jnp.float64), 2, 0)[0].dtype == np.float64


@pytest.mark.parametrize("possible", [1, 100, 300, 1000])
def test_best_tokens_are_distinct_when_few_are_possible(possible):
    """Most blocks of the vocabulary contain only forbidden tokens, and no other block may be searched twice."""
    logits = -0.01 * jnp.arange(2000.0)[None]
    log_probs, ids = best_tokens(logits, 8, 0, range(possible + 1, 2000))
    found = [int(token) for token, log_prob in zip(ids[0], log_probs[0], strict=True) if log_prob > -np.inf]
    assert found == list(range(1, 1 + min(8, possible)))
