"""Marian folders as transformers saves them: the same ids, logits and translations as `MarianMTModel`."""

import re

import pytest
from interop_cases import assert_same_trees, change_json, copy_files
from marian_cases import LINES, assert_same_logits, compare_outputs, generated, make_folder, with_decoding

from transformer_jax.config import Config, DecodingConfig
from transformer_jax.interop.marian_format import read_marian, write_marian
from transformer_jax.types import UserError

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:FutureWarning:transformers", "ignore:.*:DeprecationWarning:transformers"
)
# The tying choices of transformers: one table for all, one for target and logits, or separate tables.
TIES = {
    "all": {},
    "target": {"separate": True},
    "target, one vocabulary": {"share_encoder_decoder_embeddings": False},
    "none": {"separate": True, "tie_word_embeddings": False},
    "none, one vocabulary": {"tie_word_embeddings": False},
}


@pytest.fixture(scope="module")
def transformers(optional_package):
    for name in ("torch", "sentencepiece", "sacremoses", "safetensors"):
        optional_package(name)
    return optional_package("transformers")


@pytest.fixture(scope="module")
def folder(transformers, tmp_path_factory):
    path = tmp_path_factory.mktemp("marian")
    make_folder(path)
    return path


@pytest.mark.parametrize("tie", TIES)
def test_logits(transformers, tmp_path, tie):
    model = make_folder(tmp_path, std=0.3, **TIES[tie])
    imported = read_marian(tmp_path)
    assert imported.config.model.tie_embeddings == tie.partition(",")[0]
    assert imported.config.tokenizer.joint == (not TIES[tie].get("separate", False))
    assert_same_logits(imported.config.model, imported.params, model)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "gelu", "scale_embedding": False},
        {"activation_function": "relu", "decoder_start_token_id": 0},
        {"activation_function": "silu", "decoder_start_token_id": 5},
        {"static_position_embeddings": False},  # MarianMTModel ignores this field and computes sinusoids
    ],
)
def test_settings(transformers, tmp_path, changes):
    model = make_folder(tmp_path, std=0.3, **changes)
    imported = read_marian(tmp_path)
    start = {0: "eos", 5: "bos"}.get(changes.get("decoder_start_token_id"), "pad")
    assert imported.config.model.decoder_start == start
    assert_same_logits(imported.config.model, imported.params, model)


def test_configuration(folder):
    config = read_marian(folder).config
    model, decoding = config.model, config.decoding
    assert (model.num_layers, model.decoder.num_layers, model.num_heads, model.decoder.num_heads) == (1, 2, 3, 2)
    assert (model.positions, model.position_exponent, model.position_offset) == ("halves", "paper", 0)
    assert (model.norm_epsilon, model.decoder_start, model.max_length) == (1e-5, "pad", 64)
    assert model.attention_bias
    assert model.logits_bias
    assert (decoding.beam_size, decoding.alpha, decoding.length_penalty) == (4, 1.0, "power")
    assert (decoding.stopping, decoding.max_length_offset, decoding.max_source) == ("huggingface", 49, 64)
    assert decoding.forbidden_ids == ()  # padding is forbidden anyway
    assert Config.from_json(config.to_json()) == config


def test_tokenizers(folder, transformers):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pair = read_marian(folder).tokenizers
    assert pair.source.encode(LINES) == [ids[:-1] for ids in tokenizer(LINES).input_ids]
    assert pair.target.encode(LINES) == [ids[:-1] for ids in tokenizer(text_target=LINES).input_ids]


def test_spaces_before_punctuation(folder, transformers, tmp_path):
    """Folders saved by transformers 4 enable the clean-up."""
    copy_files(folder, tmp_path)
    change_json(tmp_path / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    imported = read_marian(tmp_path)
    assert imported.tokenizers.source.clean_up
    assert imported.tokenizers.target.clean_up
    (tmp_path / "again").mkdir()
    write_marian(tmp_path / "again", imported.config, imported.params, imported.tokenizers, warn=pytest.fail)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "again").clean_up_tokenization_spaces
    assert read_marian(tmp_path / "again").tokenizers.target.clean_up


