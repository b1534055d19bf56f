"""Loss, perplexity and reports against values computed by hand."""

import math
import time
import warnings

import jax
import pytest

from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.evaluation import validation as module
from transformer_jax.evaluation.bleu import score_corpus
from transformer_jax.evaluation.scoring import perplexity
from transformer_jax.evaluation.validation import Validation, evaluate_pairs, reference_texts
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.sharding import make_mesh, replicated
from transformer_jax.types import SPECIAL_TOKENS, UserError

MESH = make_mesh(-1, 1, 1)  # all simulated devices, as in training


@pytest.fixture
def mean_loss(score_by_hand):
    """Return -log P of the targets and their EOS, divided by the number of tokens."""

    def compute(translator, pairs):
        scores = [score_by_hand(translator, *pair) for pair in zip(pairs.source, pairs.target, strict=True)]
        log_probs, counts = zip(*scores, strict=True)
        return -sum(log_probs) / sum(counts)

    return compute


def test_evaluation_reports_loss_and_translation_scores(tiny, translator, mean_loss):
    pairs = read_split(tiny.config.data, "test")
    report = evaluate_pairs(translator, pairs)
    assert report.loss == pytest.approx(mean_loss(translator, pairs), rel=1e-5)
    assert report.perplexity == pytest.approx(math.exp(report.loss))
    assert report.translations == translator.translate(list(pairs.source))
    assert report.scores == score_corpus(report.translations, list(pairs.target))
    assert report.tokens_per_second > report.sentences_per_second > 0


def test_evaluation_includes_every_pair(translator):
    # Training would leave out empty sides and skewed lengths.
    pairs = Pairs(["a dog", "", "the"], ["ein hund", "der", ""], "here")
    report = evaluate_pairs(translator, pairs, tokenize="none", lowercase=True)
    assert report.scores.num_sentences == 3
    assert report.translations[1] == ""
    assert math.isfinite(report.loss)
    assert "case:lc|eff:no|tok:none" in report.scores.bleu_signature


def test_an_unknown_tokenization_raises_before_translating(translator, monkeypatch):
    monkeypatch.setattr(translator, "translate_n_best", lambda *_: pytest.fail("translated first"))
    with pytest.raises(UserError, match="tokenize is 'moses'"):
        evaluate_pairs(translator, Pairs(["a"], ["ein"], "here"), tokenize="moses")


