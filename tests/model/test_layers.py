"""Single layers and stacks (paper section 3.1) against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from model_cases import apply, as_float32, random_params, tiny

from transformer_jax.model.layers import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    SublayerConnection,
    make_attention,
    make_feed_forward,
    make_norm,
)
from transformer_jax.model.normalization import LayerNorm

X = np.random.default_rng(0).normal(size=(2, 4, 8)).astype(np.float32)
MEMORY = np.random.default_rng(1).normal(size=(2, 5, 8)).astype(np.float32)
SRC_MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool)[:, None, None, :]
TGT_MASK = np.tril(np.ones((1, 1, 4, 4), bool))
CONFIGS = {
    "post": tiny(d_k=3, d_v=5, activation="gelu"),
    "pre": tiny(norm_position="pre", attention_bias=True, decoder_num_heads=4, decoder_d_ff=10, decoder_num_layers=1),
    "final norm": tiny(final_norm=True, norm_position="pre", norm_variant="unbiased_std", norm_epsilon=0.3),
}


def config_and_params(name):
    return CONFIGS[name], as_float32(random_params(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_encoder_equals_the_reference(name):
    config, params = config_and_params(name)
    params = params["encoder"]
    output = apply(Encoder(config), params, MEMORY, SRC_MASK)
    for b in range(2):
        expected = reference.encoder(params, config, MEMORY[b], SRC_MASK[b, 0, 0])
        np.testing.assert_allclose(output[b], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_decoder_equals_the_reference(name):
    config, params = config_and_params(name)
    params = params["decoder"]
    output = apply(Decoder(config), params, X, MEMORY, TGT_MASK, SRC_MASK)
    for b in range(2):
        expected = reference.decoder(params, config, X[b], MEMORY[b], SRC_MASK[b, 0, 0], TGT_MASK[0, 0])
        np.testing.assert_allclose(output[b], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["post", "pre"])
def test_stack_without_final_norm_equals_its_layers(name):
    """A stack without final norm equals its layers applied in sequence."""
    config, params = config_and_params(name)
    x = MEMORY
    for i in range(config.encoder.num_layers):
        x = apply(EncoderLayer(config), params["encoder"][f"layer_{i}"], x, SRC_MASK)
    np.testing.assert_array_equal(x, apply(Encoder(config), params["encoder"], MEMORY, SRC_MASK))
    y = X
    for i in range(config.decoder.num_layers):
        y = apply(DecoderLayer(config), params["decoder"][f"layer_{i}"], y, MEMORY, TGT_MASK, SRC_MASK)
    expected = apply(Decoder(config), params["decoder"], X, MEMORY, TGT_MASK, SRC_MASK)
    np.testing.assert_array_equal(y, expected)


def test_masks_are_optional():
    config, params = config_and_params("post")
    ones = np.ones((2, 1, 1, 5), bool)
    np.testing.assert_allclose(
        apply(Encoder(config), params["encoder"], MEMORY),
        apply(Encoder(config), params["encoder"], MEMORY, ones),
        atol=1e-6,
    )


def test_encoder_and_decoder_may_differ_in_size():
    config = CONFIGS["pre"]
    for size, num_heads, d_ff in ((config.encoder, 2, 12), (config.decoder, 4, 10)):
        attention, feed_forward = make_attention(config, size), make_feed_forward(config, size)
        assert (attention.num_heads, attention.d_k, attention.d_v) == (num_heads, 8 // num_heads, 8 // num_heads)
        assert (attention.use_bias, attention.d_model) == (True, 8)
        assert (feed_forward.d_ff, feed_forward.d_model) == (d_ff, 8)
    norm = make_norm(CONFIGS["final norm"])
    assert (norm.epsilon, norm.variant) == (0.3, "unbiased_std")


# ------------------------------------------------------------------------------------- around a sub-layer: its dropout


class Doubled(SublayerConnection):
    """A connection around a sub-layer that doubles its input."""

    def setup(self):
        super().setup()
        self.norm = LayerNorm()

    def __call__(self, x, deterministic):
        return super().__call__(x, lambda y: 2 * y, self.norm, deterministic)


def standardised(x):
    return reference.layer_norm({"scale": np.ones(8), "bias": np.zeros(8)}, x.reshape(-1, 8)).reshape(x.shape)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_sublayer_connection_equals_its_formula(norm_position):
    connection = Doubled(tiny(norm_position=norm_position))
    params = {"norm": {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}}
    output = apply(connection, params, X, True)
    expected = standardised(X + 2 * X) if norm_position == "post" else X + 2 * standardised(X)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


def test_dropout_is_applied_to_the_sublayer_output():
    """x + Dropout(2 LayerNorm(x)): an element is x alone, or x + 2 LayerNorm(x) / (1 - rate)."""
    connection = Doubled(tiny(norm_position="pre", residual_dropout=0.25))
    params = {"norm": {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}}
    x = jnp.asarray(np.random.default_rng(2).normal(size=(20, 50, 8)), jnp.float32)
    output = apply(connection, params, x, False, rngs={"dropout": jax.random.key(0)})
    added = np.asarray(output - x)
    kept = added != 0
    assert 0.73 < kept.mean() < 0.77
    expected = 2 * standardised(np.asarray(x)) / 0.75
    np.testing.assert_allclose(added[kept], expected[kept], rtol=1e-3, atol=1e-5)
    assert abs((added - 2 * standardised(np.asarray(x))).mean()) < 0.05
