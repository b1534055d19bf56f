"""Attention (paper section 3.2) against the reference, and fully masked queries."""

import contextlib

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import reference
from model_cases import apply

from transformer_jax.model.attention import (
    MultiHeadAttention,
    attention_weights,
    scaled_dot_product_attention,
    weighted_sum,
)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


QUERY, KEY, VALUE = normal(2, 3, 2, 4), normal(2, 5, 2, 4), normal(2, 5, 2, 6)  # b t h d_k, b s h d_k, b s h d_v
MASK = np.random.default_rng(0).random((2, 2, 3, 5)) < 0.5
MASK[0, 0, 1] = False  # one query may attend to nothing
MASK = jnp.asarray(MASK)


def reference_weights(mask):
    mask = np.broadcast_to(mask, (2, 2, 3, 5))
    return np.stack(
        [[reference.attention_weights(QUERY[b, :, h], KEY[b, :, h], mask[b, h]) for h in range(2)] for b in range(2)]
    )


# A mask of every shape that broadcasts to `b h t s`.
MASKS = {
    "b h t s": MASK,
    "b 1 t s": MASK[:, 1:],
    "b 1 1 s": MASK[:, 1:, :1],
    "1 1 t s": MASK[:1, 1:],
    "1 h 1 s": MASK[:1, :, :1],
    "none": None,
}


@pytest.mark.parametrize("shape", MASKS)
def test_attention_equals_the_reference(shape):
    mask = MASKS[shape]
    expected = reference_weights(True if mask is None else mask)
    weights = attention_weights(QUERY, KEY, mask)
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    expected_sum = np.einsum("bhts,bshd->bthd", expected, VALUE)
    np.testing.assert_allclose(
        scaled_dot_product_attention(QUERY, KEY, VALUE, mask), expected_sum, rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(weighted_sum(weights, VALUE), expected_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_weight_is_exactly_zero_where_the_mask_is_false(scale):
    weights = np.asarray(attention_weights(scale * QUERY, KEY, MASK))
    assert (weights[~MASK] == 0).all()
    np.testing.assert_allclose(weights.sum(-1), MASK.any(-1).astype(float), atol=1e-6)


def test_fully_masked_query_outputs_zeros():
    def loss(query, key, value):
        return jnp.square(scaled_dot_product_attention(query, key, value, MASK)).sum()

    output = np.asarray(scaled_dot_product_attention(QUERY, KEY, VALUE, MASK))
    assert np.isfinite(output).all()
    assert not output[0, 1, 0].any()
    assert output[0, 1, 1].all()
    gradients = jax.grad(loss, argnums=(0, 1, 2))(QUERY, KEY, VALUE)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not gradients[0][0, 1, 0].any()
    assert gradients[0][0, 1, 1].all()


def test_fully_masked_attention_outputs_zeros():
    mask = jnp.zeros((1, 1, 1, 5), bool)
    output, gradient = jax.value_and_grad(lambda q: scaled_dot_product_attention(q, KEY, VALUE, mask).sum())(QUERY)
    assert output == 0
    assert not gradient.any()


def test_masked_values_do_not_affect_the_output():
    mask = jnp.arange(5)[None, None, None, :] < 3
    gradient = jax.grad(lambda v: jnp.square(scaled_dot_product_attention(QUERY, KEY, v, mask)).sum())(VALUE)
    assert not gradient[:, 3:].any()
    assert gradient[:, :3].all()


def test_softmax_of_bfloat16_is_computed_in_float32():
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in (QUERY, KEY, VALUE))
    weights = attention_weights(query, key, MASK)
    assert weights.dtype == jnp.float32
    exact = attention_weights(query.astype(jnp.float32), key.astype(jnp.float32), MASK)
    np.testing.assert_allclose(weights, exact, rtol=1e-5, atol=1e-6)
    assert scaled_dot_product_attention(query, key, value, MASK).dtype == jnp.bfloat16


def test_float64_stays_float64():
    with jax.enable_x64(True):
        weights = attention_weights(jnp.asarray(QUERY, jnp.float64), jnp.asarray(KEY, jnp.float64), MASK)
        assert weights.dtype == jnp.float64
        np.testing.assert_allclose(weights, reference_weights(MASK), rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------------ multi-head attention


def make(use_bias=False, **changes):
    module = MultiHeadAttention(**({"d_model": 6, "num_heads": 2, "d_k": 4, "d_v": 3, "use_bias": use_bias} | changes))
    shapes = {"query": (6, 2, 4), "key": (6, 2, 4), "value": (6, 2, 3), "output": (2, 3, 6)}
    params = {name: {"kernel": normal(*shape, seed=i)} for i, (name, shape) in enumerate(shapes.items())}
    if use_bias:
        for name, shape in {"query": (2, 4), "key": (2, 4), "value": (2, 3), "output": (6,)}.items():
            params[name]["bias"] = normal(*shape, seed=9)
    return module, params


X, MEMORY = normal(2, 3, 6), normal(2, 5, 6)


@pytest.mark.parametrize("use_bias", [False, True])
def test_multi_head_attention_equals_the_reference(use_bias):
    module, params = make(use_bias)
    shapes = jax.eval_shape(module.init, jax.random.key(0), X, MEMORY)["params"]
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == jax.tree.map(np.shape, params)
    mask = MASK[:, 1:]
    output = apply(module, params, X, MEMORY, mask)
    for b in range(2):
        expected = reference.multi_head_attention(params, X[b], MEMORY[b], mask[b, 0])
        np.testing.assert_allclose(output[b], expected, rtol=1e-5, atol=2e-5)
    unmasked = apply(module, params, X, MEMORY)
    expected = reference.multi_head_attention(params, X[0], MEMORY[0], np.ones((3, 5), bool))
    np.testing.assert_allclose(unmasked[0], expected, rtol=1e-5, atol=2e-5)


def test_masks_may_differ_between_heads():
    module, params = make()
    output = apply(module, params, X, MEMORY, MASK)
    expected = 0
    for head in range(2):
        without_the_other = jax.tree.map(np.array, params)
        without_the_other["output"]["kernel"][1 - head] = 0
        expected += reference.multi_head_attention(without_the_other, X[0], MEMORY[0], MASK[0, head])
    np.testing.assert_allclose(output[0], expected, rtol=1e-5, atol=2e-5)


def test_attention_dropout_keeps_the_expected_output():
    module, params = make(dropout_rate=0.3)
    expected = apply(module, params, X, MEMORY)
    keys = jax.random.split(jax.random.key(0), 1000)
    outputs = jax.jit(
        jax.vmap(lambda key: apply(module, params, X, MEMORY, deterministic=False, rngs={"dropout": key}))
    )(keys)
    assert np.std(outputs, axis=0).min() > 0.05
    error = np.abs(np.mean(outputs, axis=0) - expected) / (np.std(outputs, axis=0) / len(keys) ** 0.5)
    assert error.max() < 4.5  # standard errors


@pytest.mark.parametrize(("dtype", "param_dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_dtypes(dtype, param_dtype):
    module, _ = make(dtype=dtype, param_dtype=param_dtype, use_bias=True)
    output, variables = jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), X.astype(dtype), MEMORY))
    assert output.dtype == dtype
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(variables)} == {param_dtype}