def test_the_loss_does_not_depend_on_the_batches(tiny, translator, monkeypatch):
    pairs = read_split(tiny.config.data, "test")
    encoded = encode_pairs(pairs, translator.tokenizers, tiny.config.model)
    losses = []
    for batch_tokens in (100, 1000):
        config = tiny.config.with_changes(data={"batch_tokens": batch_tokens})
        batches = module.validation_batches(encoded, config)
        losses.append(module.corpus_loss(translator.params, batches, Transformer(tiny.config.model)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_perplexity_of_a_large_loss_is_infinite():
    assert perplexity(0.0) == 1
    assert perplexity(1e4) == math.inf


def make_validation(tiny, translator, **training):
    config = tiny.config.with_changes(training=training)
    pairs = read_split(config.data, "valid")
    encoded = encode_pairs(pairs, translator.tokenizers, config.model)
    return Validation(config, pairs, encoded, translator.tokenizers, MESH)


def test_validation_reports_loss_scores_and_other_samples_each_time(tiny, translator, mean_loss):
    validate = make_validation(tiny, translator, valid_sentences=4, num_samples=2, validate_every=10)
    pairs = read_split(tiny.config.data, "valid")
    params = jax.device_put(translator.params, replicated(MESH))
    first, second = validate(params, 10), validate(params, 20)
    loss = mean_loss(translator, pairs)
    assert first.metrics["valid_loss"] == pytest.approx(loss, rel=1e-5)
    assert first.metrics["valid_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    chosen = [0, 2, 4, 7]  # spread over the 8
    sources, references = ([side[i] for i in chosen] for side in (pairs.source, pairs.target))
    translations = translator.translate(sources)
    assert first.metrics["valid_bleu"] == score_corpus(translations, references).bleu
    assert {sample["source"] for sample in [*first.samples, *second.samples]} == set(sources)
    for sample in first.samples:
        index = sources.index(sample["source"])
        assert (sample["reference"], sample["translation"]) == (references[index], translations[index])


def test_validation_without_sentences_translates_nothing(tiny, translator, monkeypatch):
    validate = make_validation(tiny, translator, valid_sentences=0, num_samples=0)
    monkeypatch.setattr(module, "Translator", lambda *_: pytest.fail("translated"))
    evaluation = validate(jax.device_put(translator.params, replicated(MESH)), 1)
    assert evaluation.metrics.keys() == {"valid_loss", "valid_perplexity"}
    assert not evaluation.samples


def test_references_in_pieces_are_joined():
    tokenizer = WordTokenizer("pretokenized", [*SPECIAL_TOKENS, "wal@@", "king"])
    pairs = Pairs(["x"], ["wal@@ king far"], "here")
    assert reference_texts(pairs, TokenizerPair(tokenizer, tokenizer)) == ["walking far"]


@pytest.mark.parametrize(
    ("losses", "target", "warns"),
    [((4.0, 1.0), "ein hund", True), ((4.0, 3.5), "ein hund", False), ((1.0, 4.0), "ein hund", False)],
)
def test_swapped_sides_give_a_warning(translator, monkeypatch, losses, target, warns):
    seen, found = [], iter(losses)

    def loss_of(params, batches, model, max_logits):
        seen.append([(batch.src[0].tolist(), batch.tgt_out[0].tolist()) for batch in batches])
        return next(found)

    monkeypatch.setattr(module, "corpus_loss", loss_of)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.check_direction(translator, Pairs(["a dog"], [target], "a.en and a.de"))
    assert [str(warning.message) for warning in caught] == [
        "a.en and a.de: the model assigns higher likelihood to the reverse direction: are --source and --reference "
        "swapped?"
    ] * warns
    (((source, target_ids),), ((swapped, back),)) = seen
    assert (source, target_ids) == (back, swapped) != (target_ids, source)


def word_tokenizers(special, *ids):
    words = ["a", "dog"], ["ein", "hund"]
    return TokenizerPair(*(WordTokenizer("word", [*special, *known], *ids) for known in words))


def test_unknown_words_give_no_warning_of_swapped_sides(translator, monkeypatch):
    """In the reverse direction the target is one unknown word, which any model finds probable."""
    monkeypatch.setattr(translator, "tokenizers", word_tokenizers(SPECIAL_TOKENS))
    found = iter((4.0, 1.0))
    monkeypatch.setattr(module, "corpus_loss", lambda *_, **__: next(found))
    module.check_direction(translator, Pairs(["a dog"], ["ein hund"], "here"))


def test_pairs_that_only_the_reverse_direction_cannot_encode_are_accepted(translator, monkeypatch):
    monkeypatch.setattr(translator, "tokenizers", word_tokenizers(SPECIAL_TOKENS[:3], (0, 1, 2, None)))
    module.check_direction(translator, Pairs(["a dog"], ["ein hund"], "here"))
    with pytest.raises(UserError, match="not in the vocabulary"):
        module.check_direction(translator, Pairs(["a cat"], ["ein hund"], "here"))


def test_empty_translations_give_a_warning(translator):
    pairs = Pairs(["a dog", " ", "the cat"], ["ein hund", "", "die katze"], "here")
    module.check_complete(["x", "", "y"], pairs)
    with pytest.warns(UserWarning, match="1 of 3 sentences have an empty translation"):
        module.check_complete(["", "", "y"], pairs)


def test_speed_does_not_count_compilation(tiny, translator, monkeypatch):
    """JAX traces two nested functions, for one second each, before each translation."""
    pairs = read_split(tiny.config.data, "test")
    evaluate_pairs(translator, pairs)  # compiles the search
    translate = translator.translate_n_best
    times: list[float] = []

    def slow_to_trace(function):
        def traced(x):
            time.sleep(1.0)
            return function(x)

        return jax.jit(traced)

    def compile_and_translate(*args, **options):
        slow_to_trace(slow_to_trace(lambda x: x + 1))(1.0)
        return translate(*args, **options)

    def clock():
        times.append(time.monotonic())
        return times[-1]

    monkeypatch.setattr(translator, "translate_n_best", compile_and_translate)
    result = evaluate_pairs(translator, pairs, clock=clock)
    elapsed = times[-1] - times[0]
    assert elapsed > 2
    assert len(pairs) / result.sentences_per_second < elapsed - 1.9
    assert result.tokens_per_second > result.sentences_per_second