@pytest.mark.parametrize("separate", [False, True])
def test_greedy_search(transformers, tmp_path, separate):
    model = make_folder(tmp_path, separate)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    translator = with_decoding(read_marian(tmp_path), beam_size=1)
    for line, (found,) in zip(LINES, translator.translate_n_best(LINES, 1), strict=True):
        text, ids, _ = generated(model, tokenizer, line, num_beams=1)
        assert (found.text, found.num_tokens) == (text, len(ids))


@pytest.mark.parametrize(("alpha", "renormalize_logits"), [(1.0, False), (0.6, True)])
def test_beam_search(folder, transformers, tmp_path, alpha, renormalize_logits):
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    copy_files(folder, tmp_path)
    change_json(tmp_path / "generation_config.json", renormalize_logits=renormalize_logits, length_penalty=alpha)
    settings = {"num_beams": 4, "length_penalty": alpha, "renormalize_logits": renormalize_logits}
    differing, worst = compare_outputs(with_decoding(read_marian(tmp_path)), model, tokenizer, LINES, **settings)
    assert differing == []
    assert worst < 1e-4


def test_forbidden_ids(folder, transformers, tmp_path):
    model = transformers.MarianMTModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = generated(model, tokenizer, LINES[0], num_beams=1)[1]
    forbidden = sorted(set(ids) - {0})[:4]
    copy_files(folder, tmp_path)
    change_json(tmp_path / "config.json", bad_words_ids=[[forbidden[0]], [0]])
    change_json(tmp_path / "generation_config.json", bad_words_ids=None, suppress_tokens=forbidden[1:])
    imported = read_marian(tmp_path)
    assert imported.config.decoding.forbidden_ids == tuple(forbidden)
    text = imported.config.to_json()
    assert Config.from_json(text) == imported.config
    for wrong in ("3", '["3"]'):
        with pytest.raises(UserError, match=r"decoding\.forbidden_ids is .*; it must be"):
            Config.from_json(re.sub(r'(?s)("forbidden_ids": )\[.*?\]', rf"\g<1>{wrong}", text))
    bad_words = [[i] for i in [forbidden[0], model.config.pad_token_id]]
    settings = {"bad_words_ids": bad_words, "suppress_tokens": forbidden[1:]}
    for beams in (1, 4):
        translator = with_decoding(imported, beam_size=beams)
        differing, _ = compare_outputs(translator, model, tokenizer, LINES, num_beams=beams, **settings)
        assert differing == []


def test_pytorch_model_bin(folder, transformers, tmp_path):
    import torch

    model = transformers.MarianMTModel.from_pretrained(folder)
    copy_files(folder, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    # As older releases wrote it, with tied tables and position tables.
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert "lm_head.weight" in model.state_dict()
    assert "model.encoder.embed_positions.weight" in model.state_dict()
    assert_same_trees(read_marian(tmp_path).params, read_marian(folder).params)


@pytest.mark.parametrize("separate", [False, True])
def test_imported_model_is_exported_again(transformers, tmp_path, separate):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
    make_folder(first, separate)
    imported = read_marian(first)
    write_marian(second, imported.config, imported.params, imported.tokenizers, warn=pytest.fail)
    again = read_marian(second)
    assert_same_trees(again.params, imported.params)
    # `generate` defines its length limit differently.
    limit = {"max_length_offset": imported.config.decoding.max_length_offset}
    assert again.config.with_changes(decoding=limit) == imported.config
    assert (second / "source.spm").read_bytes() == (first / "source.spm").read_bytes()
    model = transformers.MarianMTModel.from_pretrained(second).eval()
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (first, second)]
    assert tokenizers[0](LINES).input_ids == tokenizers[1](LINES).input_ids
    assert compare_outputs(with_decoding(imported), model, tokenizers[1], LINES, num_beams=4)[0] == []


def test_smaller_length_limit_is_kept(folder, tmp_path):
    copy_files(folder, tmp_path)
    for settings, expected in (({"max_length": 30}, 29), ({"max_length": 512}, 128), ({"max_new_tokens": 7}, 7)):
        change_json(tmp_path / "generation_config.json", **settings)
        assert read_marian(tmp_path).config.decoding.max_length_offset == expected
    (tmp_path / "generation_config.json").unlink()
    assert read_marian(tmp_path).config.decoding == DecodingConfig(
        beam_size=1, alpha=1.0, length_penalty="power", stopping="huggingface", max_length_offset=128, max_source=64
    )
