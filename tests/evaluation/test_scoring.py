"""Scores of given pairs against the model applied to single pairs, and against scores of the search."""

import json

import pytest

from transformer_jax.data.corpus import read_split
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding import translator as module
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.scoring import score_pairs
from transformer_jax.types import UserError

PAIRS = Pairs(["the dog", "a cat sees"], ["der hund", "eine katze"], "here")


@pytest.mark.parametrize("max_tokens", [4096, 40])
def test_scores_do_not_depend_on_the_batch(tiny, translator, score_by_hand, monkeypatch, max_tokens):
    monkeypatch.setattr(module, "_MAX_PAIR_TOKENS", max_tokens)
    pairs = read_split(tiny.config.data, "test")
    pairs = Pairs([*pairs.source, "a dog", ""], [*pairs.target, "", "ein hund"], "here")
    for one, source, target in zip(score_pairs(translator, pairs), pairs.source, pairs.target, strict=True):
        log_prob, count = score_by_hand(translator, source, target)
        assert (one.log_prob, one.num_tokens) == (pytest.approx(log_prob, rel=1e-4), count)
        assert one.score == pytest.approx(log_prob / ((5 + count) / 6) ** 0.6, rel=1e-4)  # the run's penalty


def test_list_of_tuples_scores_like_pairs(translator):
    assert score_pairs(translator, list(zip(PAIRS.source, PAIRS.target, strict=True))) == score_pairs(translator, PAIRS)


@pytest.mark.parametrize("item", ["ab", ("a",), ("a", 1)])
def test_item_that_is_not_two_strings_raises(translator, item):
    with pytest.raises(UserError, match=r"pairs\[1\] is .*; give tuples of two strings, source and target"):
        score_pairs(translator, [("a", "b"), item])
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


def test_source_bos_scores_equal_ids_by_hand(translator, score_by_hand):
    config = translator.config.with_changes(model={"source_bos": True})
    with_bos = Translator(config, translator.params, translator.tokenizers)
    scores = zip(score_pairs(with_bos, PAIRS), score_pairs(translator, PAIRS), strict=True)
    for (score, plain), source, target in zip(scores, PAIRS.source, PAIRS.target, strict=True):
        assert score.log_prob == pytest.approx(score_by_hand(with_bos, source, target)[0], rel=1e-4)
        assert abs(score.log_prob - plain.log_prob) > 1e-3


def test_command_scores_its_own_translations_as_the_search_does(tiny, translator, cli, tmp_path):
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
        if ids == one.token_ids:  # the search may have used other pieces, or reached no end
            assert row["log_prob"] == pytest.approx(one.log_prob, rel=1e-4)
            assert row["score"] == pytest.approx(one.score, rel=1e-4)
    (tmp_path / "target").write_text("one\n")
    wrong = cli("score", tiny.run, *files)
    assert (wrong.status, wrong.out) == (1, "")
    assert "2 source sentences and 1 target sentences" in wrong.err
