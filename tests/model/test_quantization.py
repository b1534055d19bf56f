"""8-bit matrices against NumPy in float64, and the bound on their error."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.linear import Int8Matrix, matmul, quantize


def rounded(rows):
    scale = np.abs(rows).max(axis=1, keepdims=True) / 127
    scale = np.where(scale > 0, scale, 1)
    return np.rint(rows / scale), scale


def example(rows):
    rng = np.random.default_rng(0)
    matrix = rng.normal(0, 1, (24, 10)) * np.geomspace(1e-3, 1e3, 10)  # outputs of very different sizes
    matrix[:, 3] = 0
    return rng.normal(0, 2, (rows, 24)), matrix


def test_quantization_error_is_at_most_half_a_scale():
    _, matrix = example(1)
    found = quantize(jnp.asarray(matrix, np.float32))
    assert found.values.dtype == np.int8
    assert found.values.shape == (10, 24)
    again = np.asarray(found.values, np.float64).T * np.asarray(found.scale, np.float64)
    assert np.all(np.abs(again - matrix) <= np.abs(matrix).max(axis=0) / 127 * 0.5001)
    assert np.abs(found.values).max() == 127


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_quantized_products_equal_numpy(rows):
    x, matrix = example(rows)
    found = matmul(jnp.asarray(x, np.float32), quantize(jnp.asarray(matrix, np.float32)))
    values, scale = rounded(matrix.T)
    of_rows, of_scale = rounded(x)
    np.testing.assert_allclose(found, of_rows @ values.T * of_scale * scale.T, rtol=1e-5, atol=1e-6)
    # Each of the 24 terms is off by half a step of the one times the other, on either side.
    off = np.abs(found - x @ matrix)
    assert np.all(off <= 24 * (np.abs(x).max(1)[:, None] * np.abs(matrix).max(0)[None]) / 127)
    assert off.max() > 0


def test_dtype_and_plain_matrices():
    x, matrix = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    assert matmul(x, matrix).dtype == jnp.bfloat16
    assert matmul(x, matrix, jnp.float32).dtype == jnp.float32
    assert matmul(x, Int8Matrix(jnp.ones((4, 3), jnp.int8), jnp.ones(4))).dtype == jnp.bfloat16
    assert matmul(x, matrix).tolist() == [[3.0] * 4] * 2
