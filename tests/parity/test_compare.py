"""The parity report: all peers agree in every comparison, and differences are reported."""

import dataclasses
import itertools
import json
import math
import re

import jax
import numpy as np
import pytest
import reference
from interop_cases import odd

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig
from transformer_jax.interop.tables import flatten, unflatten
from transformer_jax.parity import report
from transformer_jax.parity.compare import compare, compare_models, random_batches, random_params
from transformer_jax.parity.report import render
from transformer_jax.types import UserError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:FutureWarning:transformers", "ignore:.*:DeprecationWarning:transformers"
)
# Encoder and decoder differ in heads and width; one layer each, or the tests would compile for minutes.
SIZES = {"num_layers": 1, "decoder_num_layers": 1, "attention_bias": True, "vocab_size": 17}
CONFIGS = {
    "torch": odd(**SIZES, final_norm=True, tie_embeddings="target", source_vocab_size=19, positions="learned"),
    "annotated": odd(
        **SIZES, norm_position="pre", final_norm=True, norm_variant="unbiased_std",
        tie_embeddings="none", source_vocab_size=19, logits_bias=True,
    ),
    "fairseq": odd(
        **SIZES | {"attention_bias": False},  # the module has biases, which stay zero
        positions="halves", position_exponent="tensor2tensor", position_offset=2,
        decoder_start="eos", bos_id=0, pad_id=1, activation="gelu",
    ),
    "marian": odd(
        **SIZES, positions="halves", decoder_start="pad", logits_bias=True, activation="swish", scale_embeddings=False,
    ),
}  # fmt: skip
KEYS = [
    *("ok", "dtype", "layers", "first_divergence", "cause", "loss", "gradients", "trajectory"),
    *("greedy_equal", "beam_equal"),
]


@pytest.fixture(scope="module")
def peers(optional_package):
    optional_package("torch")
    optional_package("transformers")
    from transformer_jax.parity import peers

    return peers


def pair(peers, against, **changes):
    """Return (configuration of this side, parameters, oracle)."""
    config = CONFIGS[against]
    params = random_params(config)
    return dataclasses.replace(config, **changes), params, peers.make_oracle(against, config, params)


def recipe(model, **sections):
    tokenizer = TokenizerConfig(joint=model.tie_embeddings == "all")
    return Config(model=model, data=DataConfig(max_length=8), tokenizer=tokenizer, **sections)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("against", CONFIGS)
def test_every_peer_agrees_within_tolerance(against, dtype, peers):
    config, params, oracle = pair(peers, against)
    found = compare_models(recipe(config, decoding=DecodingConfig(alpha=1.0)), params, oracle, dtype)
    assert found.ok, render(found)
    assert (found.first_divergence, found.cause) == (None, None)
    forward, gradient = (1e-5, 1e-4) if dtype == "float32" else (1e-10, 1e-9)
    assert max(item.max_abs for item in found.layers) < forward
    assert found.loss.max_rel < forward
    # A key's bias has a gradient of rounding noise, on both sides.
    assert max(item.max_rel for item in found.gradients if not item.name.endswith("key/bias")) < gradient
    assert found.greedy_equal
    assert found.beam_equal
    assert len(found.trajectory.this) == len(found.trajectory.other) == 20
    assert np.mean(found.trajectory.this[-5:]) < np.mean(found.trajectory.this[:5])  # it was trained
    assert found.trajectory.max_rel < (1e-4 if dtype == "float32" else 1e-9)
    assert found.trajectory.parameters_max_abs < (1e-4 if dtype == "float32" else 1e-9)
    assert any("parameters are shown but not judged" in note for note in found.notes) == (dtype == "float32")
    line = found.to_json()
    assert "\n" not in line
    tree = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert list(tree) == KEYS
    assert all(list(item) == ["name", "max_abs", "max_rel"] for item in (*tree["layers"], *tree["gradients"]))

    names = [item.name for item in found.layers]
    assert len(names) == 2 + 4 + 6 + 1 + 2 * config.final_norm
    first = ["self_attention_norm", "self_attention"] if against == "annotated" else ["self_attention"]
    assert names[: len(first) + 1] == ["encoder/embedding", *(f"encoder/layer_0/{name}" for name in first)]
    assert names[-1] == "logits"
    assert jax.numpy.result_type(float) == np.float32  # float64 mode is restored


