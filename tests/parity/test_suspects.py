"""A convention error on one side: the report names the sub-layer where it shows first, and the convention."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.interop.tables import flatten, unflatten
from transformer_jax.parity.compare import compare_layers, random_batches, random_params
from transformer_jax.parity.this_side import Masks, Side, convert_source

# Odd shapes; encoder and decoder differ.
SIZES = {"vocab_size": 19, "d_model": 12, "num_heads": 2, "d_ff": 20, "decoder_num_heads": 3, "decoder_d_ff": 12}
PAPER = ModelConfig(**SIZES, num_layers=2, decoder_num_layers=1, attention_bias=True, logits_bias=True)
CONFIGS = {
    "torch": PAPER,
    "annotated": dataclasses.replace(PAPER, norm_position="pre", final_norm=True, norm_variant="unbiased_std"),
    "fairseq": dataclasses.replace(
        PAPER,
        norm_epsilon=1e-5,
        positions="halves",
        position_exponent="tensor2tensor",
        position_offset=2,
        bos_id=0,
        pad_id=1,
        decoder_start="eos",
        logits_bias=False,
    ),
    "marian": dataclasses.replace(
        PAPER, norm_epsilon=1e-5, positions="halves", decoder_start="pad", activation="swish"
    ),
}


@pytest.fixture(scope="module")
def peers(optional_package):
    optional_package("torch")
    from transformer_jax.parity import peers

    return peers


def found(side, oracle):
    """(first divergence, cause) in float64."""
    _, first, cause = compare_layers(side, oracle, random_batches(oracle.config, 1)[0])
    return first, cause


# What this side has in place of the other side's PAPER; where it shows; what is said of the other side.
FIELDS = {
    "epsilon 1e-5": ({"norm_epsilon": 1e-5}, "encoder/layer_0/self_attention_norm", "1e-06"),
    "epsilon 1e-12": ({"norm_epsilon": 1e-12}, "encoder/layer_0/self_attention_norm", "1e-06"),
    "halves": ({"positions": "halves"}, "encoder/embedding", "'interleaved'"),
    "exponent": ({"position_exponent": "tensor2tensor"}, "encoder/embedding", "'paper'"),
    "offset 1": ({"position_offset": 1}, "encoder/embedding", "0"),
    "offset 2": ({"position_offset": 2}, "encoder/embedding", "0"),
    "no scale": ({"scale_embeddings": False}, "encoder/embedding", "True"),
    "source without BOS": ({"source_bos": True}, "encoder/embedding", "False"),
    "source without EOS": ({"source_eos": False}, "encoder/embedding", "True"),
    "zeros first": ({"decoder_start": "zeros"}, "decoder/embedding", "'bos'"),
    "final norm": ({"final_norm": True}, "encoder/final_norm", "False"),
    "LayerNorm": ({"norm_variant": "unbiased_std"}, "encoder/layer_0/self_attention_norm", "'standard'"),
    "pre-norm": ({"norm_position": "pre"}, "encoder/layer_0/self_attention", "'post'"),
    "gelu": ({"activation": "gelu"}, "encoder/layer_0/feed_forward", "'relu'"),
    "swish": ({"activation": "swish"}, "encoder/layer_0/feed_forward", "'relu'"),
    "heads": ({"num_heads": 4, "decoder_num_heads": 3}, "encoder/layer_0/self_attention", "2"),
    "heads of the decoder": ({"decoder_num_heads": 6}, "decoder/layer_0/self_attention", "3"),
    "no attention bias": ({"attention_bias": False}, "encoder/layer_0/self_attention", "True"),
    "no logits bias": ({"logits_bias": False}, "logits", "True"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_the_configuration(name, peers):
    changes, place, value = FIELDS[name]
    params = random_params(PAPER)
    other = dataclasses.replace(PAPER, **changes)
    ours = dict(flatten(random_params(other)))
    for path, leaf in flatten(params).items():
        if path in ours:
            ours[path] = leaf.reshape(ours[path].shape)
    first, cause = found(Side(other, unflatten(ours)), peers.make_oracle("torch", PAPER, params))
    field, mine = next(iter(changes.items()))
    assert first == place
    assert cause == f"model.{field}: the other side has {value}, this one {mine!r}"


def test_source_is_converted_between_conventions():
    plain = ModelConfig(**SIZES, source_eos=False)
    both = ModelConfig(**SIZES, source_bos=True)
    src = np.array([[1, 5, 6, 2], [1, 7, 2, 0]], np.int32)
    np.testing.assert_array_equal(convert_source(src, both, plain), [[5, 6], [7, 0]])
    np.testing.assert_array_equal(convert_source(convert_source(src, both, plain), plain, both), src)
    assert convert_source(src, both, both) is src


@pytest.mark.parametrize("against", ["annotated", "fairseq", "marian"])
def test_the_paper_against_a_peer_of_other_positions_or_norms(against, peers):
    """Several fields at once, where one sub-layer depends on all of them."""
    config = CONFIGS[against]
    params = random_params(config)
    changes = {
        "annotated": {"norm_variant": "standard"},
        "fairseq": {"positions": "interleaved", "position_exponent": "paper", "position_offset": 0},
        "marian": {"positions": "interleaved"},
    }[against]
    first, cause = found(
        Side(dataclasses.replace(config, **changes), params), peers.make_oracle(against, config, params)
    )
    assert first == ("encoder/layer_0/self_attention_norm" if against == "annotated" else "encoder/embedding")
    assert cause == "; ".join(
        f"model.{field}: the other side has {getattr(config, field)!r}, this one {value!r}"
        for field, value in changes.items()
    )


@pytest.mark.parametrize(
    ("masks", "place", "what"),
    [
        (Masks(False, False), "encoder/layer_0/self_attention", "padding mask"),
        (
            Masks(encoder_padding=False),
            "encoder/layer_0/self_attention",
            "padding mask of the encoder's self-attention",
        ),
        (
            Masks(cross_padding=False),
            "decoder/layer_0/cross_attention",
            "padding mask of the attention over the encoder's output",
        ),
        (Masks(causal=False), "decoder/layer_0/self_attention", "causal mask"),
    ],
    ids=["padding", "padding, encoder", "padding, cross", "causal"],
)
def test_a_mask_that_this_side_leaves_out(masks, place, what, peers):
    params = random_params(PAPER)
    first, cause = found(Side(PAPER, params, masks), peers.make_oracle("torch", PAPER, params))
    assert first == place
    assert cause == f"{what}: this side has none, the other one"


def broken(oracle, change):
    """The oracle with its module changed after the weights are loaded."""

    class Broken(type(oracle)):
        def build(self):
            module = super().build()
            change(module)
            return module

    return Broken(oracle.peer, oracle.config, oracle.weights)


def test_masks_that_the_other_side_leaves_out(peers, monkeypatch):
    import torch

    params = random_params(PAPER)

    def no_causal_mask(module):
        monkeypatch.setattr(torch.Tensor, "triu", lambda self, _: torch.zeros_like(self))

    first, cause = found(Side(PAPER, params), broken(peers.make_oracle("torch", PAPER, params), no_causal_mask))
    assert first == "decoder/layer_0/self_attention"
    assert cause == "causal mask: this side has one, the other none"
    monkeypatch.undo()

    def no_padding_mask(module):
        module.config = types.SimpleNamespace(**{**dataclasses.asdict(PAPER), "pad_id": -1})

    first, cause = found(Side(PAPER, params), broken(peers.make_oracle("torch", PAPER, params), no_padding_mask))
    assert first == "encoder/layer_0/self_attention"
    assert cause == "padding mask: this side has one, the other none"


def test_an_epsilon_of_the_other_side(peers):
    """A value that the other side's configuration does not tell."""
    params = random_params(PAPER)

    def change(module):
        for part in module.modules():
            if hasattr(part, "eps"):
                part.eps = 1e-3

    first, cause = found(Side(PAPER, params), broken(peers.make_oracle("torch", PAPER, params), change))
    assert (first, cause) == (
        "encoder/layer_0/self_attention_norm",
        "model.norm_epsilon: the other side has 0.001, this one 1e-06",
    )


