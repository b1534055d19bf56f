"""Embeddings and logits (paper section 3.4)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import apply

from transformer_jax.model.embedding import Embedding, Unembedding, unembed

TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), jnp.float32)
TOKENS = jnp.array([[0, 3], [6, 3], [5, 5]], jnp.int32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 4)), jnp.float32)


@pytest.mark.parametrize(("scale", "factor"), [(True, 2.0), (False, 1.0)])  # sqrt(4)
def test_embedding_returns_a_row_of_the_table(scale, factor):
    module = Embedding(7, 4, scale)
    vectors = apply(module, {"table": TABLE}, TOKENS)
    for b in range(3):
        for t in range(2):
            np.testing.assert_allclose(vectors[b, t], factor * TABLE[TOKENS[b, t]], rtol=1e-6)


@pytest.mark.parametrize("bias", [None, jnp.arange(7.0)])
def test_logits_equal_product_plus_bias(bias):
    logits = unembed(X, Unembedding(TABLE, bias))
    expected = np.asarray(X, np.float64) @ np.asarray(TABLE).T + (0 if bias is None else np.asarray(bias))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_dtypes(param_dtype):
    module = Embedding(7, 4, dtype="bfloat16", param_dtype=param_dtype)
    vectors, variables = jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), TOKENS))
    assert vectors.dtype == jnp.bfloat16
    assert variables["params"]["table"].dtype == param_dtype


def test_bfloat16_products_of_logits_are_summed_in_float32():
    x = np.ones((1, 1, 1000), np.float32)
    table = np.full((2, 1000), 1 + 2**-7, np.float32)  # a bfloat16; the sum of 1,000 of them is not
    logits = unembed(jnp.asarray(x, jnp.bfloat16), Unembedding(jnp.asarray(table, jnp.bfloat16), None))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0, 0], [1007.8125] * 2, rtol=1e-6)


def test_float64_logits_stay_float64():
    with jax.enable_x64(True):
        logits = unembed(jnp.asarray(X, jnp.float64), Unembedding(jnp.asarray(TABLE, jnp.float64), None))
        assert logits.dtype == jnp.float64
