"""Fused attention, rematerialization and scanned layers do not change what the model computes."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import apply, as_float32, random_params, sentences, tiny

from transformer_jax.config import ModelConfig
from transformer_jax.model import attention
from transformer_jax.model.attention import MultiHeadAttention, scaled_dot_product_attention
from transformer_jax.model.feed_forward import relu
from transformer_jax.model.transformer import Transformer, abstract_params, attention_maps
from transformer_jax.training.loss import PAPER_LOSS
from transformer_jax.training.step import loss_sums
from transformer_jax.types import Batch

WAYS = (
    {"remat": "layers"},
    {"scan_layers": True},
    {"scan_layers": True, "remat": "layers"},
    {"scan_layers": True, "remat": "dots"},
)


def inputs(dtype=jnp.float32, length=4):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, length, 2, 8)).astype(dtype) for key in keys]


MASK = jnp.array([[1, 1, 1, 0], [0, 0, 0, 0]], bool)[:, None, None]


def test_fused_attention_equals_the_equation_and_fully_masked_rows_give_zeros():
    """Run the wrapper of the cuDNN kernel on JAX's own implementation of attention."""
    for length, mask in ((4, None), (4, MASK), (4, jnp.tril(jnp.ones((4, 4), bool))[None, None] & MASK), (3, None)):
        query, key, value = inputs(length=length)
        found = attention.fused_attention(query, key, value, mask, "xla")
        expected = scaled_dot_product_attention(query, key, value, mask)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        if mask is not None:
            assert not np.any(found[1])


@pytest.fixture
def nvidia(monkeypatch):
    """Lower functions for an NVIDIA GPU on a machine without one."""
    # Private API: JAX has no public way to lower for an absent GPU. The checks of cuDNN and of the device are replaced.
    from jax._src.cudnn import fused_attention_stablehlo

    class Device:
        compute_capability = "9.0"

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device()])
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
    attention._has_cudnn.cache_clear()
    yield Device
    attention._has_cudnn.cache_clear()


def for_cuda(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_cudnn_computes_attention_and_gradient_for_supported_inputs(nvidia):
    query, key, value = inputs(jnp.bfloat16)

    def total(query, kernel="auto"):
        return jnp.sum(scaled_dot_product_attention(query, key, value, MASK, kernel).astype(jnp.float32))

    text = for_cuda(jax.grad(total), query)
    assert "fmhaScaleBiasSoftmax(" in text
    assert "fmhaScaleBiasSoftmaxBackward" in text
    assert "cudnn" not in for_cuda(lambda query: total(query, "xla"), query)
    assert "cudnn" not in for_cuda(lambda *args: scaled_dot_product_attention(*args, kernel="auto"), *inputs())


def test_model_uses_cudnn_at_any_length_and_not_on_old_gpus(nvidia, monkeypatch):
    config = ModelConfig(vocab_size=11, d_model=16, num_heads=2, d_ff=16, num_layers=1, dtype="bfloat16")
    model, params = Transformer(config), abstract_params(config)
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)

    def loss(params, src, tgt_in):
        return jnp.sum(model.apply({"params": params}, src, tgt_in))

    assert for_cuda(jax.grad(loss), params, tokens, tokens).count("fmhaScaleBiasSoftmaxBackward") == 3
    monkeypatch.setattr(nvidia, "compute_capability", "7.5")
    attention._has_cudnn.cache_clear()
    assert "cudnn" not in for_cuda(lambda *args: loss(*args), params, tokens, tokens)


def test_kernel_is_chosen_by_the_platform_that_is_lowered_for(nvidia):
    attend = partial(scaled_dot_product_attention, kernel="auto")
    args = inputs(jnp.bfloat16)
    for platform, is_fused in (("cuda", True), ("cpu", False), ("tpu", False)):
        text = jax.jit(attend).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        assert ("cudnn" in text) == is_fused


def test_training_tells_cudnn_lengths_and_causality_instead_of_a_mask(nvidia):
    config = ModelConfig(vocab_size=11, d_model=16, num_heads=2, d_ff=16, num_layers=1, dtype="bfloat16")
    src, tgt = (jax.ShapeDtypeStruct((3, length), jnp.int32) for length in (5, 7))

    def loss(params, src, tgt):
        return loss_sums(Transformer(config), params, Batch(src, tgt, tgt), PAPER_LOSS, deterministic=True).loss_sum

    text = for_cuda(jax.grad(loss), abstract_params(config), src, tgt)
    assert text.count("fmhaSoftmax(") == text.count("fmhaSoftmaxBackward(") == 3
    assert "fmhaScaleBias" not in text
    kinds = re.findall(r"mask_type\W+?22: .22([A-Z]+)", text)
    assert sorted(kinds) == ["CAUSAL"] * 2 + ["PADDING"] * 4


