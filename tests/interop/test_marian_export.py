"""Models exported as Marian folders: transformers gives equal ids, logits and translations."""

import dataclasses

import pytest
from interop_cases import change_json, odd, random_params
from marian_cases import EXTRA, assert_same_logits, compare_outputs, generated

from transformer_jax.config import Config, DecodingConfig, TokenizerConfig
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.translator import Translator
from transformer_jax.interop.marian_format import marian_tensors, read_marian, write_marian
from transformer_jax.types import UserError

TEXTS = ["the cat sat", "a dog runs ! the park", "die Katze saß", "walk@@ ing in the pa@@ rk"] * 3
# Equal numbers of tokens, so that one shape is compiled.
LINES = ["the cat sat", "a dog runs", "the die ß", "cat cat@@ a"]
ODD_TEXT = [
    "", " ", "the cat", "  two  spaces ", "unseen ж 漢字", "<s> a</s> </s> <pad> x <unk>", "walk@@ ing pa@@",
    "a @@ the@@",
    "tab\tand\u00a0nbsp\u2003em\x1cfs\x85nel", "cat@@@@ sat", "\u200bzero <s_> ",
]  # fmt: skip


@pytest.fixture(scope="module")
def transformers(optional_package):
    for name in ("torch", "safetensors"):
        optional_package(name)
    optional_package("torch").set_num_threads(1)
    return optional_package("transformers")


def run(kind="bpe", texts=TEXTS, spare=3, **model):
    """Return a configuration, random parameters and a tokenizer with fewer entries than the model has rows."""
    tokenizer = train_tokenizer(kind, texts, 280 if kind == "bpe" else 60, 1)
    sizes = {"num_layers": 1, "decoder_num_layers": 2, "vocab_size": tokenizer.vocab_size + spare}
    config = Config(
        model=odd(**(sizes | model)),
        tokenizer=TokenizerConfig(kind=kind),
        decoding=DecodingConfig(
            beam_size=4,
            alpha=0.6,
            length_penalty="power",
            stopping="huggingface",
            max_length_offset=EXTRA,
            forbidden_ids=(9,),
        ),
    )
    return config, random_params(config.model), TokenizerPair(tokenizer, tokenizer)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"positions": "halves", "logits_bias": True, "attention_bias": True},
        {"tie_embeddings": "target", "activation": "swish", "attention_bias": True},
        {"tie_embeddings": "none", "activation": "gelu", "scale_embeddings": False, "decoder_start": "eos"},
        {"decoder_start": "pad", "logits_bias": True, "source_eos": False},
    ],
)
def test_logits_and_import(transformers, tmp_path, model):
    config, params, pair = run("word", **model)
    write_marian(tmp_path, config, params, pair, warn=pytest.fail)
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    again = read_marian(tmp_path)
    assert_same_logits(config.model, params, theirs)
    assert_same_logits(again.config.model, again.params, theirs)
    assert again.tokenizers.source.to_json() == pair.source.to_json()
    assert again.tokenizers.joint
    assert again.config.model.start_id == config.model.start_id
    unnamed = tuple(range(pair.target.vocab_size, config.model.vocab_size))
    assert again.config.decoding.forbidden_ids == tuple(sorted({9, *unnamed}))


@pytest.mark.parametrize("kind", ["bpe", "word", "pretokenized"])
def test_tokenizer(transformers, tmp_path, kind):
    # A word that is spelled like a special token is a word with a separate id.
    texts = TEXTS if kind == "bpe" else [*TEXTS, "<s> <s_>"]
    config, params, pair = run(kind, texts)
    write_marian(tmp_path, config, params, pair, warn=pytest.fail)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    lines = [*TEXTS, *ODD_TEXT]
    expected = pair.source.encode(lines)
    assert tokenizer(lines).input_ids == [[*ids, 2] for ids in expected]
    rows = [*expected, [1, 5, 0, 7, 2, 0]]
    assert [tokenizer.decode(row, skip_special_tokens=True) for row in rows] == pair.target.decode(
        [[i for i in row if i != 3] for row in rows]
    )
    names = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert names == (0, 1, 2, 3)
    assert tokenizer.pad_token == "<pad>"


def test_source_without_eos(transformers, tmp_path):
    config, params, pair = run("word", source_eos=False)
    write_marian(tmp_path, config, params, pair, warn=pytest.fail)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(["the cat"]).input_ids == pair.source.encode(
        ["the cat"]
    )


