"""The NumPy reference against cases computed by hand."""

import math

import numpy as np
import pytest
import reference

from transformer_jax.config import ModelConfig


def test_attention_over_two_keys_by_hand():
    # d_k = 4 halves the scores: 2 log 3 becomes log 3, and softmax(log 3, 0) is (3/4, 1/4).
    Q = [[2 * math.log(3), 0, 0, 0]]
    K = [[1, 0, 0, 0], [0, 1, 0, 0]]
    V = [[4, 0], [0, 8]]
    np.testing.assert_allclose(reference.attention(Q, K, V, [[True, True]]), [[3, 2]])
    np.testing.assert_allclose(reference.attention(Q, K, V, [[False, True]]), [[0, 8]])
    np.testing.assert_array_equal(reference.attention(Q, K, V, [[False, False]]), [[0, 0]])


def test_heads_are_concatenated_in_order():
    # One position attends to itself alone, so each head returns its value: head 0 doubles x, head 1 swaps it.
    value = np.stack([2 * np.eye(2), np.eye(2)[::-1]], axis=1)
    output = np.stack([np.eye(2), 10 * np.eye(2)])
    params = {
        "query": {"kernel": np.ones((2, 2, 1))},
        "key": {"kernel": np.ones((2, 2, 1))},
        "value": {"kernel": value, "bias": [[0, 0], [0, 1]]},
        "output": {"kernel": output, "bias": [100, 200]},
    }
    result = reference.multi_head_attention(params, [[3, 5]], [[3, 5]], [[True]])
    np.testing.assert_allclose(result, [[6 + 50 + 100, 10 + 10 * (3 + 1) + 200]])


@pytest.mark.parametrize(("name", "at_one", "at_minus_one"), [("relu", 1, 0), ("gelu", 0.841345, -0.158655)])
def test_activation(name, at_one, at_minus_one):
    assert reference.activation(1.0, name) == pytest.approx(at_one, abs=1e-6)
    assert reference.activation(-1.0, name) == pytest.approx(at_minus_one, abs=1e-6)


def test_swish():
    assert reference.activation(math.log(3), "swish") == pytest.approx(math.log(3) * 3 / 4)


def test_feed_forward():
    params = {
        "inner": {"kernel": [[1, -1]], "bias": [1, 1]},
        "outer": {"kernel": [[10], [100]], "bias": [5]},
    }
    # x = 2: inner (3, -1) becomes (3, 0); 3 * 10 + 5.  x = -3: inner (-2, 4) becomes (0, 4); 4 * 100 + 5.
    np.testing.assert_allclose(reference.feed_forward(params, [[2], [-3]]), [[35], [405]])


def test_layer_norm():
    params = {"scale": [1, 1, 2], "bias": [0, 0, 10]}
    x = [[1, 2, 3]]  # variance 2/3, unbiased 1
    standard = reference.layer_norm(params, x, epsilon=1 / 3)
    np.testing.assert_allclose(standard, [[-1, 0, 12]])
    unbiased = reference.layer_norm(params, x, epsilon=1, variant="unbiased_std")
    np.testing.assert_allclose(unbiased, [[-0.5, 0, 11]])


def test_positional_encoding():
    table = reference.positional_encoding(3, 6)
    np.testing.assert_array_equal(table[0], [0, 1, 0, 1, 0, 1])
    assert table[1, 0] == math.sin(1)
    assert table[2, 3] == pytest.approx(math.cos(2 / 10000 ** (2 / 6)))
    np.testing.assert_array_equal(reference.positional_encoding(2, 6, offset=1), table[1:])
    halves = reference.positional_encoding(3, 6, "halves")
    np.testing.assert_array_equal(halves, table[:, [0, 2, 4, 1, 3, 5]])
    # With the released code's exponent the wavelengths of d_model = 6 are 1, 100 and 10000 times 2 pi.
    released = reference.positional_encoding(2, 6, "halves", "tensor2tensor")
    np.testing.assert_allclose(
        released[1], [math.sin(x) for x in (1, 0.01, 1e-4)] + [math.cos(x) for x in (1, 0.01, 1e-4)]
    )


