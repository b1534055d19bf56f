"""The variants of BLEU against the arithmetic of multi-bleu, written out here, and cases worked by hand."""

import math
import re
from collections import Counter

import pytest
from sacremoses import MosesTokenizer

from transformer_jax.evaluation.bleu import Moses, bleu, bleu_variants

REFERENCES = [
    "\u201eDas ist ein High-End-Ger\u00e4t\u201c, sagte die Frau in dem roten Kleid gestern.",
    "Der Hund l\u00e4uft heute schnell \u00fcber die gr\u00fcne Wiese, und niemand sieht ihn.",
]
TRANSLATIONS = [
    '"Das ist ein High-End-Ger\u00e4t", sagte die Frau in dem blauen Kleid gestern.',
    "der Hund l\u00e4uft heute schnell \u00fcber die gr\u00fcne Wiese und niemand sieht ihn.",
]


def multi_bleu(translations, references):
    """100 * BP * exp(mean log precision of 1- to 4-grams), of tokens between spaces."""
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


def test_variants_of_text_as_it_is_written():
    found = by_name(bleu_variants(TRANSLATIONS, REFERENCES, language="de", is_tokenized=False))
    lower = [[line.lower() for line in lines] for lines in (TRANSLATIONS, REFERENCES)]
    for tokenize in ("13a", "intl"):
        variant = found[f"sacreBLEU {tokenize}"]
        assert (variant.bleu, variant.signature) == bleu(TRANSLATIONS, REFERENCES, tokenize)
        assert found[f"sacreBLEU {tokenize}, lower-cased"].bleu == bleu(*lower, tokenize)[0] > variant.bleu
        assert f"case:lc|eff:no|tok:{tokenize}" in found[f"sacreBLEU {tokenize}, lower-cased"].signature
    tokens = [
        [MosesTokenizer("de").tokenize(line, return_str=True) for line in lines] for lines in (TRANSLATIONS, REFERENCES)
    ]
    assert tokens[1][0].startswith("\u201e Das ist ein High-End-Ger\u00e4t \u201c ,")
    assert found["Moses tokens"].bleu == pytest.approx(multi_bleu(*tokens))
    assert "case:mixed|eff:no|tok:none" in found["Moses tokens"].signature
    lower = [[line.lower() for line in lines] for lines in tokens]
    assert found["Moses tokens, lower-cased"].bleu == pytest.approx(multi_bleu(*lower))


def test_the_papers_bleu_by_hand():
    """Plain quotes are escaped by Moses' tokenizer; of a-b-c the first hyphen alone is free once b is taken."""
    variant = by_name(bleu_variants(TRANSLATIONS, REFERENCES, language="de", is_tokenized=False))[
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
    moses = Moses("de")
    sides = [moses.tokenize(lines) for lines in (TRANSLATIONS, REFERENCES)]
    found = by_name(bleu_variants(*sides, language="de", is_tokenized=True))
    assert not [warning for warning in recwarn if "not exact" in str(warning.message)]
    assert found["tokens of the corpus"].bleu == pytest.approx(multi_bleu(*sides))
    detokenized = [moses.detokenize(lines) for lines in sides]
    assert detokenized == [TRANSLATIONS, REFERENCES]
    as_text = by_name(bleu_variants(TRANSLATIONS, REFERENCES, language="de", is_tokenized=False))
    assert found["paper: tokens of the corpus, compounds split, plain quotes"].bleu == pytest.approx(
        as_text["paper: Moses tokens, compounds split, plain quotes"].bleu
    ), "an escaped quote is a quote"
    assert found["detokenized, sacreBLEU 13a"].bleu == bleu(TRANSLATIONS, REFERENCES, "13a")[0]
    with pytest.warns(UserWarning, match="1 of 2 references differ after"):
        bleu_variants(sides[0], [sides[1][0], 'zwei "W\u00f6rter" .'], language="de", is_tokenized=True)


def test_a_perfect_translation_has_a_hundred_everywhere():
    for variant in bleu_variants(REFERENCES, REFERENCES, language="de", is_tokenized=False):
        assert variant.bleu == pytest.approx(100)
