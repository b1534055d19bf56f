"""CTranslate2 folders: equal outputs for exported models and for imported ones, among them a small real model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ctranslate2_cases import BEAMS, MODELS, only_min_length, run, sentences, translated
from interop_cases import assert_same_trees, random_params

from transformer_jax.config import Config
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.translator import Translator
from transformer_jax.interop.ctranslate2_files import read_model_file, write_model_file
from transformer_jax.interop.ctranslate2_format import read_ctranslate2, write_ctranslate2
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import SPECIAL_TOKENS


@pytest.fixture(scope="module")
def ctranslate2(optional_package):
    return optional_package("ctranslate2")


def logits(config, params):
    model = config.model
    rng = np.random.default_rng(0)
    src, tgt = (jnp.asarray(rng.integers(4, rows, (2, 6))) for rows in (model.source_rows, model.vocab_size))
    params = jax.tree.map(jnp.asarray, params)
    return np.asarray(Transformer(model).apply({"params": params}, src, tgt))


@pytest.mark.parametrize("name", MODELS)
def test_ctranslate2_runs_the_export(ctranslate2, tmp_path, name):
    config, params, pair = run(name)
    write_ctranslate2(tmp_path, config, params, pair, warn=only_min_length)
    lines = sentences()
    for beam_size in (1, BEAMS) if name in ("paper", "two vocabularies") else (BEAMS,):
        config = config.with_changes(decoding={"beam_size": beam_size, "forbidden_ids": (0,)})
        found = Translator(config, params, pair).translate_n_best(lines, 1)
        expected = translated(ctranslate2, tmp_path, lines, config)
        for (ours, *_), ((tokens, log_prob), *_) in zip(found, expected, strict=True):
            assert ours.text.split() == [token for token in tokens if token not in SPECIAL_TOKENS[:3]]
            assert ours.num_tokens == len(tokens)
            assert abs(ours.log_prob - log_prob) < 1e-4
        assert max(ours.num_tokens for ours, *_ in found) > 3  # otherwise nothing is compared


@pytest.mark.parametrize("name", MODELS)
def test_own_export_round_trips(tmp_path, name):
    config, params, pair = run(name)
    write_ctranslate2(tmp_path, config, params, pair, warn=only_min_length)
    again = read_ctranslate2(tmp_path)
    np.testing.assert_array_equal(logits(again.config, again.params), logits(config, params))
    assert [again.tokenizers.source.to_json(), again.tokenizers.target.to_json()] == [
        pair.source.to_json(),
        pair.target.to_json(),
    ]
    if config.model.positions != "learned":
        assert_same_trees(again.params, params)
        for field in (
            *("positions", "position_exponent", "position_offset", "norm_position", "final_norm", "norm_epsilon"),
            *("activation", "attention_bias", "logits_bias", "tie_embeddings", "scale_embeddings", "decoder_start"),
            *("source_bos", "source_eos", "encoder", "decoder", "vocab_size", "source_rows", "max_length", "start_id"),
        ):
            assert getattr(again.config.model, field) == getattr(config.model, field), field
    other = tmp_path / "again"
    other.mkdir()
    write_ctranslate2(other, again.config, again.params, again.tokenizers, warn=pytest.fail)
    assert (other / "model.bin").read_bytes() == (tmp_path / "model.bin").read_bytes()
    assert (other / "config.json").read_bytes() == (tmp_path / "config.json").read_bytes()


def test_flag_of_older_files_for_source_bos_is_read(tmp_path):
    config, params, pair = run("source BOS")
    write_ctranslate2(tmp_path, config, params, pair, warn=only_min_length)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["add_source_bos"] is True
    variables = {name: np.array(value) for name, value in read_model_file(tmp_path / "model.bin").items()}
    write_model_file(tmp_path / "model.bin", variables | {"with_source_bos": np.array(1, np.int8)}, {})
    del settings["add_source_bos"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_ctranslate2(tmp_path).config.model.source_bos


def test_tied_tables_are_stored_once(tmp_path):
    config, params, pair = run("paper")
    write_ctranslate2(tmp_path, config, params, pair, warn=only_min_length)
    variables = read_model_file(tmp_path / "model.bin")
    table = variables["decoder/embeddings/weight"]
    assert variables["decoder/projection/weight"] is table
    assert variables["encoder/embeddings_0/weight"] is table
    assert not any(name.endswith("attention/linear_0/bias") for name in variables)


def test_rows_without_a_token_are_left_out(ctranslate2, tmp_path):
    config, params, pair = run("two vocabularies", spare=4)
    write_ctranslate2(tmp_path, config, params, pair, warn=only_min_length)
    again = read_ctranslate2(tmp_path)
    rows = again.config.model.vocab_size
    assert rows == pair.target.vocab_size == config.model.vocab_size - 4
    np.testing.assert_array_equal(again.params["target_embedding"]["table"], params["target_embedding"]["table"][:rows])
    ctranslate2.Translator(str(tmp_path), device="cpu")


def test_byte_pairs(ctranslate2, tmp_path):
    """Source and translation are pieces of the exported tokenizer."""
    tokenizer = train_tokenizer("bpe", ["the cat sat on the mat", "ein Hund läuft"] * 3, 280, 1)
    config = run("paper")[0].with_changes(
        model={"vocab_size": tokenizer.vocab_size},
        tokenizer={"kind": "bpe"},
        decoding={"forbidden_ids": (0,), "beam_size": 2},
    )
    params, pair = random_params(config.model), TokenizerPair(tokenizer, tokenizer)
    write_ctranslate2(tmp_path, config, params, pair, warn=lambda text: None)
    lines = ["the cat", "a mat"]
    pieces = [" ".join(tokenizer.tokens(ids)) for ids in tokenizer.encode(lines)]
    expected = translated(ctranslate2, tmp_path, pieces, config)
    vocabulary = tokenizer.tokens(range(tokenizer.vocab_size))
    texts = [tokenizer.decode([[vocabulary.index(token) for token in found[0][0]]])[0] for found in expected]
    assert Translator(config, params, pair).translate(lines) == texts
    imported = read_ctranslate2(tmp_path)
    assert imported.tokenizers.source.encode(lines) == tokenizer.encode(lines)
    assert imported.config.tokenizer.kind == "bpe"


def test_special_token_names_used_as_words_are_renamed(ctranslate2, tmp_path):
    tokenizer = train_tokenizer("word", ["<s> a b </s> <unk>"], 60, 1)
    config = run("paper")[0].with_changes(model={"vocab_size": tokenizer.vocab_size})
    write_ctranslate2(
        tmp_path, config, random_params(config.model), TokenizerPair(tokenizer, tokenizer), warn=only_min_length
    )
    words = json.loads((tmp_path / "shared_vocabulary.json").read_text())
    assert words[:4] == ["<pad>", "<s_>", "</s_>", "<unk_>"]
    assert len(set(words)) == len(words)
    ctranslate2.Translator(str(tmp_path), device="cpu").translate_batch([["<s>", "a", "nothing"]])
    assert read_ctranslate2(tmp_path).config.model.start_id == 1


def test_differences_from_translate_batch_are_warned_about(tmp_path):
    config, params, pair = run("paper", length_penalty="gnmt", forbidden_ids=(5, 6))
    warned = []
    write_ctranslate2(tmp_path, config, params, pair, warned.append)
    assert "decoding.length_penalty='gnmt'" in warned[0]
    assert "decoding.min_length=0" in warned[1]
    assert "min_decoding_length=0" in warned[1]
    assert 'suppress_sequences=[["w1"], ["w2"]]' in warned[2]
    write_ctranslate2(tmp_path, *run("paper", min_length=1), warn=pytest.fail)


@pytest.mark.parametrize("beam_size", [1, 2])
def test_imported_model_translates_with_the_defaults_of_translate_batch(ctranslate2, tmp_path, beam_size):
    """`translate_batch` returns no empty output, even if EOS is the most probable first token."""
    config, params, pair = run("two vocabularies")
    params["logits_bias"][config.model.eos_id] += 30
    params["logits_bias"][[0, 1, 3]] -= 30  # the texts show no special tokens
    write_ctranslate2(tmp_path, config, params, pair, warn=only_min_length)
    translator = ctranslate2.Translator(str(tmp_path), device="cpu", inter_threads=1, intra_threads=1)
    lines = sentences()
    found = translator.translate_batch(
        [line.split() for line in lines], beam_size=beam_size, suppress_sequences=[["<pad>"]]
    )
    expected = [" ".join(result.hypotheses[0]) for result in found]
    imported = read_ctranslate2(tmp_path)
    config = imported.config.with_changes(decoding={"beam_size": beam_size})
    assert Translator(config, imported.params, imported.tokenizers).translate(lines) == expected
    assert all(expected)


@pytest.fixture(scope="module")
def real(data_folder):
    folder = data_folder / "model-aren-transliteration"
    examples = json.loads((folder / "reference_outputs.json").read_text())["examples"]
    return read_ctranslate2(folder, num_heads=8), [" ".join(e["source"]) for e in examples], examples


def real_translator(imported, **decoding):
    return Translator(imported.config.with_changes(decoding=decoding), imported.params, imported.tokenizers)


def test_real_model_greedy(real):
    imported, lines, examples = real
    found = real_translator(imported, beam_size=1).translate_n_best(lines, 1)
    assert ["".join(ours.text.split()) for (ours,) in found] == [example["greedy"] for example in examples]
    log_probs = [sum(example["greedy_token_log_probs"]) for example in examples]
    np.testing.assert_allclose([ours.log_prob for (ours,) in found], log_probs, rtol=0, atol=1e-5)


def test_real_model_beam(real):
    imported, lines, examples = real
    found = real_translator(imported, beam_size=4, length_penalty="none").translate_n_best(lines, 4)
    for hypotheses, example in zip(found, examples, strict=True):
        assert ["".join(ours.text.split()) for ours in hypotheses] == example["beam4"]
        # By default translate_batch returns no empty output: EOS leaves the first softmax, which here shifts all four
        # scores of a word by the same, 1e-4 at most.
        differences = np.array([ours.score for ours in hypotheses]) - example["beam4_scores"]
        np.testing.assert_allclose(differences, differences[0], rtol=0, atol=1e-5)
        assert abs(differences[0]) < 2e-4


def padded(rows):
    width = max(map(len, rows))
    return np.array([[*row, *[0] * (width - len(row))] for row in rows])


def test_real_model_log_probs_of_each_token(real):
    imported, lines, examples = real
    model, params = imported.config.model, jax.tree.map(jnp.asarray, imported.params)
    src = padded(imported.tokenizers.source.encode(lines))
    rows = imported.tokenizers.target.encode([" ".join(example["greedy"]) for example in examples])
    tgt = padded([[*row, model.eos_id] for row in rows])
    tgt_in = np.concatenate([np.full((len(tgt), 1), model.bos_id), tgt[:, :-1]], axis=1)
    logits = Transformer(model).apply({"params": params}, jnp.asarray(src), jnp.asarray(tgt_in))
    found = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tgt[:, :, None], axis=2)[:, :, 0]
    expected = np.concatenate([example["greedy_token_log_probs"] for example in examples])
    np.testing.assert_allclose(found[tgt != model.pad_id], expected, rtol=0, atol=1e-5)


def test_real_model_is_exported_again(real, ctranslate2, tmp_path):
    imported, lines, examples = real
    write_ctranslate2(tmp_path, imported.config, imported.params, imported.tokenizers, warn=pytest.fail)
    translator = ctranslate2.Translator(str(tmp_path), device="cpu", inter_threads=1, intra_threads=1)
    found = translator.translate_batch([line.split() for line in lines], beam_size=1, length_penalty=1)
    assert ["".join(result.hypotheses[0]) for result in found] == [example["greedy"] for example in examples]
    assert_same_trees(read_ctranslate2(tmp_path).params, imported.params)


def test_real_model_configuration(real):
    imported, _, _ = real
    model, decoding = imported.config.model, imported.config.decoding
    assert (model.vocab_size, model.source_rows, model.num_heads, model.decoder.num_heads) == (43, 51, 8, 8)
    assert (model.positions, model.position_exponent, model.position_offset) == ("halves", "tensor2tensor", 1)
    assert (model.norm_position, model.final_norm, model.source_eos, model.decoder_start) == ("pre", True, False, "bos")
    assert (model.pad_id, model.bos_id, model.eos_id, model.unk_id) == (0, 1, 2, 50)
    assert imported.tokenizers.target.unk_id is None
    assert (decoding.stopping, decoding.length_penalty, decoding.beam_size) == ("ctranslate2", "power", 2)
    assert decoding.min_length == 1
    assert Config.from_json(imported.config.to_json()) == imported.config