def test_embedding_is_scaled_and_decoder_start_may_be_zeros():
    config = ModelConfig(vocab_size=5, d_model=4, num_heads=2, decoder_start="zeros")
    params = {"embedding": {"table": np.arange(20).reshape(5, 4)}}
    positions = reference.positional_encoding(2, 4)
    source = reference.embed(params, config, [1, 2], "source")
    np.testing.assert_allclose(source - positions, [[8, 10, 12, 14], [16, 18, 20, 22]])
    target = reference.embed(params, config, [1, 2], "target")
    np.testing.assert_allclose(target - positions, [[0, 0, 0, 0], [16, 18, 20, 22]])


def test_learned_positions_start_at_the_offset():
    config = ModelConfig(
        vocab_size=5,
        d_model=2,
        num_heads=1,
        positions="learned",
        position_offset=1,
        max_length=3,
        tie_embeddings="none",
        scale_embeddings=False,
    )
    params = {"source_embedding": {"table": np.eye(5, 2)}, "source_positions": {"table": [[9, 9], [10, 20], [30, 40]]}}
    np.testing.assert_array_equal(reference.embed(params, config, [1, 0], "source"), [[10, 21], [31, 40]])


def test_masks():
    config = ModelConfig(vocab_size=9)
    np.testing.assert_array_equal(reference.source_mask(config, [5, 6, 0]), [1, 1, 0])
    causal = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    np.testing.assert_array_equal(reference.target_mask(config, [1, 5, 6]), causal)
    np.testing.assert_array_equal(reference.target_mask(config, [0, 5, 6]), causal)  # the start token may be PAD
    np.testing.assert_array_equal(reference.target_mask(config, [1, 5, 0]), [[1, 0, 0], [1, 1, 0], [1, 1, 0]])


@pytest.mark.parametrize(
    ("mass", "q"),
    [
        ("non_target", [0.1, 0.1, 0.7, 0.1]),  # 0.3 over V - 1 = 3
        ("all", [0.075, 0.075, 0.775, 0.075]),  # 0.3 over V = 4
        ("non_target_non_pad", [0, 0.15, 0.7, 0.15]),  # 0.3 over V - 2 = 2
    ],
)
def test_label_smoothing(mass, q):
    np.testing.assert_allclose(reference.smoothed_target(2, 4, 0, 0.3, mass), q)
    # The model predicts (1/8, 1/8, 1/2, 1/4). The second token is padding and does not count.
    logits = [[np.log([1, 1, 4, 2]), [0, 0, 0, 0]]]
    loss_sum, num_tokens = reference.label_smoothed_loss(logits, [[2, 0]], 0, 0.3, mass)
    bits = 3 * q[0] + 3 * q[1] + 1 * q[2] + 2 * q[3]
    assert loss_sum == pytest.approx(bits * math.log(2))
    assert num_tokens == 1


def test_noam_rate():
    assert reference.noam_rate(4000, 512) == pytest.approx(6.99e-4, rel=1e-3)
    assert reference.noam_rate(4000, 1024) == pytest.approx(4.94e-4, rel=1e-3)
    assert reference.noam_rate(1000, 512) == pytest.approx(6.99e-4 / 4, rel=1e-3)
    assert reference.noam_rate(16000, 512) == pytest.approx(6.99e-4 / 2, rel=1e-3)


def test_adam():
    # After bias correction the first step has the length of the learning rate, whatever the gradient.
    param, m, v = reference.adam_step([1.0, 1.0], [5.0, -0.01], [0, 0], [0, 0], 1, 0.1)
    np.testing.assert_allclose(param, [0.9, 1.1], rtol=1e-6)
    np.testing.assert_allclose(m, [0.5, -0.001])
    np.testing.assert_allclose(v, [0.5, 2e-6])
    # A second, zero gradient: m_hat = 0.45 / 0.19, v_hat = 0.49 / 0.0396.
    param, _, _ = reference.adam_step(param, [0.0, 0.0], m, v, 2, 0.1)
    assert param[0] == pytest.approx(0.9 - 0.1 * (0.45 / 0.19) / math.sqrt(0.49 / 0.0396))