def test_right_padded_masks_change_neither_loss_nor_gradients(monkeypatch):
    config = dataclasses.replace(tiny(), attention_kernel="auto")
    model, params = Transformer(config), as_float32(random_params(config))
    src, tgt_in = (np.array(rows) for rows in sentences(config))
    src[1, 2:], tgt_in[1, 3:], src[2], tgt_in[2] = 0, 0, 0, 0  # padding last, and a row of nothing but padding
    tgt_out = np.where(np.roll(tgt_in, -1, axis=1) == 0, 0, tgt_in)
    batch = Batch(*map(jnp.asarray, (src, tgt_in, tgt_out)))

    def loss(params):
        return loss_sums(model, params, batch, PAPER_LOSS, deterministic=True).loss_sum

    expected = jax.value_and_grad(loss)(params)
    monkeypatch.setattr(attention, "fits_cudnn", lambda *args: True)
    monkeypatch.setattr(
        attention,
        "scaled_dot_product_attention",
        lambda query, key, value, mask, kernel: attention.fused_attention(query, key, value, mask, "xla"),
    )
    found = jax.value_and_grad(loss)(params)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-4), found, expected)


def test_relu_has_the_derivative_of_its_definition():
    x = jnp.array([-2.0, -0.0, 0.0, 1e-30, 3.0, jnp.nan, jnp.inf, -jnp.inf])
    np.testing.assert_array_equal(relu(x), jax.nn.relu(x))
    tangent = jnp.arange(8.0) + 1
    for derivative in (lambda f: jax.jvp(f, (x,), (tangent,))[1], lambda f: jax.vjp(f, x)[1](tangent)[0]):
        np.testing.assert_array_equal(derivative(relu), derivative(jax.nn.relu))


def test_attention_dropout_disables_the_fused_kernel(nvidia):
    x = jnp.zeros((2, 4, 16), jnp.bfloat16)
    for rate, is_fused in ((0.0, True), (0.5, False)):
        module = MultiHeadAttention(16, 2, 8, 8, dropout_rate=rate, kernel="auto", dtype="bfloat16")
        params = jax.eval_shape(module.init, jax.random.key(0), x, x)["params"]

        def train(params, module=module):
            rngs = {"dropout": jax.random.key(0)}
            return module.apply({"params": params}, x, x, MASK, deterministic=False, rngs=rngs)

        assert ("cudnn" in for_cuda(train, params)) == is_fused


@pytest.mark.parametrize(
    ("way", "stacks"),
    list(zip(WAYS, ({"decoder_num_layers": 1, "norm_position": "pre"}, {"num_layers": 3}, {}, {}), strict=True)),
    ids=str,
)
def test_remat_and_scan_change_neither_logits_nor_gradients(way, stacks):
    config = tiny(**stacks)
    params, (src, tgt_in) = as_float32(random_params(config)), sentences(config)
    other = dataclasses.replace(config, **way)
    assert jax.tree.structure(abstract_params(other)) == jax.tree.structure(abstract_params(config))

    def loss(params, config):
        return jnp.sum(jnp.square(apply(Transformer(config), params, src, tgt_in)))

    (expected, expected_grads), (found, grads) = (
        jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, one) for one in (config, other)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(grad, expected_grad, rtol=1e-3, atol=1e-3 * np.abs(expected_grad).max())


def test_remat_keeps_dropout_masks_and_scanned_layers_depend_on_the_key():
    config = tiny(num_layers=3, residual_dropout=0.5)
    params, (src, tgt_in) = as_float32(random_params(config)), sentences(config)

    def logits(key, **way):
        model = Transformer(dataclasses.replace(config, **way))
        return apply(model, params, src, tgt_in, deterministic=False, rngs={"dropout": jax.random.key(key)})

    np.testing.assert_allclose(logits(0, remat="layers"), logits(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(logits(0, scan_layers=True), logits(0, scan_layers=True))
    assert not np.allclose(logits(0, scan_layers=True), logits(1, scan_layers=True))


def test_scan_compiles_one_layer_body_and_keeps_attention_maps():
    config = tiny(num_layers=3)
    params, (src, tgt_in) = as_float32(random_params(config)), sentences(config)

    def products(config):
        return jax.jit(Transformer(config).apply).lower({"params": params}, src, tgt_in).as_text().count("dot_general")

    looped = dataclasses.replace(config, scan_layers=True)
    assert products(looped) < products(config) / 2
    ids = jnp.asarray(src), jnp.asarray(tgt_in)
    arrays = jax.tree.map(jnp.asarray, params)
    maps, expected = (attention_maps(Transformer(one), arrays, *ids) for one in (looped, config))
    assert len(maps) == 9
    np.testing.assert_array_equal(maps["decoder/layer_2/cross_attention"], expected["decoder/layer_2/cross_attention"])


def test_remat_reduces_memory():
    """Layers are scanned, because XLA's CPU backend otherwise recomputes all layers before it needs the first."""
    config = ModelConfig(vocab_size=50, d_model=32, num_layers=6, num_heads=2, d_ff=256)
    tokens = jax.ShapeDtypeStruct((16, 32), jnp.int32)

    def compiled(**way):
        model = Transformer(dataclasses.replace(config, **way))

        def loss(params, src, tgt_in):
            return jnp.sum(model.apply({"params": params}, src, tgt_in))

        return jax.jit(jax.grad(loss)).lower(abstract_params(config), tokens, tokens).compile()

    ways = {"remat": "none"}, {"remat": "dots"}, {"remat": "layers"}
    kept, dots, again = (compiled(scan_layers=True, **way).memory_analysis().temp_size_in_bytes for way in ways)
    assert dots < kept * 0.6
    assert again < min(dots / 1.5, kept / 3)
    assert 1.2 < compiled(remat="layers").cost_analysis()["flops"] / compiled().cost_analysis()["flops"] < 1.4
