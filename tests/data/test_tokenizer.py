"""Check that byte pairs are lossless, no text gives a special id, and tokenizers survive saving."""

import dataclasses
import json
import logging

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiers import examples

from transformer_jax.config import Config, ModelConfig, TokenizerConfig
from transformer_jax.data.encoding import encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair, tokenizer_from_json, train_tokenizers
from transformer_jax.types import SPECIAL_TOKENS, UNK_ID, UserError

TEXTS = ["the cat sat on the mat", "die Katze saß auf der Matte", "the <pad> <pad> <s> </s> <unk> of the cats"] * 4
SPECIAL_IDS = set(range(len(SPECIAL_TOKENS)))


@pytest.fixture(scope="module")
def byte_pairs():
    return train_tokenizer("bpe", TEXTS, vocab_size=300, min_frequency=1)


def test_byte_pair_attributes(byte_pairs):
    assert (byte_pairs.pad_id, byte_pairs.bos_id, byte_pairs.eos_id, byte_pairs.unk_id) == (0, 1, 2, 3)
    assert byte_pairs.tokens(range(4)) == list(SPECIAL_TOKENS)
    assert 4 + 256 < byte_pairs.vocab_size <= 300
    assert byte_pairs.tokens(byte_pairs.encode([" the"])[0]) == ["Ġthe"]


def test_pieces_show_the_text_of_each_token(byte_pairs):
    """Compare every id with the library's decoder, which writes U+FFFD for bytes that are not a complete character."""
    escaped = []
    for i, piece in enumerate(byte_pairs.pieces(range(byte_pairs.vocab_size))):
        (text,) = byte_pairs.decode([[i]])
        if i in SPECIAL_IDS:
            assert piece == SPECIAL_TOKENS[i]
        elif "\ufffd" not in text and text.isprintable():
            assert piece == text.replace(" ", "\u2581")
        else:
            escaped.append(piece)
    assert len(set(escaped)) == len(escaped) >= 128 + 33
    assert {"\\n", "\\x00", "\\xc3", "\\xff"} <= set(escaped)
    assert all(piece.replace("\u2581", "").isascii() and piece.isprintable() for piece in escaped)
    assert byte_pairs.pieces([10_000]) == ["<10000>"]
    words = train_tokenizer("word", ["a\u202eb \u00fc"], 9, 1)
    assert words.pieces(words.encode(["a\u202eb \u00fc x"])[0]) == ["a\\u202eb", "\u00fc", "<unk>"]


@examples(200)
@given(st.lists(st.text(), max_size=4))
@example(["", " ", "  a  b ", "<pad>", "x</s>y <s><unk>", "\0", "\u00a0\u2028\u3000\ufeff", "\r\t\x85"])
@example(["e\u0301é", "👩‍👩‍👧 🇩🇪"])
def test_byte_pairs_round_trip_any_text(byte_pairs, texts):
    rows = byte_pairs.encode(texts)
    assert byte_pairs.decode(rows) == texts
    assert not SPECIAL_IDS & {i for row in rows for i in row}


def test_special_and_unknown_ids_give_no_text(byte_pairs):
    (row,) = byte_pairs.encode(["the cat"])
    assert byte_pairs.decode([[1, *row, 2, 0, 0, 3, 5000]]) == ["the cat"]
    assert byte_pairs.tokens([5000]) == ["<5000>"]
    words = train_tokenizer("word", ["a b"], 10, 1)
    assert words.decode([[1, 4, 3, 5, 2, 0, 77]]) == ["a <unk> b"]  # an unknown word is still a word
    assert words.tokens([2, 5, 77]) == ["</s>", "b", "<77>"]


def test_word_tokenizer_sorts_by_frequency():
    words = train_tokenizer("word", ["b a  c\u00a0a", "b"], vocab_size=100, min_frequency=1)
    assert words.tokens(range(words.vocab_size)) == [*SPECIAL_TOKENS, "a", "b", "c"]  # by frequency, then alphabet
    assert words.decode(words.encode([" b\tc  a\u2003x "])) == ["b c a <unk>"]


def test_rare_words_become_unknown_and_are_logged(caplog):
    with caplog.at_level(logging.INFO):
        words = train_tokenizer("pretokenized", ["a a a b b c d"], vocab_size=6, min_frequency=1)
    assert words.encode(["a b c d"]) == [[4, 5, 3, 3]]
    assert "2 of 4 different words kept" in caplog.text
    assert "71.43 % of the text" in caplog.text
    assert train_tokenizer("word", ["a a b"], 100, min_frequency=2).encode(["a b"]) == [[4, 3]]


@pytest.mark.parametrize("kind", ["word", "pretokenized"])
def test_special_token_in_text_is_an_unknown_word(kind):
    words = train_tokenizer(kind, ["<s> a b"], vocab_size=100, min_frequency=1)
    row = words.encode(["<pad> a <s> </s> <unk>"])[0]
    assert row[0] == row[3] == row[4] == UNK_ID
    assert row[2] not in (0, 1, 2)