def test_epsilon_that_float32_hides_is_found(peers):
    """A final norm on one side differs infinitely, which is null in JSON."""
    config, params, oracle = pair(peers, "torch", norm_epsilon=1e-6, final_norm=False)
    params = unflatten({path: leaf for path, leaf in flatten(params).items() if "final_norm" not in path})
    found = compare_models(recipe(config), params, oracle)
    assert not found.ok
    assert found.first_divergence == "encoder/layer_0/self_attention_norm"
    assert found.cause == (
        "model.norm_epsilon: the other side has 1e-05, this one 1e-06; "
        "model.final_norm: the other side has True, this one False"
    )
    tree = json.loads(found.to_json())
    assert tree["ok"] is False
    assert {"name": "encoder/final_norm", "max_abs": None, "max_rel": None} in tree["layers"]
    text = render(found)
    assert "DIVERGES first at encoder/layer_0/self_attention_norm\nlikely cause: model.norm_epsilon" in text
    assert "logits" in text
    assert "<- differs" in text


class Other:
    """An oracle that overrides some results."""

    def __init__(self, oracle, **answers):
        self._oracle, self._answers = oracle, answers

    def astype(self, dtype):
        return Other(self._oracle.astype(dtype), **self._answers)

    def __getattr__(self, name):
        answer = getattr(self._oracle, name)
        return (lambda *args: self._answers[name](answer(*args))) if name in self._answers else answer


@pytest.mark.parametrize(
    ("name", "change", "place"),
    [
        (
            "train",
            lambda found: found._replace(gradients={name: 1.01 * leaf for name, leaf in found.gradients.items()}),
            "gradients",
        ),
        ("train", lambda found: found._replace(losses=[found.losses[0] + 1e-3, *found.losses[1:]]), "loss"),
        ("train", lambda found: found._replace(losses=[*found.losses[:-1], 1.001 * found.losses[-1]]), "trajectory"),
        ("search", lambda lines: [([*tokens[:-1], 7], score - 1) for tokens, score in lines], "greedy search"),
    ],
    ids=["gradient", "loss", "trajectory", "search"],
)
def test_difference_after_the_forward_pass_is_located(name, change, place, peers):
    config, params, oracle = pair(peers, "torch")
    found = compare_models(recipe(config), params, Other(oracle, **{name: change}))
    assert not found.ok
    assert found.first_divergence == place
    assert found.cause.startswith(f"all sub-layers agree; {place}")
    assert found.beam_equal == (place != "greedy search")
    assert sum("beam search, sentence" in note for note in found.notes) == (4 if place == "greedy search" else 0)


def test_beam_hypothesis_with_equal_score_is_a_tie_and_is_listed(peers):
    config, params, oracle = pair(peers, "torch")

    def other_tokens(found):
        searches.append(found)
        if len(searches) == 1:  # greedy search comes first
            return found
        return [([*tokens, 7], score + 5e-5) for tokens, score in found]

    searches = []
    found = compare_models(recipe(config), params, Other(oracle, search=other_tokens))
    assert found.ok
    assert found.beam_equal
    assert sum(note.endswith(": a tie") for note in found.notes) == 4


def test_nonfinite_number_is_a_difference():
    ours, theirs = np.array([1.0, np.nan]), np.array([1.0, 2.0])
    for pair in ((ours, theirs), (theirs, ours)):
        found = report.difference("x", *({"x": side} for side in pair), 1.0)
        assert not found.ok
        assert found.max_abs == math.inf