def random_params(config, seed=0):
    """Return random parameters with the names and shapes that the reference uses."""
    rng, d = np.random.default_rng(seed), config.d_model

    def draw(*shape):
        return rng.normal(size=shape, scale=0.5)

    def norm():
        return {"scale": 1 + draw(d), "bias": draw(d)}

    def attention(size):
        shapes = {
            "query": (size.num_heads, size.d_k),
            "key": (size.num_heads, size.d_k),
            "value": (size.num_heads, size.d_v),
        }
        params = {name: {"kernel": draw(d, *shape)} for name, shape in shapes.items()}
        params["output"] = {"kernel": draw(size.num_heads, size.d_v, d)}
        if config.attention_bias:
            for name, shape in (shapes | {"output": (d,)}).items():
                params[name]["bias"] = draw(*shape)
        return params

    def stack(size, sub_layers):
        params = {}
        for i in range(size.num_layers):
            layer = {name: attention(size) for name in sub_layers}
            layer["feed_forward"] = {
                "inner": {"kernel": draw(d, size.d_ff), "bias": draw(size.d_ff)},
                "outer": {"kernel": draw(size.d_ff, d), "bias": draw(d)},
            }
            layer |= {f"{name}_norm": norm() for name in tuple(layer)}
            params[f"layer_{i}"] = layer
        return params | ({"final_norm": norm()} if config.final_norm else {})

    params = {
        "encoder": stack(config.encoder, ("self_attention",)),
        "decoder": stack(config.decoder, ("self_attention", "cross_attention")),
    }
    if config.tie_embeddings == "all":
        params["embedding"] = {"table": draw(config.vocab_size, d)}
    else:
        params["source_embedding"] = {"table": draw(config.source_rows, d)}
        params["target_embedding"] = {"table": draw(config.vocab_size, d)}
    if config.tie_embeddings == "none":
        params["output_projection"] = {"kernel": draw(d, config.vocab_size)}
    if config.logits_bias:
        params["logits_bias"] = draw(config.vocab_size)
    if config.positions == "learned":
        params |= {f"{side}_positions": {"table": draw(config.max_length, d)} for side in ("source", "target")}
    return params


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_position": "pre", "final_norm": True, "attention_bias": True, "activation": "gelu"},
        {"norm_variant": "unbiased_std", "tie_embeddings": "target", "source_vocab_size": 7, "logits_bias": True},
        {"positions": "learned", "position_offset": 2, "tie_embeddings": "none", "decoder_start": "zeros"},
        {
            "d_k": 3,
            "d_v": 5,
            "decoder_num_layers": 1,
            "decoder_num_heads": 3,
            "decoder_d_ff": 6,
            "decoder_d_k": 2,
            "positions": "halves",
            "position_exponent": "tensor2tensor",
            "activation": "swish",
        },
    ],
)
def test_transformer_ignores_future_and_padding_positions(changes):
    config = ModelConfig(**({"vocab_size": 9, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 12} | changes))
    params = random_params(config)
    logits = reference.transformer(params, config, [[4, 5, 2]], [[config.start_id, 6, 7]])
    assert logits.shape == (1, 3, 9)
    assert np.isfinite(logits).all()
    longer = reference.transformer(params, config, [[4, 5, 2, 0]], [[config.start_id, 6, 8, 0]])
    np.testing.assert_allclose(longer[:, :2], logits[:, :2], rtol=1e-12)
    assert np.abs(longer[:, 2] - logits[:, 2]).max() > 1e-3
    reordered = reference.transformer(params, config, [[5, 4, 2]], [[config.start_id, 6, 7]])
    assert np.abs(reordered - logits).max() > 1e-3


def test_norm_position_and_final_norm():
    base = ModelConfig(vocab_size=9, d_model=4, num_layers=1, num_heads=2, d_ff=4, final_norm=True)
    params = random_params(base)
    x = np.random.default_rng(1).normal(size=(2, 4))
    layer, mask = params["encoder"]["layer_0"], np.array([True, True])
    both = np.ones((2, 2), dtype=bool)

    def norm(name, y):
        return reference.layer_norm(params["encoder"]["final_norm"] if name == "final" else layer[f"{name}_norm"], y)

    def attend(y):
        return reference.multi_head_attention(layer["self_attention"], y, y, both)

    def feed(y):
        return reference.feed_forward(layer["feed_forward"], y)

    y = norm("self_attention", x + attend(x))
    post = norm("final", norm("feed_forward", y + feed(y)))
    np.testing.assert_allclose(reference.encoder(params["encoder"], base, x, mask), post)

    y = x + attend(norm("self_attention", x))
    pre = norm("final", y + feed(norm("feed_forward", y)))
    config = ModelConfig(
        vocab_size=9, d_model=4, num_layers=1, num_heads=2, d_ff=4, final_norm=True, norm_position="pre"
    )
    np.testing.assert_allclose(reference.encoder(params["encoder"], config, x, mask), pre)
