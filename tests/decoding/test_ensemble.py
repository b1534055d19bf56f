"""Ensembles: the mean of the members' probabilities, and which runs can be combined."""

import dataclasses
import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import run as commands
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, Sampling
from transformer_jax.data.corpus import read_split
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.decode import Member, mean_of_probabilities
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.scoring import score_pairs
from transformer_jax.evaluation.validation import evaluate_pairs
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import UserError

LINES = ["the dog", "", "a cat sees the blue house", "two"]


@pytest.fixture(scope="module")
def alone(tiny):
    return Translator.load(tiny.run, beam_size=3, stopping="huggingface")


@pytest.fixture(scope="module")
def both(alone):
    """Return an ensemble whose second member differs in depth, size, positions, tying and start token."""
    config = dataclasses.replace(
        alone.config.model,
        num_layers=2,
        d_model=8,
        num_heads=1,
        positions="learned",
        max_length=64,
        tie_embeddings="none",
        decoder_start="zeros",
        norm_position="pre",
        final_norm=True,
    )
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = jax.tree.map(lambda leaf: leaf * 2, Transformer(config).init(jax.random.key(5), tokens, tokens)["params"])
    return Translator(alone.config, alone.params, alone.tokenizers, [Member(config, params)])


@functools.cache
def apply(config):
    return jax.jit(Transformer(config).apply)


def log_prob_by_hand(translator, source, ids):
    """Return log P of the target ids in float64, with teacher forcing for each member."""
    model, width = translator.config.model, 64  # one width, so that one function is compiled
    (src,) = translator.encode([source])
    sides = [src, [model.start_id, *ids[:-1]]]
    padded = [jnp.asarray(np.pad(np.array([side], np.int32), ((0, 0), (0, width - len(side))))) for side in sides]
    probs = []
    for member in translator.members:
        logits = np.asarray(apply(member.config)({"params": member.params}, *padded), np.float64)[0, : len(ids)]
        every = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        probs.append(every[np.arange(len(ids)), list(ids)])
    return np.log(np.mean(probs, axis=0)).sum()


def test_ensemble_averages_probabilities_not_logits():
    first, second = np.random.default_rng(0).normal(0, 3, (2, 4, 9))
    expected = np.log(sum(np.exp(x) / np.exp(x).sum(axis=1, keepdims=True) for x in (first, second)) / 2)
    found = mean_of_probabilities([jnp.asarray(first), jnp.asarray(second)])
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_search_scores_equal_the_mean_of_the_member_probabilities(both, alone):
    found = both.translate_n_best(LINES, 3)
    assert found != alone.translate_n_best(LINES, 3)
    for line, hypotheses in zip(LINES, found, strict=True):
        for one in hypotheses if line else ():
            assert one.log_prob == pytest.approx(log_prob_by_hand(both, line, one.token_ids), rel=1e-4)
    greedy = both.with_decoding(beam_size=1).translate_n_best(LINES, 1)
    assert all(
        one.log_prob == pytest.approx(log_prob_by_hand(both, line, one.token_ids), rel=1e-4)
        for line, (one,) in zip(LINES, greedy, strict=True)
        if line
    )


def test_samples_are_scored_by_the_mean_and_attend_to_their_own_sentence(both):
    found = both.translate_n_best(LINES, 2, sampling=Sampling(), prefixes=["ein", "", "", "zwei"])
    for line, hypotheses in zip(LINES, found, strict=True):
        for one in hypotheses if line else ():
            assert one.log_prob == pytest.approx(log_prob_by_hand(both, line, one.token_ids), rel=1e-4)


def test_ensemble_of_a_run_with_itself_equals_the_run(tiny, alone):
    twice = Translator.load(tiny.run, ensemble=[tiny.run, tiny.run], beam_size=3, stopping="huggingface")
    for first, second in zip(alone.translate_n_best(LINES, 3), twice.translate_n_best(LINES, 3), strict=True):
        assert [one.token_ids for one in first] == [one.token_ids for one in second]
        np.testing.assert_allclose([one.score for one in first], [one.score for one in second], rtol=1e-4)


def test_score_pairs_and_perplexity_use_the_mean_of_the_members(tiny, both):
    pairs = read_split(tiny.config.data, "test")
    model, total, count = both.config.model, 0.0, 0
    encoded = both.tokenizers.target.encode(list(pairs.target))
    for one, source, ids in zip(score_pairs(both, pairs), pairs.source, encoded, strict=True):
        assert one.log_prob == pytest.approx(log_prob_by_hand(both, source, [*ids, model.eos_id]), rel=1e-4)
        total, count = total + one.log_prob, count + one.num_tokens
    assert evaluate_pairs(both, pairs).perplexity == pytest.approx(math.exp(-total / count), rel=1e-6)


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    """Return a run on the same corpus with another seed, and checkpoints 2 and 4."""
    config = Config.from_json((tiny.run / "config.json").read_text())
    run = tmp_path_factory.mktemp("ensemble") / "other"
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, seed=7))
    commands.train(config, run)
    return run


