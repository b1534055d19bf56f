"""Positional encoding (paper section 3.5) against the reference, and the learned position table."""

import jax
import numpy as np
import pytest
import reference
from model_cases import apply

from transformer_jax.model.positional import LearnedPositions, sinusoids
from transformer_jax.types import UserError


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("exponent", ["paper", "tensor2tensor"])
@pytest.mark.parametrize("offset", [0, 1, 7])
def test_sinusoids_equal_the_reference(layout, exponent, offset):
    table = sinusoids(30, 8, layout, exponent, offset)
    assert table.dtype == np.float64
    expected = reference.positional_encoding(30, 8, layout, exponent, offset)
    np.testing.assert_allclose(table, expected, rtol=1e-12, atol=1e-12)


def test_defaults_equal_the_paper():
    """PE(pos, 2i) = sin(pos / 10000^(2i / d_model)), and wavelengths from 2 pi to 10000 * 2 pi."""
    table = sinusoids(5, 512)
    for position, column in ((0, 0), (1, 0), (3, 100), (4, 510)):
        angle = position / 10_000 ** (column / 512)
        np.testing.assert_allclose(table[position, column : column + 2], [np.sin(angle), np.cos(angle)], rtol=1e-12)


def test_offset_shifts_the_table():
    np.testing.assert_array_equal(sinusoids(4, 8, offset=2), sinusoids(6, 8)[2:])


def test_longer_table_starts_with_the_shorter_one():
    np.testing.assert_array_equal(sinusoids(5000, 8)[:3], sinusoids(3, 8))


@pytest.mark.parametrize("offset", [0, 2])
def test_learned_positions(offset):
    table = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    module = LearnedPositions(6, 4, offset)
    np.testing.assert_array_equal(apply(module, {"table": table}, 3), table[offset : offset + 3])
    longest = 6 - offset
    assert apply(module, {"table": table}, longest).shape == (longest, 4)
    with pytest.raises(UserError, match=rf"{longest + 1} tokens .*position_offset {offset}.*max_length 6"):
        apply(module, {"table": table}, longest + 1)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_learned_positions_dtype(param_dtype):
    table = jax.eval_shape(lambda: LearnedPositions(6, 4, 0, param_dtype).init(jax.random.key(0), 3))
    assert table["params"]["table"].dtype == param_dtype


def test_odd_width_of_sinusoids_fails():
    with pytest.raises(ValueError, match=r"d_model=5 is odd; .* Use an even d_model"):
        sinusoids(3, 5)
