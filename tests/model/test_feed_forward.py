"""The feed-forward network (paper section 3.3) against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from model_cases import apply

from transformer_jax.model.feed_forward import FeedForward, activate

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 3, 6)), jnp.float32)
PARAMS = {
    "inner": {"kernel": RNG.normal(size=(6, 10)).astype(np.float32), "bias": RNG.normal(size=10).astype(np.float32)},
    "outer": {"kernel": RNG.normal(size=(10, 6)).astype(np.float32), "bias": RNG.normal(size=6).astype(np.float32)},
}


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
def test_feed_forward_equals_the_reference(activation):
    output = apply(FeedForward(6, 10, activation), PARAMS, X)
    expected = np.stack([reference.feed_forward(PARAMS, row, activation) for row in X])
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swish"])
def test_activate(activation):
    x = np.linspace(-6, 6, 25).astype(np.float32)
    expected = [reference.activation(float(value), activation) for value in x]
    np.testing.assert_allclose(activate(jnp.asarray(x), activation), expected, rtol=1e-5, atol=1e-6)


def test_gelu_is_exact():
    approximate = jax.nn.gelu(jnp.float32(2.0), approximate=True)
    assert abs(activate(jnp.float32(2.0), "gelu") - approximate) > 5e-5


def test_feed_forward_treats_positions_independently():
    def first(x):
        return apply(FeedForward(6, 10), PARAMS, x)[0, 0].sum()

    gradient = np.array(jax.grad(first)(X))
    assert gradient[0, 0].any()
    gradient[0, 0] = 0
    assert not gradient.any()


def test_dropout_is_applied_between_the_two_products():
    """The second product is linear, so the expected output equals the output without dropout."""
    module = FeedForward(6, 10, dropout_rate=0.3)
    expected = apply(module, PARAMS, X)
    np.testing.assert_array_equal(expected, apply(FeedForward(6, 10), PARAMS, X))
    keys = jax.random.split(jax.random.key(0), 1000)
    outputs = jax.jit(jax.vmap(lambda key: apply(module, PARAMS, X, deterministic=False, rngs={"dropout": key})))(keys)
    error = np.abs(np.mean(outputs, axis=0) - expected) / (np.std(outputs, axis=0) / len(keys) ** 0.5)
    assert error.max() < 4.5  # standard errors
    # Where dropout has hit all of the hidden values only the second bias is left.
    almost_all = FeedForward(6, 10, dropout_rate=0.9999)
    output = apply(almost_all, PARAMS, X, deterministic=False, rngs={"dropout": jax.random.key(0)})
    np.testing.assert_allclose(output[0, 0], PARAMS["outer"]["bias"], rtol=1e-6)


@pytest.mark.parametrize(("dtype", "param_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_dtypes(dtype, param_dtype):
    module = FeedForward(6, 10, dtype=dtype, param_dtype=param_dtype)
    output, variables = jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), X))
    assert output.dtype == dtype
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(variables)} == {param_dtype}
