"""Scores of given pairs against the model applied to one pair at a time, and against what the search says."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.data.corpus import read_split
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding import translator as module
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.scoring import score_pairs
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import UserError


@pytest.fixture(scope="module")
def translator(tiny):
    return Translator.load(tiny.run)


def by_hand(translator, source, target):
    """log P of a target's tokens and EOS, and their number; padded to one length, so that one thing is compiled."""
    model, width = translator.config.model, 64
    (src,), (tgt,) = translator.tokenizers.source.encode([source]), translator.tokenizers.target.encode([target])
    sides = [*[model.bos_id] * model.source_bos, *src, model.eos_id], [model.bos_id, *tgt]
    padded = [jnp.asarray(np.pad(np.array([ids], np.int32), ((0, 0), (0, width - len(ids))))) for ids in sides]
    logits = np.asarray(jax.jit(Transformer(model).apply)({"params": translator.params}, *padded), np.float64)[0]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_probs[np.arange(len(tgt) + 1), [*tgt, model.eos_id]].sum(), len(tgt) + 1


@pytest.mark.parametrize("most_tokens", [4096, 40])
def test_each_pair_is_what_it_is_alone(tiny, translator, monkeypatch, most_tokens):
    monkeypatch.setattr(module, "_MAX_PAIR_TOKENS", most_tokens)
    pairs = read_split(tiny.config.data, "test")
    pairs = Pairs([*pairs.source, "a dog", ""], [*pairs.target, "", "ein hund"], "here")
    found = score_pairs(translator, pairs)
    for one, source, target in zip(found, pairs.source, pairs.target, strict=True):
        log_prob, count = by_hand(translator, source, target)
        assert (one.log_prob, one.num_tokens) == (pytest.approx(log_prob, rel=1e-4), count)
        assert one.score == pytest.approx(log_prob / ((5 + count) / 6) ** 0.6, rel=1e-4)  # the run's penalty


def test_list_of_tuples_scores_like_pairs(translator):
    pairs = Pairs(["the dog", "a cat sees"], ["der hund", "eine katze"], "here")
    assert score_pairs(translator, list(zip(pairs.source, pairs.target, strict=True))) == score_pairs(translator, pairs)


@pytest.mark.parametrize("pairs", [[("a", "b"), "ab"], [("a", "b"), ("a",)], [("a", "b"), ("a", 1)]])
def test_item_that_is_not_two_strings_raises(translator, pairs):
    with pytest.raises(UserError, match=r"pairs\[1\] is .*; give tuples of two strings, source and target"):
        score_pairs(translator, pairs)


def test_no_pairs_raises(translator):
    with pytest.raises(UserError, match="no sentence pairs"):
        score_pairs(translator, [])


@pytest.mark.parametrize("penalty", ["gnmt", "power", "none"])
def test_greedy_score_is_log_probability_divided_by_penalty(translator, penalty):
    greedy = translator.with_decoding(beam_size=1, alpha=0.6, length_penalty=penalty)
    sources = ["the dog", "a cat sees the dog", "a"]
    hypotheses = [ranked[0] for ranked in greedy.translate_n_best(sources, 1)]
    for one in hypotheses:
        divisor = {"gnmt": ((5 + one.num_tokens) / 6) ** 0.6, "power": one.num_tokens**0.6, "none": 1}[penalty]
        assert one.score == pytest.approx(one.log_prob / divisor, rel=1e-5)


def test_source_bos_scores_equal_ids_by_hand(translator):
    config = translator.config
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, source_bos=True))
    with_bos = Translator(config, translator.params, translator.tokenizers)
    pairs = Pairs(["the dog", "a cat sees"], ["der hund", "eine katze"], "here")
    for score, plain, source, target in zip(
        score_pairs(with_bos, pairs), score_pairs(translator, pairs), pairs.source, pairs.target, strict=True
    ):
        assert score.log_prob == pytest.approx(by_hand(with_bos, source, target)[0], rel=1e-4)
        assert abs(score.log_prob - plain.log_prob) > 1e-3


def test_the_command_and_a_translation_of_its_own(tiny, translator, cli, tmp_path):
    sources = ["the dog", "a cat sees the dog"]
    hypotheses = [found[0] for found in translator.translate_n_best(sources, 1)]
    for name, lines in (("source", sources), ("target", [one.text for one in hypotheses])):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    files = ["--source", tmp_path / "source", "--target", tmp_path / "target"]
    done = cli("score", tiny.run, *files)
    assert (done.status, done.err) == (0, "")
    rows = [json.loads(line) for line in cli("score", tiny.run, *files, "--format", "jsonl").out.splitlines()]
    for line, row in zip(done.out.splitlines(), rows, strict=True):
        assert line == f"{row['score']:.4f}\t{row['log_prob']:.4f}\t{row['num_tokens']}"
    for row, one in zip(rows, hypotheses, strict=True):
        ids = (*translator.tokenizers.target.encode([one.text])[0], translator.config.model.eos_id)
        if ids == one.token_ids:  # the search may have found the text in other pieces, or no end
            assert row["log_prob"] == pytest.approx(one.log_prob, rel=1e-4)
            assert row["score"] == pytest.approx(one.score, rel=1e-4)
    (tmp_path / "target").write_text("one\n")
    wrong = cli("score", tiny.run, *files)
    assert (wrong.status, wrong.out) == (1, "")
    assert "2 source sentences and 1 target sentences" in wrong.err
