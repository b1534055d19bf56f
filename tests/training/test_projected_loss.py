"""The fused loss, which computes the logits in chunks, against cross-entropy over all logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model.embedding import Unembedding, unembed
from transformer_jax.training.loss import LossSpec, cross_entropy, fused_linear_cross_entropy

B, T, D, V = 3, 5, 4, 7


def example(has_bias, dtype="float64", pad_id=0):
    rng = np.random.default_rng(0)
    bias = jnp.asarray(rng.normal(size=V), dtype) if has_bias else None
    output = Unembedding(jnp.asarray(rng.normal(size=(V, D)), dtype), bias)
    targets = rng.integers(0, V, (B, T)).astype(np.int32)
    targets[0, 3:] = pad_id
    return jnp.asarray(rng.normal(size=(B, T, D)), dtype), output, jnp.asarray(targets), jnp.asarray(targets != pad_id)


@pytest.mark.parametrize("mass", ["non_target", "all", "non_target_non_pad"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("max_logits", "smoothing"), [(None, 0.1), (3 * V, 0.1), (2 * V, 0.1), (1, 0.0)])
def test_fused_loss_and_gradients_equal_cross_entropy(mass, has_bias, max_logits, smoothing):
    with jax.enable_x64(True):
        x, output, targets, weights = example(has_bias)
        spec = LossSpec(smoothing, mass, 0, max_logits)

        def in_parts(x, output):
            found = fused_linear_cross_entropy(x, output, targets, weights, spec)
            return 1.7 * found.loss_sum, found

        def at_once(x, output):
            found = cross_entropy(unembed(x, output), targets, weights, spec)
            return 1.7 * found.loss_sum, found

        (_, found), grads = jax.jit(jax.value_and_grad(in_parts, argnums=(0, 1), has_aux=True))(x, output)
        (_, expected), expected_grads = jax.value_and_grad(at_once, argnums=(0, 1), has_aux=True)(x, output)
        alone = jax.jit(in_parts)(x, output)[1]
    for sums in (found, alone):
        np.testing.assert_allclose(sums, expected, rtol=1e-12)
    for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert grad.dtype == jnp.float64
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-10, atol=1e-12)
    assert not np.any(grads[0][0, 3:])  # positions that do not count


def test_bfloat16_is_summed_in_float32_and_gradients_have_their_own_dtype():
    x, output, targets, weights = example(True, "float32")
    rounded = x.astype(jnp.bfloat16)

    def loss(x, output, max_logits):
        return fused_linear_cross_entropy(x, output, targets, weights, LossSpec(max_logits=max_logits)).loss_sum

    value, grads = jax.value_and_grad(loss, argnums=(0, 1))(rounded, output, 2 * V)
    expected, expected_grads = jax.value_and_grad(loss, argnums=(0, 1))(x, output, None)
    assert value.dtype == jnp.float32
    assert [leaf.dtype for leaf in jax.tree.leaves(grads)] == [jnp.bfloat16, jnp.float32, jnp.float32]
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(grad.astype(jnp.float32), expected_grad, rtol=0.05, atol=0.05)


def test_fused_loss_holds_at_most_max_logits():
    """1,024 positions and 4,096 tokens give 16 MiB of logits, computed at once or in 16 chunks."""
    x = jax.ShapeDtypeStruct((8, 128, 16), jnp.float32)
    output = Unembedding(jax.ShapeDtypeStruct((4096, 16), jnp.float32), None)
    targets, weights = jax.ShapeDtypeStruct((8, 128), jnp.int32), jax.ShapeDtypeStruct((8, 128), jnp.bool_)

    def temporary_bytes(max_logits):
        def loss(x, output, targets, weights):
            return fused_linear_cross_entropy(
                x, output, targets, weights, LossSpec(0.0, max_logits=max_logits)
            ).loss_sum

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, output, targets, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole, parts = temporary_bytes(None), temporary_bytes(1024 * 4096 // 16)
    assert whole >= 2**24
    assert parts < whole / 4
