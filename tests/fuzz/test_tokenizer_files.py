"""Fuzz tokenizers with text, and their files with mutations."""

import json
import random
import time

import pytest
from garbage import PIECES, mutated_bytes, mutated_json, texts
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from transformer_jax.config import Config, ModelConfig, TokenizerConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.subword import SubwordTokenizer
from transformer_jax.data.tokenizer import train_tokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair, tokenizer_from_json, train_tokenizers
from transformer_jax.types import SPECIAL_TOKENS, UserError

CORPUS = ["the red dog", "a dog@@ ged dog", "שלום a\u2028b", *PIECES]
SPECIAL = (0, 1, 2, 3)


def make(kind):
    if kind == "subword_nmt":
        words = [*SPECIAL_TOKENS, "do@@", "g", "dog", "a", "the", "t@@", "\u05e9@@"]
        return SubwordTokenizer([("d", "o"), ("do", "g</w>"), ("t", "h"), ("th", "e</w>")], words, SPECIAL)
    if kind == "huggingface":
        return tokenizer_from_json(json.dumps(json.loads(make("bpe").to_json())["library"]), "tokenizer.json")
    return train_tokenizer(kind, CORPUS, 400, 1)


KINDS = ["bpe", "word", "pretokenized", "subword_nmt", "huggingface"]
TOKENIZERS = {kind: make(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", ["word", "pretokenized", "subword_nmt"])
@examples(150)
@given(text=texts)
def test_word_tokenizers_lose_only_spaces_and_unknown_words(kind, text):
    tokenizer = TOKENIZERS[kind]
    (row,) = tokenizer.encode([text])
    assert all(i >= 3 for i in row)
    (back,) = tokenizer.decode([row])
    if tokenizer.unk_id not in row:
        assert back == tokenizer.plain(text)
    elif kind != "subword_nmt":
        assert len(row) == len(text.split() if kind == "word" else [p for p in text.split(" ") if p])
    assert "\n" not in back


def test_long_word_is_split_in_linear_time():
    """Check that splitting a long word does not take time quadratic in its length."""
    merges = [(one, two) for one in "abcdefgh" for two in "abcdefgh"]
    words = [*SPECIAL_TOKENS, *(f"{one}{two}@@" for one, two in merges), *(f"{one}@@" for one, _ in merges[::8])]
    tokenizer = SubwordTokenizer(merges, words, SPECIAL)
    word = "".join(random.Random(0).choices("abcdefgh", k=200_000)) + "aa"
    start = time.process_time()
    (row,) = tokenizer.encode([word])
    assert time.process_time() - start < 30, "2.5 s at the time of writing, for a megabyte five times as much"
    assert "".join(tokenizer.tokens(row)[:-1]).replace("@@", "") == word[:-1]


TREES = {kind: json.loads(TOKENIZERS[kind].to_json()) for kind in KINDS}


def check(text):
    """Check that a tokenizer file is rejected with a `UserError`, or gives a tokenizer that encodes and decodes."""
    try:
        tokenizer = tokenizer_from_json(text, "file.json")
        rows = tokenizer.encode(CORPUS)
        assert all(i >= 0 for row in rows for i in row)
        assert len(tokenizer.decode([*rows, [-1, 0, tokenizer.vocab_size + 5]])) == len(CORPUS) + 1
        tokenizer.to_json()
    except UserError:
        return


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_json_serves_or_is_rejected(kind):
    @examples(150)
    @given(mutated_json(TREES[kind]))
    def run(tree):
        check(json.dumps(tree))

    run()


@pytest.mark.parametrize("kind", KINDS)
@examples(60)
@given(data=st.data())
def test_mutated_bytes_serve_or_are_rejected(tmp_path, kind, data):
    text = TOKENIZERS[kind].to_json().encode()
    (tmp_path / "joint.json").write_bytes(data.draw(mutated_bytes(text)))
    try:
        TokenizerPair.load(tmp_path).source.encode(CORPUS)
    except UserError:
        return


def test_ids_beyond_the_table_are_rejected():
    """Check that an id without a row is an error, because it would be another row or NaN."""
    tree = json.loads(json.dumps(TREES["bpe"]))
    vocabulary = tree["library"]["model"]["vocab"]
    vocabulary["d"] = 10**6
    with pytest.raises(UserError, match="must be 0 to"):
        tokenizer_from_json(json.dumps(tree), "file.json")
    for special in ([0, 1, 2, 10**9], [0, 1, -2, 3]):
        pair = tokenizer_from_json(json.dumps(TREES["word"] | {"special": special}), "file.json")
        with pytest.raises(UserError, match="tokenizer's is"):
            TokenizerPair(pair, pair).check_fits(ModelConfig(vocab_size=400, d_model=16, num_heads=2))


@pytest.mark.parametrize("kind", ["bpe", "word", "pretokenized"])
@examples(30)
@given(found=st.lists(texts, min_size=1, max_size=5))
def test_tokenizers_train_on_any_text(kind, found):
    model = ModelConfig(vocab_size=300, d_model=16, num_layers=1, num_heads=2, d_ff=32)
    config = Config(model=model, tokenizer=TokenizerConfig(kind=kind))
    tokenizers = train_tokenizers(config, Pairs(found, found, "here"))
    tokenizers.check_fits(model)
    back = tokenizers.source.decode(tokenizers.source.encode(found))
    assert kind == "bpe" or back == [tokenizers.source.plain(text) for text in found]
    assert kind != "bpe" or back == found
