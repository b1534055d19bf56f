"""Loss, perplexity and reports against what is computed here by hand."""

import dataclasses
import math
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation import validation as module
from transformer_jax.evaluation.bleu import score_corpus
from transformer_jax.evaluation.scoring import perplexity
from transformer_jax.evaluation.validation import Validation, evaluate_pairs, reference_texts
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.sharding import make_mesh, replicated
from transformer_jax.types import SPECIAL_TOKENS, UserError

MESH = make_mesh(-1, 1, 1)  # all simulated devices, as in training


@pytest.fixture(scope="module")
def translator(tiny):
    return Translator.load(tiny.run)


def mean_loss(translator, pairs):
    """-log P of the targets and their EOS, pair by pair, with BOS and EOS set by hand; over the number of tokens."""
    width = 64
    apply = jax.jit(Transformer(translator.config.model).apply)
    total, count = 0.0, 0
    for source, target in zip(pairs.source, pairs.target, strict=True):
        (src,), (tgt,) = translator.tokenizers.source.encode([source]), translator.tokenizers.target.encode([target])
        model = translator.config.model
        src, tgt_in, tgt_out = [*src, model.eos_id], [model.bos_id, *tgt], [*tgt, model.eos_id]
        padded = [np.pad(np.array([ids], np.int32), ((0, 0), (0, width - len(ids)))) for ids in (src, tgt_in)]
        logits = np.asarray(apply({"params": translator.params}, *map(jnp.asarray, padded)), np.float64)[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= log_probs[np.arange(len(tgt_out)), tgt_out].sum()
        count += len(tgt_out)
    return total / count


def test_a_report_is_what_its_parts_say(tiny, translator):
    pairs = read_split(tiny.config.data, "test")
    report = evaluate_pairs(translator, pairs)
    assert report.loss == pytest.approx(mean_loss(translator, pairs), rel=1e-5)
    assert report.perplexity == pytest.approx(math.exp(report.loss))
    assert report.translations == translator.translate(list(pairs.source))
    assert report.scores == score_corpus(report.translations, list(pairs.target))
    assert report.sentences_per_second > 0
    assert report.tokens_per_second > report.sentences_per_second


def test_no_pair_is_left_out_of_an_evaluation(translator):
    # Training would leave out the empty ones and the odd ones.
    pairs = Pairs(["a dog", "", "the"], ["ein hund", "der", ""], "here")
    report = evaluate_pairs(translator, pairs, tokenize="none", lowercase=True)
    assert report.scores.num_sentences == 3
    assert report.translations[1] == ""
    assert math.isfinite(report.loss)
    assert "case:lc|eff:no|tok:none" in report.scores.bleu_signature


def test_a_wrong_tokenization_is_found_before_the_work(translator, monkeypatch):
    monkeypatch.setattr(translator, "translate_n_best", lambda *_: pytest.fail("translated first"))
    with pytest.raises(UserError, match="tokenize is 'moses'"):
        evaluate_pairs(translator, Pairs(["a"], ["ein"], "here"), tokenize="moses")


def test_the_loss_does_not_depend_on_the_batches(tiny, translator, monkeypatch):
    pairs = read_split(tiny.config.data, "test")
    encoded = encode_pairs(pairs, translator.tokenizers, tiny.config.model)
    losses = []
    for batch_tokens in (100, 1000):
        data = dataclasses.replace(tiny.config.data, batch_tokens=batch_tokens)
        batches = module.validation_batches(encoded, dataclasses.replace(tiny.config, data=data))
        losses.append(module.corpus_loss(translator.params, batches, Transformer(tiny.config.model)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_perplexity_of_a_hopeless_loss_is_infinite():
    assert perplexity(0.0) == 1
    assert perplexity(1e4) == math.inf


def test_validation_gives_loss_scores_and_other_samples_each_time(tiny, translator):
    pairs = read_split(tiny.config.data, "valid")
    training = dataclasses.replace(tiny.config.training, valid_sentences=4, num_samples=2, validate_every=10)
    config = dataclasses.replace(tiny.config, training=training)
    encoded = encode_pairs(pairs, translator.tokenizers, config.model)
    validate = Validation(config, pairs, encoded, translator.tokenizers, MESH)
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
        place = sources.index(sample["source"])
        assert (sample["reference"], sample["translation"]) == (references[place], translations[place])


def test_validation_without_sentences_translates_nothing(tiny, translator, monkeypatch):
    pairs = read_split(tiny.config.data, "valid")
    training = dataclasses.replace(tiny.config.training, valid_sentences=0, num_samples=0)
    config = dataclasses.replace(tiny.config, training=training)
    encoded = encode_pairs(pairs, translator.tokenizers, config.model)
    monkeypatch.setattr(module, "Translator", lambda *_: pytest.fail("translated"))
    params = jax.device_put(translator.params, replicated(MESH))
    evaluation = Validation(config, pairs, encoded, translator.tokenizers, MESH)(params, 1)
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
def test_sides_that_look_swapped_are_warned_of(translator, monkeypatch, losses, target, warns):
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


def test_words_that_no_side_knows_are_no_evidence(translator, monkeypatch):
    """The other way round the target is one unknown word, which any model finds likely."""
    words = [WordTokenizer("word", [*SPECIAL_TOKENS, *known]) for known in (["a", "dog"], ["ein", "hund"])]
    pair = dataclasses.replace(translator.tokenizers, source=words[0], target=words[1])
    monkeypatch.setattr(translator, "tokenizers", pair)
    found = iter((4.0, 1.0))
    monkeypatch.setattr(module, "corpus_loss", lambda *_, **__: next(found))
    module.check_direction(translator, Pairs(["a dog"], ["ein hund"], "here"))


def test_pairs_that_only_the_reverse_direction_cannot_encode_are_accepted(translator, monkeypatch):
    words = [
        WordTokenizer("word", [*SPECIAL_TOKENS[:3], *known], (0, 1, 2, None))
        for known in (["a", "dog"], ["ein", "hund"])
    ]
    monkeypatch.setattr(translator, "tokenizers", TokenizerPair(*words))
    module.check_direction(translator, Pairs(["a dog"], ["ein hund"], "here"))
    with pytest.raises(UserError, match="not in the vocabulary"):
        module.check_direction(translator, Pairs(["a cat"], ["ein hund"], "here"))


def test_sentences_translated_into_nothing_are_warned_of(translator):
    pairs = Pairs(["a dog", " ", "the cat"], ["ein hund", "", "die katze"], "here")
    module.check_complete(["x", "", "y"], pairs)
    with pytest.warns(UserWarning, match="1 of 3 sentences have an empty translation"):
        module.check_complete(["", "", "y"], pairs)


class CompilingTranslator:
    """Translate as a translator does, after JAX traced a function for some seconds."""

    def __init__(self, translator, seconds):
        self.translator, self.seconds = translator, seconds

    def __getattr__(self, name):
        return getattr(self.translator, name)

    def translate_n_best(self, *args, **options):
        def inner(x):
            time.sleep(self.seconds / 2)
            return x + 1

        def slow_to_trace(x):
            time.sleep(self.seconds / 2)
            return jax.jit(inner)(x)

        jax.jit(slow_to_trace)(1.0)
        return self.translator.translate_n_best(*args, **options)


def test_speed_does_not_count_compilation(tiny, translator):
    pairs = read_split(tiny.config.data, "test")
    evaluate_pairs(translator, pairs)  # compiles the search
    times: list[float] = []

    def clock():
        times.append(time.monotonic())
        return times[-1]

    result = evaluate_pairs(CompilingTranslator(translator, 2.0), pairs, clock=clock)
    elapsed = times[-1] - times[0]
    assert elapsed > 2
    assert len(pairs) / result.sentences_per_second < elapsed - 1.9
    assert result.tokens_per_second > result.sentences_per_second


def test_nested_intervals_are_counted_once():
    assert module.total_length([(0, 4), (1, 2), (3, 5), (7, 8)]) == 6
    assert module.total_length([]) == 0
