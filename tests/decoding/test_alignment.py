"""Alignments against the attention weights of one sentence at a time."""

import warnings

import numpy as np
import pytest
from translator_cases import make, sentences

from transformer_jax.decoding import alignment
from transformer_jax.decoding.alignment import align
from transformer_jax.decoding.decode import Member
from transformer_jax.decoding.translator import Hypothesis, Translator
from transformer_jax.types import EOS_ID, UserError
from transformer_jax.visualization.attention import attention_of


def translations(translator, *lengths):
    """Return a hypothesis of random words and EOS per source, because untrained models generate few words."""
    texts = sentences(*lengths)
    rows = translator.tokenizers.target.encode(texts)
    return [[Hypothesis(text, 0.0, 0.0, len(ids) + 1, (*ids, EOS_ID))] for text, ids in zip(texts, rows, strict=True)]


@pytest.mark.parametrize(
    ("layer", "source_eos", "source_bos"), [(None, True, False), (1, False, False), (3, True, False), (2, True, True)]
)
def test_each_token_is_aligned_with_the_argmax_of_its_attention(layer, source_eos, source_bos):
    translator = make(num_layers=3, num_heads=2, source_eos=source_eos, source_bos=source_bos)
    texts = sentences(3, 9, 1, 12, 5)
    found = translations(translator, 4, 6, 2, 12, 9)
    aligned = align(translator, texts, found, layer)
    for text, (best,), (one,) in zip(texts, found, aligned, strict=True):
        attention = attention_of(translator, text, best.text)
        weights = attention.maps["cross"].weights[(layer or 2) - 1].mean(axis=0)
        source, target = text.split(), best.text.split()
        assert one.source_tokens == tuple(source)
        assert one.target_tokens == tuple(target)
        words = slice(int(source_bos), int(source_bos) + len(source))  # neither BOS nor EOS
        expected = weights[: len(target), words].argmax(axis=1)
        assert one.pairs == tuple((int(place), number) for number, place in enumerate(expected))
    assert len({place for (one,) in aligned for place, _ in one.pairs}) > 1


def test_ensemble_alignment_uses_the_mean_attention():
    one = make(num_layers=2)
    other = make(num_layers=1)
    texts = sentences(8, 9, 10)
    both = Translator(one.config, one.params, one.tokenizers, [Member(other.config.model, other.params)])
    found = translations(both, 7, 9, 11)
    for text, (best,), (aligned,) in zip(texts, found, align(both, texts, found), strict=True):
        weights = [attention_of(each, text, best.text).maps["cross"].weights[0].mean(axis=0) for each in (one, other)]
        mean = np.mean(weights, axis=0)[: len(aligned.target_tokens), : len(aligned.source_tokens)]
        assert aligned.pairs == tuple((int(place), number) for number, place in enumerate(mean.argmax(axis=1)))


def test_alignment_of_empty_truncated_and_unfinished_sentences():
    translator = make(decoding={"max_source": 4})
    texts = ["", "one two three four five six"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = translator.translate_n_best(texts, 1)
    cut = Hypothesis("two one", 0.0, 0.0, 2, tuple(translator.tokenizers.target.encode(["two one"])[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning was already given
        (empty,), (ended, unended) = align(translator, texts, [found[0], [found[1][0], cut]])
    assert empty == ((), (), ())
    assert ended.source_tokens == unended.source_tokens == ("one", "two", "three")
    assert unended.target_tokens == ("two", "one")
    assert [number for _, number in unended.pairs] == [0, 1]


def test_missing_alignment_layer_is_rejected():
    translator = make()
    with pytest.raises(UserError, match="layer is 2; the decoder has layers 1 to 1"):
        align(translator, ["one"], translator.translate_n_best(["one"], 1), layer=2)


@pytest.mark.parametrize("most", [2**24, 1])
def test_batched_alignment_equals_one_sentence_at_a_time(tiny, monkeypatch, most):
    monkeypatch.setattr(alignment, "_MAX_WEIGHTS", most)  # 1: each pair is a batch
    translator = Translator.load(tiny.run, beam_size=2)
    texts = ["the dog", "a cat sees the blue house", "two"]
    found = translator.translate_n_best(texts, 2)
    together = align(translator, texts, found)
    assert [len(one) for one in together] == [2, 2, 2]
    for text, hypotheses, aligned in zip(texts, found, together, strict=True):
        assert align(translator, [text], [hypotheses]) == [aligned]
