"""The report names the sub-layer where a difference shows first, and the convention that causes it."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.interop.tables import flatten, unflatten
from transformer_jax.parity.compare import AGAINST, compare_layers, random_batches, random_params
from transformer_jax.parity.this_side import Masks, Side, convert_source

# Uneven shapes: encoder and decoder differ.
SIZES = {"vocab_size": 19, "d_model": 12, "num_heads": 2, "d_ff": 20, "decoder_num_heads": 3, "decoder_d_ff": 12}
PAPER = ModelConfig(**SIZES, num_layers=2, decoder_num_layers=1, attention_bias=True, logits_bias=True)


@pytest.fixture(scope="module")
def peers(optional_package):
    optional_package("torch")
    from transformer_jax.parity import peers

    return peers


def found(side, oracle):
    """Return (first divergence, cause) in float64."""
    _, first, cause = compare_layers(side, oracle, random_batches(oracle.config, 1)[0])
    return first, cause


# Where a field in which this side differs from PAPER shows first.
FIELDS = {
    "encoder/embedding": (
        *({"positions": "halves"}, {"position_exponent": "tensor2tensor"}, {"position_offset": 1}),
        *({"position_offset": 2}, {"scale_embeddings": False}, {"source_bos": True}, {"source_eos": False}),
    ),
    "encoder/layer_0/self_attention_norm": (
        *({"norm_epsilon": 1e-5}, {"norm_epsilon": 1e-12}, {"norm_variant": "unbiased_std"}),
    ),
    "encoder/layer_0/self_attention": (
        *({"norm_position": "pre"}, {"num_heads": 4, "decoder_num_heads": 3}, {"attention_bias": False}),
    ),
    "encoder/layer_0/feed_forward": ({"activation": "gelu"}, {"activation": "swish"}),
    "encoder/final_norm": ({"final_norm": True},),
    "decoder/embedding": ({"decoder_start": "zeros"},),
    "decoder/layer_0/self_attention": ({"decoder_num_heads": 6},),
    "logits": ({"logits_bias": False},),
}


def other_has(config, side, *fields):
    """Return the sentence about differing fields of two configurations."""
    return "; ".join(
        f"model.{field}: the other side has {getattr(config, field)!r}, this one {getattr(side, field)!r}"
        for field in fields
    )


@pytest.mark.parametrize(
    ("place", "changes"), [(place, changes) for place, rows in FIELDS.items() for changes in rows], ids=str
)
def test_differing_field_is_named(place, changes, peers):
    params = random_params(PAPER)
    ours = dataclasses.replace(PAPER, **changes)
    theirs, leaves = flatten(params), flatten(random_params(ours))
    leaves |= {path: theirs[path].reshape(leaf.shape) for path, leaf in leaves.items() if path in theirs}
    first, cause = found(Side(ours, unflatten(leaves)), peers.make_oracle("torch", PAPER, params))
    assert first == place
    assert cause == other_has(PAPER, ours, next(iter(changes)))


def test_source_is_converted_between_conventions():
    plain = ModelConfig(**SIZES, source_eos=False)
    both = ModelConfig(**SIZES, source_bos=True)
    src = np.array([[1, 5, 6, 2], [1, 7, 2, 0]], np.int32)
    np.testing.assert_array_equal(convert_source(src, both, plain), [[5, 6], [7, 0]])
    np.testing.assert_array_equal(convert_source(convert_source(src, both, plain), plain, both), src)
    assert convert_source(src, both, both) is src


@pytest.mark.parametrize(
    ("against", "place", "changes"),
    [
        ("annotated", "encoder/layer_0/self_attention_norm", {"norm_variant": "standard"}),
        (
            *("fairseq", "encoder/embedding"),
            {"positions": "interleaved", "position_exponent": "paper", "position_offset": 0},
        ),
        ("marian", "encoder/embedding", {"positions": "interleaved"}),
    ],
)
def test_conventions_of_the_paper_are_named_against_other_peers(against, place, changes, peers):
    config = peers.PEERS[against].default
    params, ours = random_params(config), dataclasses.replace(config, **changes)
    first, cause = found(Side(ours, params), peers.make_oracle(against, config, params))
    assert first == place
    assert cause == other_has(config, ours, *changes)


@pytest.mark.parametrize(
    ("masks", "place", "what"),
    [
        (Masks(False, False), "encoder/layer_0/self_attention", "padding mask"),
        (Masks(False), "encoder/layer_0/self_attention", "padding mask of the encoder's self-attention"),
        (
            *(Masks(cross_padding=False), "decoder/layer_0/cross_attention"),
            "padding mask of the attention over the encoder's output",
        ),
        (Masks(causal=False), "decoder/layer_0/self_attention", "causal mask"),
    ],
)
def test_mask_that_this_side_leaves_out_is_named(masks, place, what, peers):
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


def without_causal_mask(module, monkeypatch):
    import torch

    monkeypatch.setattr(torch.Tensor, "triu", lambda self, _: torch.zeros_like(self))


def without_padding_mask(module, _):
    module.config = types.SimpleNamespace(**{**dataclasses.asdict(PAPER), "pad_id": -1})


def with_other_epsilon(module, _):
    for part in module.modules():
        if hasattr(part, "eps"):
            part.eps = 1e-3


def with_shifted_output(module, _):
    module.transformer.encoder.layers[0].linear2.register_forward_hook(lambda _, args, output: output + 1)


@pytest.mark.parametrize(
    ("change", "place", "expected"),
    [
        (without_causal_mask, "decoder/layer_0/self_attention", "causal mask: this side has one, the other none"),
        (without_padding_mask, "encoder/layer_0/self_attention", "padding mask: this side has one, the other none"),
        (
            *(with_other_epsilon, "encoder/layer_0/self_attention_norm"),
            "model.norm_epsilon: the other side has 0.001, this one 1e-06",
        ),
        (
            *(with_shifted_output, "encoder/layer_0/feed_forward"),
            "none found; tried without success: model.activation, model.norm_position",
        ),
    ],
)
def test_change_that_the_configuration_of_the_other_side_hides(change, place, expected, peers, monkeypatch):
    params = random_params(PAPER)
    oracle = broken(peers.make_oracle("torch", PAPER, params), lambda module: change(module, monkeypatch))
    first, cause = found(Side(PAPER, params), oracle)
    assert first == place
    assert cause.startswith(expected)


# How the other side changes a parameter of a place, and the sentence about it.
ATTENTION = "encoder/layer_1/self_attention"
TRANSPOSED, ZERO = " is transposed on one side", ": the other side leaves it out (all zeros)"
DOUBLED = ": its values differ by up to "
WEIGHTS = (
    (ATTENTION, "output/kernel", "transpose", TRANSPOSED),
    ("decoder/layer_0/cross_attention", "value/kernel", "transpose", TRANSPOSED),
    ("decoder/layer_0/feed_forward", "inner/kernel", "transpose", TRANSPOSED),
    (ATTENTION, "query/bias", "zero", ZERO),
    ("encoder/layer_0/feed_forward", "outer/bias", "zero", ZERO),
    ("logits", "logits_bias", "zero", ZERO),
    ("encoder/layer_0/self_attention_norm", "scale", "double", DOUBLED),
    ("encoder/embedding", "embedding/table", "double", DOUBLED),
)


def changed(params, path, how):
    leaves = dict(flatten(params))
    leaf = leaves[path]
    if how == "transpose":
        rows = int(np.sqrt(leaf.size))
        leaves[path] = leaf.reshape(rows, rows).T.reshape(leaf.shape)
    else:
        leaves[path] = leaf * {"zero": 0, "double": 2}[how]
    return unflatten(leaves)


@pytest.mark.parametrize(("place", "name", "how", "expected"), WEIGHTS)
def test_differing_weight_is_named(place, name, how, expected, peers):
    """The other side's weights show the change. If they hide it, a search finds transposed and zero weights."""
    params = random_params(PAPER)
    path = name if name in flatten(params) else f"{place}/{name}"
    known = peers.make_oracle("torch", PAPER, changed(params, path, how))
    for oracle in (known,) if how == "double" else (known, Pretending(known, params)):
        first, cause = found(Side(PAPER, params), oracle)
        assert first == place
        assert cause.startswith(path + (expected if oracle is known else expected.removesuffix(" (all zeros)")))
        assert "diverge" not in cause