# A parameter that the other side changes, where it shows, and what is said.
ATTENTION = "encoder/layer_1/self_attention"
WEIGHTS = {
    f"{ATTENTION}/output/kernel": ("transpose", ATTENTION, "{path} is transposed on one side"),
    "decoder/layer_0/cross_attention/value/kernel": (
        "transpose",
        "decoder/layer_0/cross_attention",
        "{path} is transposed on one side",
    ),
    "decoder/layer_0/feed_forward/inner/kernel": (
        "transpose",
        "decoder/layer_0/feed_forward",
        "{path} is transposed on one side",
    ),
    f"{ATTENTION}/query/bias": ("zero", ATTENTION, "{path}: the other side leaves it out (all zeros)"),
    "encoder/layer_0/feed_forward/outer/bias": (
        "zero",
        "encoder/layer_0/feed_forward",
        "{path}: the other side leaves it out (all zeros)",
    ),
    "logits_bias": ("zero", "logits", "{path}: the other side leaves it out (all zeros)"),
    "encoder/layer_0/self_attention_norm/scale": (
        "double",
        "encoder/layer_0/self_attention_norm",
        "{path}: its values differ by up to ",
    ),
    "embedding/table": ("double", "encoder/embedding", "{path}: its values differ by up to "),
}


def changed(params, path, how):
    leaves = dict(flatten(params))
    leaf = leaves[path]
    if how == "transpose":
        rows = int(np.sqrt(leaf.size))
        leaves[path] = leaf.reshape(rows, rows).T.reshape(leaf.shape)
    else:
        leaves[path] = leaf * {"zero": 0, "double": 2}[how]
    return unflatten(leaves)


