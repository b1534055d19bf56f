"""Scores against sacreBLEU's own functions."""

import random
import re
import subprocess
import sys

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU, CHRF

from transformer_jax.config import Config, TokenizerConfig
from transformer_jax.evaluation.bleu import check_tokenization, resample, score_corpus, tokenization_of
from transformer_jax.types import UserError

TRANSLATIONS = ["the cat sat on the mat .", "A dog, runs fast!", "", "ein Haus"]
REFERENCES = ["The cat sat on the mat .", "a dog runs very fast!", "nothing", "ein Haus"]


@pytest.mark.parametrize("tokenize", ["13a", "none", "intl", "char"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_and_chrf_are_sacrebleus(tokenize, lowercase):
    scores = score_corpus(TRANSLATIONS, REFERENCES, tokenize, lowercase)
    bleu = sacrebleu.corpus_bleu(TRANSLATIONS, [REFERENCES], tokenize=tokenize, lowercase=lowercase, force=True)
    assert scores.bleu == bleu.score > 0
    assert scores.chrf == CHRF(lowercase=lowercase).corpus_score(TRANSLATIONS, [REFERENCES]).score
    case = "lc" if lowercase else "mixed"
    version = sacrebleu.__version__
    assert scores.bleu_signature == f"nrefs:1|case:{case}|eff:no|tok:{tokenize}|smooth:exp|version:{version}"
    assert scores.chrf_signature.startswith(f"nrefs:1|case:{case}|eff:yes|nc:6|nw:0|space:no|")


def test_exact_match_and_count():
    scores = score_corpus(TRANSLATIONS, REFERENCES)
    assert scores.exact_match == 25
    assert scores.num_sentences == 4
    assert "tok:13a" in scores.bleu_signature


def test_a_perfect_corpus_scores_a_hundred():
    scores = score_corpus(REFERENCES, REFERENCES)
    assert (round(scores.bleu, 6), round(scores.chrf, 6), scores.exact_match) == (100, 100, 100)


@pytest.mark.parametrize(("translations", "references"), [(["a"], ["a", "b"]), (["a", "b"], ["a"]), ([], [])])
def test_sides_of_different_length_are_refused(translations, references):
    with pytest.raises(UserError, match=f"{len(translations)} translations and {len(references)} references"):
        score_corpus(translations, references)


def test_an_unknown_tokenization_is_refused_with_the_legal_ones():
    with pytest.raises(UserError, match=r"tokenize is '13b'; legal: .*13a"):
        score_corpus(["a"], ["a"], "13b")
    for name in BLEU.TOKENIZERS:
        check_tokenization(name)


def test_tokenized_text_is_not_tokenized_again():
    assert tokenization_of(Config()) == "13a"
    assert tokenization_of(Config(tokenizer=TokenizerConfig(kind="word"))) == "13a"
    assert tokenization_of(Config(tokenizer=TokenizerConfig(kind="pretokenized"))) == "none"


@pytest.mark.parametrize("lowercase", [False, True])
@pytest.mark.parametrize("tokenize", ["13a", "intl", "none"])
def test_each_kind_of_bleu_is_that_of_its_command_line(tmp_path, tokenize, lowercase):
    for name, lines in (("ours", TRANSLATIONS), ("reference", REFERENCES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "sacrebleu", "reference", "-i", "ours", "-m", "bleu", "-b", "-w", "6", "--force"]
    command += ["--tokenize", tokenize, *(["-lc"] if lowercase else [])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, cwd=tmp_path)
    assert score_corpus(TRANSLATIONS, REFERENCES, tokenize, lowercase).bleu == pytest.approx(
        float(done.stdout), abs=1e-6
    )


def test_figures_intervals_and_significance_are_those_of_its_command_line(tmp_path):
    rng = random.Random(0)
    references = [" ".join(rng.choices(["a", "b", "c", "d", "e", "f", "g"], k=12)) for _ in range(60)]
    systems = {
        name: [" ".join(word if rng.random() < keep else "x" for word in line.split()) for line in references]
        for name, keep in (("good", 0.9), ("poor", 0.8))
    }
    for name, lines in {"reference": references, **systems}.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    files = [tmp_path / name for name in ("reference", *systems)]
    options = ["-m", "bleu", "chrf", "--paired-bs", "--paired-bs-n", "200", "-w", "6", "--format", "text"]
    command = [sys.executable, "-m", "sacrebleu", files[0], "-i", *files[1:], *options]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)  # its JSON fails here
    figures = re.findall(r"([\d.]+) \(([\d.]+) ± ([\d.]+)\)", done.stdout.decode())
    p_values = re.findall(r"\(p = ([\d.]+)\)", done.stdout.decode())
    assert (len(figures), len(p_values)) == (4, 2)

    found = resample(systems, references, num_samples=200)
    ours = [*found["good"], *found["poor"]]
    for one, theirs in zip(ours, figures, strict=True):
        assert (one.score, one.mean, one.interval) == pytest.approx([float(figure) for figure in theirs], abs=1e-5)
    assert [one.p_value for one in ours] == [None, None, *(pytest.approx(float(p), abs=6e-5) for p in p_values)]
    assert ours[2].p_value < 0.05
    for one in ours:
        assert one.signature in done.stdout.decode()
    alone = resample({"good": systems["good"]}, references, num_samples=200)["good"]
    assert alone == found["good"]