def test_head_sizes_default_to_d_model_over_num_heads():
    module = MultiHeadAttention(d_model=6, num_heads=2)
    params = module.init(jax.random.key(0), X)["params"]
    assert {name: leaf["kernel"].shape for name, leaf in params.items()} == {
        "query": (6, 2, 3),
        "key": (6, 2, 3),
        "value": (6, 2, 3),
        "output": (2, 3, 6),
    }
    np.testing.assert_array_equal(apply(module, params, X), apply(module, params, X, X))
    with pytest.raises(ValueError, match=r"num_heads=4 does not divide d_model=6\. Set num_heads to a divisor"):
        MultiHeadAttention(d_model=6, num_heads=4).init(jax.random.key(0), X)


def test_unbatched_input_fails_with_the_expected_shape():
    module, params = make()
    for arguments, message in (
        (
            (X[0],),
            r"x has shape \[3, 6\]; \[batch, length, d_model=6\] is needed\. Add the batch axis .* with x\[None\]",
        ),
        ((X, MEMORY[0]), r"memory has shape \[5, 6\]"),
        ((X[..., :4],), r"x has shape \[2, 3, 4\]"),
    ):
        with jaxtyping_disabled(), pytest.raises(ValueError, match=message):
            apply(module, params, *arguments)


@contextlib.contextmanager
def jaxtyping_disabled():
    """Leave the annotations unchecked, as they are outside tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_dtypes_may_be_scalar_types():
    module = MultiHeadAttention(d_model=6, num_heads=2, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    output, variables = module.init_with_output(jax.random.key(0), X)
    assert {leaf.dtype for leaf in jax.tree.leaves((output, variables))} == {jnp.dtype(jnp.bfloat16)}