@pytest.mark.filterwarnings("ignore:.*have an empty translation")  # after so few steps
def test_commands_use_every_run_of_an_ensemble(tiny, other, cli, tmp_path):
    def members(*checkpoints):
        runs = zip((tiny.run, other), checkpoints, strict=True)
        first, second = (Translator.load(run, checkpoint=step, max_length_offset=2) for run, step in runs)
        return Translator(first.config, first.params, first.tokenizers, second.members)

    expected, stdin = members("last", "last"), ("\n".join(LINES) + "\n").encode()
    done = cli("translate", tiny.run, "--max-length-offset", "2", "--ensemble", other, stdin=stdin)
    assert (done.status, done.err) == (0, "")
    assert done.out.split("\n")[:-1] == expected.translate(LINES)
    assert expected.translate(LINES) != Translator.load(tiny.run, max_length_offset=2).translate(LINES)
    assert expected.translate(LINES) != Translator.load(other, max_length_offset=2).translate(LINES)

    pairs = read_split(tiny.config.data, "test")
    report = evaluate_pairs(expected, pairs)
    done = cli("evaluate", tiny.run, "--max-length-offset", "2", "--ensemble", other, "--bootstrap", "0", "--json")
    found = json.loads(done.out)
    assert found["perplexity"] == pytest.approx(report.perplexity, rel=1e-5)
    assert found["chrf"] == pytest.approx(report.scores.chrf, rel=1e-5)
    assert found["ensemble"] == [{"run": str(other), "checkpoint": "last"}]
    done = cli(
        "evaluate", tiny.run, "--max-length-offset", "2", "--ensemble", other, "--bootstrap", "0", "--checkpoint", "2"
    )
    assert done.out.startswith(f"{tiny.run}, checkpoint 2 + {other}, checkpoint 2\n")
    perplexity = evaluate_pairs(members("2", "2"), pairs).perplexity
    assert f"perplexity {perplexity:.3f}" in done.out
    assert perplexity != pytest.approx(report.perplexity, rel=1e-4)

    for name, lines in (("source", LINES), ("target", LINES[::-1])):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    files = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--format", "jsonl"]
    done = cli("score", tiny.run, *files, "--ensemble", other)
    scored = score_pairs(expected, Pairs(LINES, LINES[::-1], "here"))
    for line, one in zip(done.out.splitlines(), scored, strict=True):
        assert json.loads(line)["log_prob"] == pytest.approx(one.log_prob, rel=1e-5)

    how = ["--max-length-offset", "2", "--ensemble", other, "--sweep", "beam-size=1", "--split", "test"]
    done = cli("evaluate", tiny.run, *how)
    assert f"{tiny.run} + {other}, " in done.out
    assert f"chrF {report.scores.chrf:6.2f}" in done.out


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_ensemble_members_are_quantized_like_a_single_run(both, weights):
    exact, rounded = (
        both.translate_n_best(LINES, 1),
        both.with_decoding(quantization=weights).translate_n_best(LINES, 1),
    )
    assert rounded != exact
    for line, (one,) in zip(LINES, rounded, strict=True):
        if line:
            assert one.log_prob == pytest.approx(log_prob_by_hand(both, line, one.token_ids), rel=0.03)


def test_smallest_position_table_limits_the_ensemble(tiny, alone):
    config = dataclasses.replace(alone.config.model, positions="learned", max_length=12)
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Transformer(config).init(jax.random.key(5), tokens, tokens)["params"]
    short = Translator(alone.config, alone.params, alone.tokenizers, [Member(config, params)])
    long = " ".join(["zwei"] * 30)
    assert max(one.num_tokens for one in short.translate_n_best(["the dog"], 3)[0]) <= 12
    for score in (score_pairs, evaluate_pairs):
        with pytest.raises(UserError, match=r"here, pair 2: \d+ tokens, and the learned .* has capacity for 12"):
            score(short, Pairs(["a", "the dog"], ["zwei", long], "here"))


def test_empty_list_of_runs_is_rejected(tiny):
    with pytest.raises(UserError, match="ensemble is the string 'runs/b'; a list of runs is needed"):
        Translator.load(tiny.run, ensemble="runs/b")


def test_runs_with_different_vocabularies_are_rejected(tiny, tmp_path, cli):
    other = tmp_path / "other"
    shutil.copytree(tiny.run, other)
    config = Config.from_json((other / "config.json").read_text())
    changed = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=301))
    RunDir(other).write("config.json", changed.to_json())
    with pytest.raises(UserError, match=r"cannot be in an ensemble with .*: model\.vocab_size is 301 there"):
        Translator.load(tiny.run, ensemble=[other])
    RunDir(other).write("config.json", config.to_json())
    (file,) = (other / "tokenizer").iterdir()
    tokenizer = json.loads(file.read_text())
    merges = tokenizer["library"]["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    file.write_text(json.dumps(tokenizer))
    RunDir(other).seal()
    done = cli("translate", tiny.run, "--ensemble", other, stdin=b"the dog\n")
    assert (done.status, done.out) == (1, "")
    assert "their tokenizers are not the same" in done.err