def test_pretokenized_text_is_joined():
    line = "wal@@ king\u00a0dogs @@ a@@b @-@ x@@"
    pieces = train_tokenizer("pretokenized", [line], vocab_size=100, min_frequency=1)
    assert pieces.encode(["wal@@  king\u00a0dogs"]) == pieces.encode(["wal@@ king\u00a0dogs"])
    assert pieces.decode(pieces.encode([line])) == ["walking\u00a0dogs a@@b @-@ x"]


def test_kind_of_format_1_is_still_read():
    pieces = train_tokenizer("pretokenized", ["wal@@ king dogs"], vocab_size=100, min_frequency=1)
    text = json.dumps(json.loads(pieces.to_json()) | {"kind": "presegmented"})
    assert tokenizer_from_json(text, "joint.json") == pieces


@pytest.mark.parametrize("kind", ["bpe", "word", "pretokenized"])
def test_tokenizer_training_is_deterministic(kind):
    first, second = (train_tokenizer(kind, iter(TEXTS), 280, 1).to_json() for _ in range(2))
    assert first == second


def test_vocabulary_smaller_than_the_bytes_is_rejected():
    with pytest.raises(UserError, match=r"model.vocab_size is 259; byte pairs need at least 260"):
        train_tokenizer("bpe", TEXTS, 259, 1)


@pytest.mark.parametrize("kind", ["bpe", "word", "pretokenized"])
@pytest.mark.parametrize("joint", [True, False])
def test_save_and_load(tmp_path, kind, joint):
    model = ModelConfig(vocab_size=300, source_vocab_size=None if joint else 290, tie_embeddings="none")
    config = Config(model=model, tokenizer=TokenizerConfig(kind=kind, joint=joint))
    pair = train_tokenizers(config, Pairs(TEXTS, TEXTS[::-1], "here"))
    assert pair.joint == joint
    pair.check_fits(model)
    folder = tmp_path / "run" / "tokenizer"
    for _ in range(2):  # over an older one, too
        pair.save(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["tokenizer"]
    loaded = TokenizerPair.load(folder)
    assert loaded.joint == joint
    assert loaded == pair
    assert loaded.source.encode(TEXTS) == pair.source.encode(TEXTS)


def test_damaged_and_missing_tokenizer_folders_are_rejected(tmp_path):
    with pytest.raises(UserError, match=r"source.json: cannot be read: No such file"):
        TokenizerPair.load(tmp_path)
    for content, message in (
        ("{", "not a tokenizer: JSONDecodeError"),
        ('{"kind": "bpe", "library": {}}', "not a tokenizer"),
        (json.dumps({"kind": "other"}), "unknown kind 'other'; legal: bpe"),
    ):
        (tmp_path / "joint.json").write_text(content)
        with pytest.raises(UserError, match=rf"joint\.json: {message}"):
            TokenizerPair.load(tmp_path)


@pytest.mark.parametrize("unk_id", [5, 99])
def test_unknown_word_without_a_row_is_rejected(unk_id):
    """Check that the id of unknown words has a row, even if the vocabulary has no entry for it."""
    tree = {"kind": "word", "vocabulary": [*SPECIAL_TOKENS, "a"], "special": [0, 1, 2, unk_id]}
    tokenizer = tokenizer_from_json(json.dumps(tree), "FILE")
    pair, model = TokenizerPair(tokenizer, tokenizer), ModelConfig(vocab_size=unk_id + 1, unk_id=unk_id)
    pair.check_fits(model)
    assert tokenizer.encode(["a b"]) == [[4, unk_id]]
    small_target = dataclasses.replace(model, vocab_size=5, source_vocab_size=unk_id + 1, tie_embeddings="none")
    with pytest.raises(UserError, match=f"target tokenizer has {unk_id + 1} entries and the model's table 5 rows"):
        pair.check_fits(small_target)
    with pytest.raises(UserError, match="target tokenizer has"):
        encode_pairs(Pairs(["a"], ["b"], "here"), pair, small_target)


def test_tokenizer_that_does_not_fit_the_model_is_rejected(byte_pairs):
    pair = TokenizerPair(byte_pairs, byte_pairs)
    size = byte_pairs.vocab_size
    pair.check_fits(ModelConfig(vocab_size=size))
    with pytest.raises(UserError, match=rf"source tokenizer has {size} entries and the model's table {size - 1} rows"):
        pair.check_fits(ModelConfig(vocab_size=size - 1))
    with pytest.raises(UserError, match=r"target tokenizer.*set model.vocab_size to at least"):
        pair.check_fits(ModelConfig(vocab_size=size - 1, source_vocab_size=size, tie_embeddings="none"))
    with pytest.raises(UserError, match=r"model.bos_id is 5, but the source tokenizer's is 1"):
        pair.check_fits(ModelConfig(vocab_size=size, bos_id=5))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocabulary": "abcd"},
        {"vocabulary": [1, 2]},
        *({"special": ids} for ids in (["0", 1, 2, 3], [0, 1, 2], [0, 1, None, 3])),
    ],
)
def test_vocabulary_of_wrong_type_is_rejected(changes):
    text = json.dumps({"kind": "word", "vocabulary": ["<pad>", "<s>", "</s>", "<unk>", "a"]} | changes)
    with pytest.raises(UserError, match="FILE: not a tokenizer"):
        tokenizer_from_json(text, "FILE")