def test_bias_that_this_side_leaves_out_is_named(peers):
    path = "encoder/layer_0/self_attention/output/bias"
    params = random_params(PAPER)
    side = Side(PAPER, changed(params, path, "zero"))
    first, cause = found(side, peers.make_oracle("torch", PAPER, params))
    assert first == "encoder/layer_0/self_attention"
    assert cause == f"{path}: this side leaves it out (all zeros)"


class Pretending:
    """An oracle whose reported weights differ from those that it computes with."""

    def __init__(self, oracle, params):
        self._oracle, self._params, self.config = oracle, params, oracle.config

    def astype(self, dtype):
        return Pretending(self._oracle.astype(dtype), self._params)

    def params(self):
        return flatten(self._params)

    def sublayers(self, src, tgt_in):
        return self._oracle.sublayers(src, tgt_in)


@pytest.mark.parametrize(
    ("arrange", "expected"),
    [
        (lambda q, k, v, o: (k, q, v, o), "query and key are swapped"),
        (lambda q, k, v, o: (v, k, q, o), "query and value are swapped"),
        (lambda q, k, v, o: (q, v, k, o), "key and value are swapped"),
        (lambda *all_: tuple(map(strided, all_, (1, 1, 1, 0))), "a head is every h-th column on one side"),
    ],
)
def test_projections_used_in_another_way_are_named(arrange, expected, peers):
    params = random_params(PAPER)
    leaves = dict(flatten(params))
    names = [f"{ATTENTION}/{name}" for name in ("query", "key", "value", "output")]
    kernels = arrange(*(leaves[f"{name}/kernel"] for name in names))
    leaves |= {f"{name}/kernel": kernel for name, kernel in zip(names, kernels, strict=True)}
    if "column" in expected:
        leaves |= {f"{name}/bias": strided(leaves[f"{name}/bias"], 0) for name in names[:3]}
    else:
        order = arrange("query", "key", "value", "output")
        leaves |= {f"{n}/bias": leaves[f"{ATTENTION}/{other}/bias"] for n, other in zip(names, order, strict=True)}
    oracle = Pretending(peers.make_oracle("torch", PAPER, unflatten(leaves)), params)
    first, cause = found(Side(PAPER, params), oracle)
    assert first == ATTENTION
    assert cause.startswith(f"{ATTENTION}: {expected}")