def test_batches_have_padding_and_no_special_id_within_a_sentence():
    config = odd()
    (first, second), (again, _) = random_batches(config, 2), random_batches(config, 2)
    np.testing.assert_array_equal(first.src, again.src)
    assert (first.src != second.src).any()
    for rows, lengths in ((first.src, [2, 4, 7, 9]), (first.tgt_in, [3, 5, 6, 8]), (first.tgt_out, [3, 5, 6, 8])):
        assert sorted((rows != config.pad_id).sum(axis=1)) == lengths
    assert (first.tgt_in[:, 0] == config.bos_id).all()
    assert not (first.tgt_in[:, 1:] == config.bos_id).any()


def test_default_models_are_small_and_post_norm_where_possible(peers):
    for against, peer in peers.PEERS.items():
        peer.check(peer.default)
        assert peer.default.norm_position == ("pre" if against == "annotated" else "post")
        assert max(item.size for item in jax.tree.leaves(random_params(peer.default))) < 10_000


def test_missing_and_unexpected_tensors_of_a_peer_raise(peers, monkeypatch):
    """A tensor of zeros without a place would not show as a difference."""
    *_, oracle = pair(peers, "torch")
    tensors = oracle._foreign(oracle.weights)
    first = next(iter(tensors))
    for wrong, message in (
        (tensors | {"extra": np.zeros(2)}, "Unexpected key.*extra"),
        ({name: tensor for name, tensor in tensors.items() if name != first}, f"Missing key.*{first}"),
    ):
        monkeypatch.setattr(peers.Oracle, "_foreign", lambda *_, wrong=wrong: wrong)
        with pytest.raises(RuntimeError, match=message):
            oracle.build()


@pytest.mark.parametrize("mass", ["non_target", "all", "non_target_non_pad"])
def test_loss_of_the_oracle_equals_the_reference(mass, optional_package):
    torch = optional_package("torch")
    from transformer_jax.parity.oracles import smoothed_loss

    logits, targets = np.random.default_rng(0).normal(size=(2, 3, 5)), np.array([[1, 2, 0], [4, 0, 0]])
    training = TrainingConfig(label_smoothing=0.3, label_smoothing_over=mass)
    found = smoothed_loss(torch.tensor(logits), torch.tensor(targets), training, 0)
    loss_sum, num_tokens = reference.label_smoothed_loss(logits, targets, 0, 0.3, mass)
    np.testing.assert_allclose(found.item(), loss_sum / num_tokens, rtol=1e-12)


@pytest.mark.parametrize("penalty", ["gnmt", "power", "none"])
def test_beam_search_of_the_oracle_equals_exhaustive_search(penalty, optional_package):
    """A beam as wide as the number of prefixes is exhaustive."""
    optional_package("torch")
    from transformer_jax.parity.oracles import brute_beam

    config, limit = ModelConfig(vocab_size=5, d_model=2, num_heads=1), 4  # PAD 0, EOS 2
    decoding = DecodingConfig(beam_size=200, length_penalty=penalty, alpha=1.3, forbidden_ids=(1,))

    def log_prob(tokens):
        return -np.random.default_rng([7, *tokens]).exponential()

    def next_log_probs(prefixes):
        return np.array([[log_prob([*map(int, prefix), v]) for v in range(5)] for prefix in prefixes])

    lines = {}
    for length in range(1, limit + 1):
        for tokens in itertools.product((3, 4), repeat=length - 1):
            line = [*tokens, 2]
            total = sum(log_prob(line[: i + 1]) for i in range(length))
            lines[tuple(line)] = total / {"gnmt": (5 + length) / 6, "power": length, "none": 1}[penalty] ** 1.3
    tokens, score = brute_beam(next_log_probs, limit, decoding, config)
    assert tuple(tokens) == max(lines, key=lines.get)
    np.testing.assert_allclose(score, lines[tuple(tokens)], rtol=1e-12)