@pytest.mark.parametrize("kind", ["bpe", "word"])
def test_translations(transformers, tmp_path, kind):
    config, params, pair = run(kind, logits_bias=True)
    write_marian(tmp_path, config, params, pair, warn=pytest.fail)
    model = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert model.generation_config.num_beams == 4
    assert model.generation_config.max_length == 40  # the size of the position table
    for beams in (1, 4):
        translator = Translator(config.with_changes(decoding={"beam_size": beams}), params, pair)
        differing, worst = compare_outputs(translator, model, tokenizer, LINES, num_beams=beams)
        assert differing == []
        assert worst < 1e-4


@pytest.mark.parametrize("beams", [1, 4])
def test_min_length_is_exported_and_read_back(transformers, tmp_path, beams):
    """EOS is the most probable token, so the minimum decides."""
    config, params, pair = run("word", logits_bias=True)
    params["logits_bias"][config.model.eos_id] += 30
    config = config.with_changes(decoding={"beam_size": beams, "min_length": 3})
    write_marian(tmp_path, config, params, pair, warn=pytest.fail)
    model = transformers.MarianMTModel.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for line, (found, *_) in zip(LINES, Translator(config, params, pair).translate_n_best(LINES, 1), strict=True):
        text, ids, _ = generated(model, tokenizer, line, num_beams=beams)
        assert (found.text, found.num_tokens) == (text, len(ids))
        assert ids.index(config.model.eos_id) == 3
    assert read_marian(tmp_path).config.decoding.min_length == 3
    # min_length counts the start token.
    change_json(tmp_path / "generation_config.json", min_new_tokens=None, min_length=4)
    assert read_marian(tmp_path).config.decoding.min_length == 3


def test_differences_from_generate_are_warned_about(tmp_path):
    config, params, pair = run("word")
    decoding = DecodingConfig()
    warned = []
    write_marian(tmp_path, dataclasses.replace(config, decoding=decoding), params, pair, warned.append)
    assert len(warned) == 2
    assert "decoding.length_penalty='gnmt'" in warned[0]
    assert "decoding.stopping='paper'" in warned[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("norm_position", "pre"),
        ("final_norm", True),
        ("norm_epsilon", 1e-6),
        ("norm_variant", "unbiased_std"),
        ("positions", "learned"),
        ("position_exponent", "tensor2tensor"),
        ("position_offset", 1),
        ("decoder_start", "zeros"),
        ("source_bos", True),
        ("d_k", 5),
        ("decoder_d_v", 5),
    ],
)
def test_inexpressible_model_is_rejected(field, value):
    config = odd(**{field: value})
    with pytest.raises(UserError, match=rf"marian cannot express this model: .*{field}"):
        marian_tensors(random_params(config), config)


def test_inexpressible_tokenizer_is_rejected(tmp_path):
    config, params, pair = run("word", tie_embeddings="target")
    other = train_tokenizer("word", TEXTS, 60, 1)
    with pytest.raises(UserError, match=r"tokenizer\.joint=False, but a Marian folder has one vocabulary"):
        write_marian(tmp_path, config, params, TokenizerPair(pair.source, other), pytest.fail)
    other.kind, other.to_json = "subword_nmt", lambda: "{}"
    with pytest.raises(UserError, match=r"tokenizer\.kind='subword_nmt'"):
        write_marian(tmp_path, config, params, TokenizerPair(other, other), pytest.fail)


def test_sentencepiece_pair_without_eos_is_rejected(optional_package, tmp_path):
    optional_package("sentencepiece")
    from marian_cases import pieces, train_model

    from transformer_jax.data.subword import SentencePieceTokenizer

    model = train_model(TEXTS)
    words = ["</s>", "<unk>", *pieces(model), "<pad>"]
    tokenizer = SentencePieceTokenizer(model, {w: i for i, w in enumerate(words)}, (len(words) - 1, 0, 0, 1))
    ids = {"pad_id": len(words) - 1, "bos_id": 0, "eos_id": 0, "unk_id": 1, "vocab_size": len(words)}
    config = Config(model=odd(source_eos=False, **ids))
    with pytest.raises(UserError, match=r"model\.source_eos=False"):
        write_marian(tmp_path, config, random_params(config.model), TokenizerPair(tokenizer, tokenizer), pytest.fail)
