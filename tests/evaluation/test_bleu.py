"""Scores against sacreBLEU and its command line; variants of BLEU against multi-bleu's formula."""

import math
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from sacremoses import MosesTokenizer

from transformer_jax.config import Config, TokenizerConfig
from transformer_jax.evaluation.bleu import (
    bleu,
    bleu_variants,
    check_tokenization,
    moses_detokenize,
    moses_tokenize,
    resample,
    score_corpus,
    tokenization_of,
)
from transformer_jax.types import UserError

TRANSLATIONS = ["the cat sat on the mat .", "A dog, runs fast!", "", "ein Haus"]
REFERENCES = ["The cat sat on the mat .", "a dog runs very fast!", "nothing", "ein Haus"]

GERMAN = (
    [
        '"Das ist ein High-End-Ger\u00e4t", sagte die Frau in dem blauen Kleid gestern.',
        "der Hund l\u00e4uft heute schnell \u00fcber die gr\u00fcne Wiese und niemand sieht ihn.",
    ],
    [
        "\u201eDas ist ein High-End-Ger\u00e4t\u201c, sagte die Frau in dem roten Kleid gestern.",
        "Der Hund l\u00e4uft heute schnell \u00fcber die gr\u00fcne Wiese, und niemand sieht ihn.",
    ],
)
"""Return translations and references."""


@pytest.mark.parametrize("tokenize", ["13a", "none", "intl", "char"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_bleu_and_chrf_equal_sacrebleu(tokenize, lowercase):
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
    assert (scores.exact_match, scores.num_sentences) == (25, 4)
    assert "tok:13a" in scores.bleu_signature


def test_perfect_translations_score_100():
    scores = score_corpus(REFERENCES, REFERENCES)
    assert (round(scores.bleu, 6), round(scores.chrf, 6), scores.exact_match) == (100, 100, 100)
    for variant in bleu_variants(GERMAN[1], GERMAN[1], language="de", is_tokenized=False):
        assert variant.bleu == pytest.approx(100)


@pytest.mark.parametrize(("translations", "references"), [(["a"], ["a", "b"]), (["a", "b"], ["a"]), ([], [])])
def test_sides_of_different_length_raise(translations, references):
    with pytest.raises(UserError, match=f"{len(translations)} translations and {len(references)} references"):
        score_corpus(translations, references)


def test_an_unknown_tokenization_raises_with_the_legal_ones():
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
def test_each_bleu_equals_the_command_line_of_sacrebleu(tmp_path, tokenize, lowercase):
    for name, lines in (("ours", TRANSLATIONS), ("reference", REFERENCES)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "sacrebleu", "reference", "-i", "ours", "-m", "bleu", "-b", "-w", "6", "--force"]
    command += ["--tokenize", tokenize, *(["-lc"] if lowercase else [])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, cwd=tmp_path)
    assert score_corpus(TRANSLATIONS, REFERENCES, tokenize, lowercase).bleu == pytest.approx(
        float(done.stdout), abs=1e-6
    )


def test_intervals_and_significance_equal_the_command_line_of_sacrebleu(tmp_path):
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
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)  # --format json fails
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


def multi_bleu(translations, references):
    """Return 100 * BP * exp(mean log precision of 1- to 4-grams) over tokens separated by spaces."""
    log_precision = 0.0
    for n in (1, 2, 3, 4):
        matches = total = 0
        for translation, reference in zip(translations, references, strict=True):
            grams = [
                Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
                for words in (translation.split(), reference.split())
            ]
            matches += sum((grams[0] & grams[1]).values())
            total += sum(grams[0].values())
        log_precision += math.log(matches / total) / 4
    lengths = [sum(len(line.split()) for line in lines) for lines in (translations, references)]
    return 100 * min(1.0, math.exp(1 - lengths[1] / lengths[0])) * math.exp(log_precision)


def by_name(variants):
    found = {re.sub(r" \(.*?\)", "", variant.name): variant for variant in variants}
    assert len(found) == len(variants) == 7
    return found


def test_variants_of_untokenized_text():
    found = by_name(bleu_variants(*GERMAN, language="de", is_tokenized=False))
    lower = [[line.lower() for line in lines] for lines in GERMAN]
    for tokenize in ("13a", "intl"):
        variant = found[f"sacreBLEU {tokenize}"]
        assert (variant.bleu, variant.signature) == bleu(*GERMAN, tokenize)
        assert found[f"sacreBLEU {tokenize}, lower-cased"].bleu == bleu(*lower, tokenize)[0] > variant.bleu
        assert f"case:lc|eff:no|tok:{tokenize}" in found[f"sacreBLEU {tokenize}, lower-cased"].signature
    tokens = [[MosesTokenizer("de").tokenize(line, return_str=True) for line in lines] for lines in GERMAN]
    assert tokens[1][0].startswith("\u201e Das ist ein High-End-Ger\u00e4t \u201c ,")
    assert found["Moses tokens"].bleu == pytest.approx(multi_bleu(*tokens))
    assert "case:mixed|eff:no|tok:none" in found["Moses tokens"].signature
    lower = [[line.lower() for line in lines] for lines in tokens]
    assert found["Moses tokens, lower-cased"].bleu == pytest.approx(multi_bleu(*lower))


def test_the_papers_bleu_by_hand():
    """Moses' tokenizer escapes plain quotes, and hyphens between letters become tokens."""
    variant = by_name(bleu_variants(*GERMAN, language="de", is_tokenized=False))[
        "paper: Moses tokens, compounds split, plain quotes"
    ]
    quote, compound = "&quot;", "High ##AT##-##AT## End ##AT##-##AT## Ger\u00e4t"
    by_hand = [
        [
            f"{quote} Das ist ein {compound} {quote} , sagte die Frau in dem {color} Kleid gestern .",
            f"{first} Hund l\u00e4uft heute schnell \u00fcber die gr\u00fcne Wiese{comma} und niemand sieht ihn .",
        ]
        for color, first, comma in (("blauen", "der", ""), ("roten", "Der", " ,"))
    ]
    assert variant.bleu == pytest.approx(multi_bleu(*by_hand))
    assert "tok:none" in variant.signature


def test_variants_of_a_tokenized_corpus(recwarn):
    sides = [moses_tokenize(lines, "de") for lines in GERMAN]
    found = by_name(bleu_variants(*sides, language="de", is_tokenized=True))
    assert not [warning for warning in recwarn if "not exact" in str(warning.message)]
    assert found["tokens of the corpus"].bleu == pytest.approx(multi_bleu(*sides))
    detokenized = [moses_detokenize(lines, "de") for lines in sides]
    assert detokenized == list(GERMAN)
    as_text = by_name(bleu_variants(*GERMAN, language="de", is_tokenized=False))
    assert found["paper: tokens of the corpus, compounds split, plain quotes"].bleu == pytest.approx(
        as_text["paper: Moses tokens, compounds split, plain quotes"].bleu
    ), "an escaped quote is a quote"
    assert found["detokenized, sacreBLEU 13a"].bleu == bleu(*GERMAN, "13a")[0]
    with pytest.warns(UserWarning, match="1 of 2 references differ after"):
        bleu_variants(sides[0], [sides[1][0], 'zwei "W\u00f6rter" .'], language="de", is_tokenized=True)