@pytest.mark.parametrize("path", WEIGHTS)
def test_a_weight(path, peers):
    """The other side's weights tell; where they cannot (they look alike, and are used in another way) trying does."""
    how, place, said = WEIGHTS[path]
    params = random_params(PAPER)
    known = peers.make_oracle("torch", PAPER, changed(params, path, how))
    # There is nothing to try if the other side's values could be anything.
    for oracle in (known,) if how == "double" else (known, Pretending(known, params)):
        first, cause = found(Side(PAPER, params), oracle)
        assert first == place
        expected = said if oracle is known else said.removesuffix(" (all zeros)")
        assert cause.startswith(expected.format(path=path))
        assert "diverge" not in cause


def test_a_bias_that_this_side_leaves_out(peers):
    path = "encoder/layer_0/self_attention/output/bias"
    params = random_params(PAPER)
    side = Side(PAPER, changed(params, path, "zero"))
    first, cause = found(side, peers.make_oracle("torch", PAPER, params))
    assert first == "encoder/layer_0/self_attention"
    assert cause == f"{path}: this side leaves it out (all zeros)"


class Pretending:
    """An oracle that shows other weights than those it computes with."""

    def __init__(self, oracle, params):
        self._oracle, self._params, self.config = oracle, params, oracle.config

    def astype(self, dtype):
        return Pretending(self._oracle.astype(dtype), self._params)

    def params(self):
        return flatten(self._params)

    def sublayers(self, src, tgt_in):
        return self._oracle.sublayers(src, tgt_in)


@pytest.mark.parametrize(
    ("arrange", "said"),
    [
        (lambda q, k, v, o: (k, q, v, o), "query and key are swapped"),
        (lambda q, k, v, o: (v, k, q, o), "query and value are swapped"),
        (lambda q, k, v, o: (q, v, k, o), "key and value are swapped"),
        (lambda *all_: tuple(map(strided, all_, (1, 1, 1, 0))), "a head is every h-th column on one side"),
    ],
)
def test_projections_used_in_another_way(arrange, said, peers):
    params = random_params(PAPER)
    leaves = dict(flatten(params))
    names = [f"{ATTENTION}/{name}" for name in ("query", "key", "value", "output")]
    kernels = arrange(*(leaves[f"{name}/kernel"] for name in names))
    leaves |= {f"{name}/kernel": kernel for name, kernel in zip(names, kernels, strict=True)}
    if "column" in said:
        leaves |= {f"{name}/bias": strided(leaves[f"{name}/bias"], 0) for name in names[:3]}
    else:
        order = arrange("query", "key", "value", "output")
        biases = {f"{name}/bias": leaves[f"{ATTENTION}/{other}/bias"] for name, other in zip(names, order, strict=True)}
        leaves |= biases
    oracle = Pretending(peers.make_oracle("torch", PAPER, unflatten(leaves)), params)
    first, cause = found(Side(PAPER, params), oracle)
    assert first == ATTENTION
    assert cause.startswith(f"{ATTENTION}: {said}")


def strided(leaf, axis):
    """Heads of d columns each, read as d heads: the columns of a head lie apart."""
    heads, width = leaf.shape[axis : axis + 2]
    return np.swapaxes(leaf.reshape(*leaf.shape[:axis], width, heads, *leaf.shape[axis + 2 :]), axis, axis + 1)


def test_unknown_cause_lists_what_was_tried(peers):
    params = random_params(PAPER)

    def change(module):
        layer = module.transformer.encoder.layers[0]
        layer.linear2.register_forward_hook(lambda _, args, output: output + 1)

    first, cause = found(Side(PAPER, params), broken(peers.make_oracle("torch", PAPER, params), change))
    assert first == "encoder/layer_0/feed_forward"
    assert cause.startswith("none found; tried without success: model.activation, model.norm_position")


def test_two_fields(peers):
    """All fields in which the configurations differ are tried together, where none suffices alone."""
    params = random_params(PAPER)
    side = Side(dataclasses.replace(PAPER, position_offset=1, activation="gelu"), params)
    first, cause = found(side, peers.make_oracle("torch", PAPER, params))
    assert first == "encoder/embedding"
    assert cause == (
        "model.activation: the other side has 'relu', this one 'gelu'; "
        "model.position_offset: the other side has 0, this one 1"
    )


def test_a_field_and_a_weight(peers):
    """The first is named, and where the second shows."""
    params = random_params(PAPER)
    ours = changed(params, f"{ATTENTION}/value/kernel", "transpose")
    side = Side(dataclasses.replace(PAPER, position_offset=1), ours)
    first, cause = found(side, peers.make_oracle("torch", PAPER, params))
    assert first == "encoder/embedding"
    assert cause.startswith("model.position_offset: the other side has 0, this one 1; after that ")
    assert cause.endswith(f" the sides diverge at {ATTENTION}")


@pytest.mark.parametrize("against", CONFIGS)
def test_no_error(against, peers):
    config = CONFIGS[against]
    params = random_params(config)
    layers, first, cause = compare_layers(
        Side(config, params), peers.make_oracle(against, config, params), random_batches(config, 1)[0]
    )
    assert first is None
    assert cause is None
    assert max(item.max_abs for item in layers) < 1e-13
    assert jax.numpy.result_type(float) == np.float32  # the mode of float64 is left again
