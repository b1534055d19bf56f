"""Translator: order, batches, shapes, limits, and agreement of the search with the model."""

import dataclasses
import math
import threading
import time
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from translator_cases import WORDS, make, sentences

from transformer_jax.config import DecodingConfig, ModelConfig, Sampling
from transformer_jax.decoding import decode as decode_module
from transformer_jax.decoding import translator as module
from transformer_jax.decoding.decode import prepare, search_spec
from transformer_jax.decoding.search import SearchResult
from transformer_jax.decoding.translator import Translator, padded_length, search
from transformer_jax.evaluation.scoring import score_pairs
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.types import EOS_ID, UserError


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of `search`, and return one token and EOS for each sentence."""
    seen = []

    def fake(params, src, spec, **options):
        limits = np.asarray(spec.max_lengths)
        seen.append(SimpleNamespace(src=np.asarray(src), limits=limits, max_length=spec.max_length, **options))
        rows = (len(src), spec.n_best)
        tokens = np.zeros((*rows, spec.max_length), np.int32)
        tokens[:, :, 0] = src[:, :1]
        return SearchResult(tokens, np.zeros(rows, np.float32), np.ones(rows, np.int32), np.zeros(rows, np.float32))

    monkeypatch.setattr(module, "search", fake)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 1)  # so that calls are sequential
    return seen


# ------------------------------------------------------------------------------------------------- order and batches


@pytest.mark.parametrize("beam_size", [1, 3])
def test_translation_does_not_depend_on_the_batch_and_order_is_kept(beam_size):
    texts = sentences(3, 9, 1, 2)
    texts[2:2] = ["", "  \t"]
    # With this rule every hypothesis ends. The paper's rule sorts those without EOS last, whatever their score.
    translator = make(decoding={"beam_size": beam_size, "batch_tokens": 32, "stopping": "huggingface"})
    together = translator.translate_n_best(texts, beam_size)
    assert len({found[0].text for found in together}) > 3, "a model that says the same to all would prove nothing"
    for text, found in zip(texts, together, strict=True):
        (alone,) = translator.translate_n_best([text], beam_size)
        assert [one.text for one in alone] == [one.text for one in found]
        np.testing.assert_allclose([one.score for one in alone], [one.score for one in found], rtol=1e-4)
        assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert translator.translate(texts) == [found[0].text for found in together]
    assert together[2] == together[3] == [("", 0.0, 0.0, 0, ())], "empty lines stay empty"


def test_results_keep_input_order_despite_sorting_by_length(calls):
    texts = [f"{word} {'ten ' * fill}".strip() for fill, word in zip((5, 0, 30, 2, 0, 12, 9), WORDS[:7], strict=True)]
    assert make(decoding={"batch_tokens": 20}).translate(texts) == WORDS[:7]
    lengths = [call.src.shape[1] for call in calls]
    assert lengths == sorted(lengths, reverse=True), "the longest first: what is short of memory fails at once"


def test_batches_have_few_shapes_within_the_token_budget(calls):
    translator = make(decoding={"batch_tokens": 128}, max_length=256)
    translator.translate(sentences(*range(1, 190), *range(1, 60)))
    shapes = {(call.src.shape, call.max_length) for call in calls}
    assert len(shapes) <= 8 + 8
    assert all(src[0] * src[1] <= 128 or src[0] == 1 for src, _ in shapes)
    assert sum(int((call.limits > 0).sum()) for call in calls) == 189 + 59
    # For any number of inputs, the number of rows is a power of two or the maximum of the budget.
    for count in range(1, 40):
        translator.translate(sentences(*[5] * count))
    assert {call.src.shape[0] for call in calls if call.src.shape[1] == 8} <= {1, 2, 4, 8, 16}


def test_cpu_batches_are_small_unless_weights_exceed_the_cache(calls, monkeypatch):
    texts = sentences(*[7] * 300)

    def shapes(translator):
        calls.clear()
        translator.translate(texts)
        return {call.src.shape for call in calls}

    translator = make(decoding={"batch_tokens": 8192}, max_length=256)
    assert shapes(translator) == {(64, 8)}
    for beam_size, expected in ((1, (128, 8)), (4, (64, 8))):
        large = make(decoding={"batch_tokens": 8192, "beam_size": beam_size}, max_length=256)
        (weights,), _ = large._prepare()
        embedding = np.broadcast_to(np.float32(0), (26 * 10**6, 1))
        weights = weights | {"embedding": {"table": embedding}}
        kept = (weights,), module._budget(large.config.decoding, (weights,))
        monkeypatch.setattr(large, "_prepare", lambda kept=kept: kept)
        assert shapes(large) == {expected}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert shapes(make(decoding={"batch_tokens": 8192}, max_length=256)) == {(512, 8)}


def test_samples_count_towards_the_token_budget(calls):
    translator = make(decoding={"batch_tokens": 256}, max_length=256)
    translator.translate_n_best(sentences(*[7] * 40), 8, sampling=Sampling())
    assert {call.src.shape for call in calls} == {(4, 8)}  # with 8 samples each: 256 tokens
    assert calls[0].keys.shape == (4, 8)


def test_cpu_searches_one_batch_per_core_concurrently(calls, monkeypatch):
    answer, together, last = module.search, threading.Barrier(3, timeout=60), threading.Event()

    def search(params, src, spec, **options):
        together.wait()  # fails unless three threads arrive
        if src[0, 0] == 4:  # the longest source, which is the first
            assert last.wait(60)
        elif src[0, 0] == 6:
            last.set()
        return answer(params, src, spec, **options)

    monkeypatch.setattr(module, "search", search)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 3)
    texts = ["three", "one" + " ten" * 20, "two" + " ten" * 10]
    assert make().translate(texts) == ["three", "one", "two"]


def test_interrupt_cancels_pending_batches(calls, monkeypatch):
    answer = module.search

    def search(*args, **options):
        time.sleep(0.02 if calls else 0)
        return answer(*args, **options)

    def interrupt(self, found):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "search", search)
    monkeypatch.setattr(Translator, "_hypotheses", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make(decoding={"batch_tokens": 1}).translate(sentences(*range(1, 90)))
    assert len(calls) < 89


@pytest.mark.parametrize("beam_size", [1, 3])
def test_growing_the_cache_does_not_change_translations(monkeypatch, beam_size):
    translator = make(decoding={"beam_size": beam_size, "max_length_offset": 6 + beam_size, "stopping": "huggingface"})
    texts = sentences(3, 5, 7, 8)
    monkeypatch.setattr(decode_module, "CACHE_SIZES", (2, 5))
    found = translator.translate_n_best(texts, 1)
    assert max(one[0].num_tokens for one in found) > 5
    monkeypatch.setattr(decode_module, "CACHE_SIZES", ())
    for one, other in zip(found, translator.translate_n_best(texts, 1), strict=True):
        assert one[0].text == other[0].text
        assert one[0].score == pytest.approx(other[0].score, rel=1e-5)


def test_translator_traces_once_per_shape():
    texts = sentences(3, 4, 11, 12)
    make(decoding={"max_length_offset": 3}).translate(texts)
    traces = search._cache_size()
    # Another translator of the same model, as at each validation, and other sentences of these lengths.
    make(decoding={"max_length_offset": 3}).translate(sentences(12, 11, 5, 6))
    assert search._cache_size() == traces


def test_no_texts_give_no_translations():
    assert make().translate([]) == []
    assert make().translate(["", " "]) == ["", ""]


def test_padded_lengths_waste_little_computation():
    for length in range(1, 1000):
        assert length <= padded_length(length) < max(length + 8, 1.26 * length)


# ------------------------------------------------------------------------------------------------------------ limits


def test_search_longer_than_the_learned_positions_is_rejected():
    """The initial capacity of the cache is smaller than the position table."""
    model = ModelConfig(vocab_size=9, d_model=8, num_layers=1, num_heads=2, d_ff=8, positions="learned", max_length=40)
    params = (jax.eval_shape(partial(prepare, config=model), abstract_params(model)),)
    src = jax.ShapeDtypeStruct((1, 3), jnp.int32)

    def shape_of(max_length):
        limits = np.array([max_length], np.int32)
        spec = search_spec(model, DecodingConfig(beam_size=1), max_lengths=limits, max_length=max_length)
        return jax.eval_shape(partial(search, models=(Transformer(model),)), params, src, spec)

    assert shape_of(40).tokens.shape == (1, 1, 40)
    with pytest.raises(UserError, match=r"sequence of 41 tokens .* model\.max_length 40"):
        shape_of(41)


@pytest.mark.parametrize("source_eos", [True, False])
def test_length_limit_is_source_length_plus_offset_counting_eos(calls, source_eos):
    make(source_eos=source_eos, decoding={"max_length_offset": 50}).translate(sentences(6, 3, 3))
    (call,) = calls
    assert call.limits.tolist() == [7 + 50, 4 + 50, 4 + 50, 0]
    assert call.max_length >= 57
    ends = [row.tolist().count(EOS_ID) for row in call.src]
    assert ends == ([1, 1, 1, 0] if source_eos else [0, 0, 0, 0])


def test_no_translation_is_longer_than_its_limit():
    # EOS is made impossible, so every translation reaches its limit.
    translator = make(tie_embeddings="target", logits_bias=True, decoding={"max_length_offset": 3})
    translator.params = jax.tree.map(
        lambda leaf: leaf.at[EOS_ID].set(-1e9) if leaf.shape == (14,) else leaf,  # the logits' bias
        translator.params,
    )
    for found, length in zip(translator.translate_n_best(sentences(2, 5), 1), (2, 5), strict=True):
        assert found[0].num_tokens == length + 1 + 3


def test_source_longer_than_max_source_is_truncated_with_a_warning(calls):
    translator = make(decoding={"max_source": 4})
    with pytest.warns(UserWarning, match=r"line 2 has 6 tokens; it is truncated to 3 tokens \(decoding\.max_source\)"):
        translator.translate(sentences(3, 6))
    (call,) = calls
    assert sorted((row != 0).sum() for row in call.src) == [4, 4]
    assert (call.src == EOS_ID).sum(axis=1).tolist() == [1, 1], "EOS is kept"


def test_learned_positions_are_usable_up_to_the_last_row():
    # 11 tokens and EOS fill the table of 12 rows, although sources are otherwise not padded to length 12.
    translator = _learned(12)
    assert padded_length(12) > 12
    found = translator.translate_n_best(sentences(11), 1)[0][0]
    assert 1 <= found.num_tokens <= 12
    with pytest.warns(UserWarning, match=r"line 1 has 12 tokens; it is truncated to 11 tokens \(model\.max_length\)"):
        assert translator.translate_n_best(sentences(12), 1)[0][0].num_tokens <= 12


def _learned(rows):
    translator = make(decoding={"max_length_offset": 50})
    model = dataclasses.replace(translator.config.model, positions="learned", max_length=rows)
    config = dataclasses.replace(
        translator.config, model=model, data=dataclasses.replace(translator.config.data, max_length=rows)
    )
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Transformer(model).init(jax.random.key(0), tokens, tokens)["params"]
    return Translator(config, params, translator.tokenizers)


# ------------------------------------------------------------------------------------- agreement with the model itself


def teacher_forced(translator, src, targets):
    """Return next-token log-probabilities `b t v` from one pass over complete targets, without a cache."""
    tgt_in = np.zeros_like(targets)
    tgt_in[:, 0], tgt_in[:, 1:] = translator.config.model.start_id, targets[:, :-1]
    # EOS replaces padding in the decoder's input, because later positions do not change earlier ones.
    apply = jax.jit(Transformer(translator.config.model).apply, static_argnames="deterministic")
    tgt_in = jnp.asarray(np.where(tgt_in == 0, EOS_ID, tgt_in))
    logits = apply({"params": translator.params}, jnp.asarray(src), tgt_in, deterministic=True)
    return np.asarray(jax.nn.log_softmax(logits))


@pytest.mark.parametrize("beam_size", [1, 4])
def test_search_log_probs_equal_teacher_forcing(beam_size):
    translator = make(decoding={"beam_size": beam_size, "alpha": 0.6})
    src = np.array([[5, 7, 9, EOS_ID], [4, EOS_ID, 0, 0]], np.int32)
    limits = np.array([8, 6], np.int32)
    model, decoding = translator.config.model, translator.config.decoding
    spec = search_spec(model, decoding, max_lengths=limits, max_length=8, n_best=beam_size)
    found = jax.device_get(search(translator._prepare()[0], jnp.asarray(src), spec, models=(Transformer(model),)))
    for n in range(beam_size):
        log_probs = teacher_forced(translator, src, found.tokens[:, n])
        for row in range(2):
            length = found.lengths[row, n]
            tokens = found.tokens[row, n, :length]
            total = log_probs[row, np.arange(length), tokens].sum()
            assert found.log_probs[row, n] == pytest.approx(total, abs=1e-4)
            assert found.scores[row, n] == pytest.approx(total / ((5 + length) / 6) ** 0.6, abs=1e-4)
            if beam_size == 1:
                allowed = log_probs[row, :length].copy()
                allowed[:, 0] = -math.inf  # padding is never generated
                assert tokens.tolist() == allowed.argmax(axis=-1).tolist(), "beam 1 is greedy"


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_search_log_probs_with_quantized_weights_are_close(weights):
    translator = make(decoding={"quantization": weights})
    translator.params = jax.tree.map(lambda leaf: leaf / 2, translator.params)
    src = np.array([[5, 7, 9, EOS_ID], [4, EOS_ID, 0, 0]], np.int32)
    model, decoding = Transformer(translator.config.model), translator.config.decoding
    (prepared,), _ = translator._prepare()
    assert prepared["embedding"]["table"].dtype == ("bfloat16" if weights == "bfloat16" else "float32")
    spec = search_spec(model.config, decoding, max_lengths=np.array([5, 5], np.int32), max_length=5)
    found = jax.device_get(search((prepared,), jnp.asarray(src), spec, models=(model,), quantization=weights))
    log_probs = teacher_forced(translator, src, found.tokens[:, 0])
    for row in range(2):
        length = found.lengths[row, 0]
        total = log_probs[row, np.arange(length), found.tokens[row, 0, :length]].sum()
        assert 0 < abs(found.log_probs[row, 0] - total) < 0.1 * length


def test_ids_without_a_token_are_never_generated():
    translator = make(vocab_size=40)
    assert translator.tokenizers.target.vocab_size == 14
    for hypotheses in translator.translate_n_best(sentences(3, 4, 5, 6, 7), 1):
        # A word tokenizer writes one word for each token but EOS; an id without a token would leave none.
        words = len(hypotheses[0].text.split())
        assert hypotheses[0].num_tokens - words in (0, 1)


def test_line_break_in_a_translation_becomes_a_space(calls, monkeypatch):
    translator = make()
    monkeypatch.setattr(type(translator.tokenizers.target), "decode", lambda self, rows: ["one\ntwo\n" for _ in rows])
    assert translator.translate(["ten"]) == ["one two "]


# ------------------------------------------------------------------------------------------------------------- errors


def test_n_best_above_the_beam_size_is_rejected():
    for n_best in (0, 3):
        with pytest.raises(UserError, match=f"n_best is {n_best}; .*beam_size 2"):
            make(decoding={"beam_size": 2}).translate_n_best(["ten"], n_best)


def test_single_string_instead_of_a_list_is_rejected():
    with pytest.raises(UserError, match="texts is the string 'ten'; a list of strings is needed"):
        make().translate("ten")


def test_tokenizer_larger_than_the_model_vocabulary_is_rejected():
    translator, small = make(), make(vocab_size=13)
    with pytest.raises(UserError, match="source tokenizer has 14 entries and the model's table 13 rows"):
        Translator(small.config, small.params, translator.tokenizers)


def test_load_accepts_decoding_fields_as_keywords(tiny):
    translator = Translator.load(str(tiny.run), max_length_offset=0, checkpoint="2")
    assert translator.config.decoding == dataclasses.replace(tiny.config.decoding, max_length_offset=0, checkpoint="2")
    first, last = (Translator.load(tiny.run, checkpoint=name).params for name in ("2", "last"))
    same = [bool((a == b).all()) for a, b in zip(*map(jax.tree.leaves, (translator.params, first)), strict=True)]
    assert all(same)
    assert not all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (translator.params, last)), strict=True))
    assert len(translator.translate(["a dog", ""])) == 2


@pytest.mark.parametrize(
    ("decoding", "message"),
    [
        ({"beam": 4}, "DecodingConfig has no field beam"),
        ({"beam_size": 0}, "decoding.beam_size is 0"),
        ({"checkpoint": "3"}, "no checkpoint '3'; there are last, best, average and the steps 2, 4"),
    ],
)
def test_load_rejects_missing_runs_and_invalid_fields(tiny, decoding, message):
    with pytest.raises(UserError, match=message):
        Translator.load(tiny.run, **decoding)
    with pytest.raises(UserError, match="is not a run"):
        Translator.load(tiny.corpus)


@pytest.mark.parametrize("length_penalty", ["gnmt", "power", "none"])
@pytest.mark.parametrize("beam_size", [1, 3])
def test_score_of_a_translation_equals_score_pairs(length_penalty, beam_size):
    """Greedy and beam search rank by the score that `score_pairs` gives the source and its translation."""
    decoding = {"beam_size": beam_size, "length_penalty": length_penalty, "max_length_offset": 20}
    translator, compared = make(tie_embeddings="target", logits_bias=True, decoding=decoding), 0
    bias = np.zeros(14, np.float32)
    bias[EOS_ID] = 3.0  # so that greedy translations end
    bias[[1, 3]] = -100.0  # BOS and UNK have no text
    translator.params = translator.params | {"logits_bias": jnp.asarray(bias)}
    texts = sentences(2, 3, 4, 5, 6, 7)
    for text, (best,) in zip(texts, translator.translate_n_best(texts, 1), strict=True):
        (ids,) = translator.tokenizers.target.encode([best.text])
        if best.token_ids != (*ids, EOS_ID):  # the limit ended it
            continue
        (pair,) = score_pairs(translator, [(text, best.text)])
        assert (best.score, best.log_prob) == pytest.approx((pair.score, pair.log_prob), rel=1e-4)
        compared += 1
    assert compared