def test_state_dict_is_compared(peers, tmp_path, caplog):
    from transformer_jax.interop.tables import to_foreign
    from transformer_jax.interop.tensor_files import save_torch
    from transformer_jax.interop.torch_format import TORCH

    config, params, oracle = pair(peers, "torch")
    save_torch(tmp_path / "model.pt", to_foreign(params, TORCH, config))
    with pytest.raises(UserError, match=r"model\.pt: the tensors determine .* but not num_heads, .*with --config"):
        compare("torch", tmp_path / "model.pt")
    caplog.set_level("INFO")
    names = ("num_heads", "decoder_num_heads", "source_bos", "norm_position", "activation", "scale_embeddings")
    hidden = {name: getattr(config, name) for name in (*names, "norm_epsilon", "position_offset", "decoder_start")}
    found = compare("torch", tmp_path / "model.pt", **hidden)
    assert found.ok, render(found)
    assert "model.pt: configuration inferred from the tensors: vocab_size=17, source_vocab_size=19" in caplog.text
    assert re.search(r"passed or assumed: .*position_exponent='paper'.*, pad_id=0, bos_id=1, eos_id=2", caplog.text)
    (tmp_path / "config.json").write_text(
        Config(model=config, tokenizer=TokenizerConfig(joint=False), data=DataConfig(max_length=30)).to_json()
    )
    found = compare("torch", tmp_path / "model.pt", tmp_path / "config.json")
    assert found.ok
    assert found.against == "torch"
    assert "check whether its batches start the source with BOS" in found.notes[0]
    loss = oracle.train(random_batches(config, 1), TrainingConfig()).losses[0]
    np.testing.assert_allclose(found.loss.other, loss)


def test_marian_folder_is_compared(peers, optional_package, tmp_path):
    """The weights of the other side are those that `from_pretrained` reads."""
    for name in ("sentencepiece", "sacremoses"):
        optional_package(name)
    from marian_cases import make_folder

    model = make_folder(tmp_path)
    with pytest.raises(UserError, match="Leave out --config"):
        compare("marian", tmp_path, Config())
    found = compare("marian", tmp_path, dtype="float64")
    assert found.ok, render(found)
    assert found.greedy_equal
    assert len(model.model.decoder.layers) == 2
    assert found.layers[-2].name == "decoder/layer_1/feed_forward_norm"


def test_run_is_compared_with_marian_after_reordering_its_positions(peers, tmp_path):
    from transformer_jax.checkpoint.checkpoint import save_params

    config = dataclasses.replace(CONFIGS["marian"], positions="interleaved")
    save_params(tmp_path / "checkpoints" / "0", random_params(config))
    (tmp_path / "config.json").write_text(Config(model=config).to_json())
    found = compare("marian", tmp_path)
    assert found.ok, render(found)
    assert "interleaved" in found.notes[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tensorflow",), "against is 'tensorflow'; legal: torch, annotated, fairseq, marian"),
        (("torch", None, None, "bfloat16"), "dtype is 'bfloat16'; legal: float32, float64"),
        (("torch", "/no/such/file"), "/no/such/file: no such file"),
        (("torch", None, "no_recipe.py"), "no_recipe.py: no such recipe"),
        (("fairseq", None, Config()), r"model.norm_epsilon=1e-06.*model.positions.*model.decoder_start"),
        (("marian", None, Config(model=odd(norm_position="pre"))), "model.norm_position='pre'"),
        (("annotated", None, Config()), "model.norm_variant='standard'"),
    ],
)
def test_wrong_argument_is_rejected(args, message, peers):
    with pytest.raises(UserError, match=message):
        compare(*args)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_missing_package_is_named(missing, peers, monkeypatch):
    import importlib.util
    import sys

    monkeypatch.setitem(sys.modules, missing, None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(UserError, match=f"{missing} is needed to compare with marian: python -m pip install"):
        compare("marian")
