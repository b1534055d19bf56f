"""Layer normalization (paper section 3.1) against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from model_cases import apply, to_jax

from transformer_jax.model.normalization import LayerNorm, layer_norm

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 3, 6)), jnp.float32)
PARAMS = to_jax({"scale": RNG.normal(size=6).astype(np.float32), "bias": RNG.normal(size=6).astype(np.float32)})
VARIANTS = ["standard", "unbiased_std"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("epsilon", [1e-6, 1e-5, 0.3])
def test_layer_norm_equals_the_reference(variant, epsilon):
    output = apply(LayerNorm(epsilon, variant), PARAMS, X)
    expected = np.stack([reference.layer_norm(PARAMS, row, epsilon, variant) for row in X])
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(layer_norm(X, **PARAMS, epsilon=epsilon, variant=variant), output)


@pytest.mark.parametrize("variant", VARIANTS)
def test_layer_norm_accepts_any_leading_axes(variant):
    for x in (X[0, 0], X[0], X, X[None]):
        output = layer_norm(x, **PARAMS, variant=variant)
        expected = reference.layer_norm(PARAMS, x.reshape(-1, 6), variant=variant).reshape(x.shape)
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_constant_row_gives_the_bias_and_finite_gradients(variant):
    """The output is the bias, and no gradient is NaN although the derivative of sqrt at 0 is infinite."""
    x = X.at[0, 1].set(2.5)
    output = layer_norm(x, **PARAMS, variant=variant)
    np.testing.assert_allclose(output[0, 1], PARAMS["bias"], rtol=1e-6)
    weights = RNG.normal(size=x.shape).astype(np.float32)
    gradients = jax.grad(lambda x, p: (weights * layer_norm(x, **p, variant=variant)).sum(), argnums=(0, 1))(x, PARAMS)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert gradients[0][1].all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_statistics_of_bfloat16_are_computed_in_float32(variant):
    x = jnp.asarray(50 + X, jnp.bfloat16)  # rounded to multiples of 1/4: the mean and variance need more bits
    output = layer_norm(x, **PARAMS, variant=variant)
    assert output.dtype == jnp.bfloat16
    exact = np.stack([reference.layer_norm(PARAMS, row, variant=variant) for row in np.asarray(x, np.float64)])
    np.testing.assert_allclose(np.asarray(output, np.float64), exact, rtol=2**-8, atol=1e-5)


def test_float64_stays_float64():
    with jax.enable_x64(True):
        output = layer_norm(jnp.asarray(X, jnp.float64), **{k: jnp.asarray(v, jnp.float64) for k, v in PARAMS.items()})
        assert output.dtype == jnp.float64
        np.testing.assert_allclose(output[0], reference.layer_norm(PARAMS, X[0]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_parameters(param_dtype):
    params = LayerNorm(param_dtype=param_dtype).init(jax.random.key(0), X)["params"]
    assert {name: (leaf.shape, str(leaf.dtype)) for name, leaf in params.items()} == {
        "scale": ((6,), param_dtype),
        "bias": ((6,), param_dtype),
    }
    assert (params["scale"] == 1).all()
    assert not params["bias"].any()


def test_bfloat16_keeps_no_float32_for_the_backward_pass():
    x = jax.random.normal(jax.random.key(0), (4, 64)).astype(jnp.bfloat16)
    module = LayerNorm()
    params = module.init(jax.random.key(0), x)

    def grad(x):
        result, backward = jax.vjp(lambda params, x: module.apply(params, x), params, x)
        kept = [leaf.dtype for leaf in jax.tree.leaves(backward) if leaf.size == x.size]
        return kept, backward(jnp.ones_like(result) * x)

    kept, (params_grad, x_grad) = grad(x)
    assert kept == [jnp.bfloat16]
    kept, (exact_params_grad, exact_x_grad) = grad(x.astype(jnp.float32))
    assert jnp.float32 in kept
    for name in ("scale", "bias"):
        exact = exact_params_grad["params"][name]
        np.testing.assert_allclose(params_grad["params"][name], exact, rtol=0.02, atol=0.05)
    np.testing.assert_allclose(x_grad.astype(jnp.float32), exact_x_grad, rtol=0.05, atol=0.02)
