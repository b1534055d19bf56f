"""Length penalties against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding.search import length_penalty


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("gnmt", lambda n, alpha: ((5 + n) / 6) ** alpha),
        ("power", lambda n, alpha: n**alpha),
        ("none", lambda n, alpha: n**0),
    ],
)
def test_length_penalty_equals_its_formula(kind, expected, alpha):
    lengths = np.arange(1, 60)
    penalties = jax.jit(lambda n: length_penalty(kind, n, alpha))(jnp.asarray(lengths))
    assert penalties.shape == lengths.shape
    np.testing.assert_allclose(penalties, expected(lengths.astype(float), alpha), rtol=1e-5)


def test_length_penalty_at_the_papers_alpha():
    """((5 + 25) / 6)^0.6 = 5^0.6 = 2.6265...; the power penalty with the same alpha differs."""
    assert float(length_penalty("gnmt", 25, 0.6)) == pytest.approx(2.6265278)
    assert float(length_penalty("power", 25, 0.6)) == pytest.approx(6.8986483)


def test_unknown_length_penalty_is_rejected():
    with pytest.raises(Exception, match="wu"):
        length_penalty("wu", 3, 0.6)