def strided(leaf, axis):
    """Reinterpret heads of d columns as d heads, so that the columns of a head are strided."""
    heads, width = leaf.shape[axis : axis + 2]
    return np.swapaxes(leaf.reshape(*leaf.shape[:axis], width, heads, *leaf.shape[axis + 2 :]), axis, axis + 1)


def test_two_differing_fields_are_both_named(peers):
    params = random_params(PAPER)
    ours = dataclasses.replace(PAPER, position_offset=1, activation="gelu")
    first, cause = found(Side(ours, params), peers.make_oracle("torch", PAPER, params))
    assert first == "encoder/embedding"
    assert cause == other_has(PAPER, ours, "activation", "position_offset")


def test_field_is_named_with_the_place_where_a_differing_weight_shows(peers):
    params = random_params(PAPER)
    ours = dataclasses.replace(PAPER, position_offset=1)
    side = Side(ours, changed(params, f"{ATTENTION}/value/kernel", "transpose"))
    first, cause = found(side, peers.make_oracle("torch", PAPER, params))
    assert first == "encoder/embedding"
    assert cause == f"{other_has(PAPER, ours, 'position_offset')}; after that the sides diverge at {ATTENTION}"


@pytest.mark.parametrize("against", AGAINST)
def test_equal_models_have_no_divergence(against, peers):
    config = peers.PEERS[against].default
    params = random_params(config)
    oracle = peers.make_oracle(against, config, params)
    layers, *causes = compare_layers(Side(config, params), oracle, random_batches(config, 1)[0])
    assert causes == [None, None]
    assert max(item.max_abs for item in layers) < 1e-13
    assert jax.numpy.result_type(float) == np.float32  # float64 mode is restored
