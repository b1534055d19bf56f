"""Check the filter and its counts, and that the cache returns equal arrays and is rebuilt when its input changes."""

from dataclasses import replace

import numpy as np
import pytest

from transformer_jax.config import Config, DataConfig, ModelConfig, TokenizerConfig
from transformer_jax.data import encoding
from transformer_jax.data.encoding import encode_pairs, load_cached, load_or_encode
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.types import UserError

CONFIG = Config(
    model=ModelConfig(vocab_size=20),
    data=DataConfig(max_length=6, max_length_ratio=2.0),
    tokenizer=TokenizerConfig(kind="word"),
)
PAIRS = Pairs(
    ["a b", " \u00a0", "a", "a b c d e f", "a b c d e", "a b c", "b"],
    ["a", "a", "", "a b c d e", "a b c d e", "a", "a b c"],
    "here",
)


@pytest.fixture
def tokenizers():
    return train_tokenizers(CONFIG, PAIRS)


def rows(encoded):
    return [(encoded.source(i).tolist(), encoded.target(i).tolist()) for i in range(len(encoded))]


def test_filter_policy(tokenizers):
    encoded = encode_pairs(PAIRS, tokenizers, CONFIG.model, CONFIG.data)
    # With EOS: (3, 2) kept, two empty, (7, 6) too long, (6, 6) kept, (4, 2) kept, (2, 4) kept.
    assert str(encoded.report) == "7 pairs: 4 kept, 2 empty, 1 longer than 6 tokens, 0 of a length ratio above 2"
    assert rows(encoded) == list(
        zip(tokenizers.source.encode(["a b", "a b c d e", "a b c", "b"]),
            tokenizers.target.encode(["a", "a b c d e", "a", "a b c"]), strict=True)
    )  # fmt: skip
    assert encoded.source_lengths.tolist() == [3, 6, 4, 2]
    assert encoded.target_lengths.tolist() == [2, 6, 2, 4]
    assert encoded.source_ids.dtype == np.uint16


def test_length_ratio_counts_both_directions_and_eos(tokenizers):
    keep = replace(CONFIG.data, max_length_ratio=1.9)
    report = encode_pairs(PAIRS, tokenizers, CONFIG.model, keep).report
    assert str(report) == "7 pairs: 2 kept, 2 empty, 1 longer than 6 tokens, 2 of a length ratio above 1.9"
    no_eos = encode_pairs(PAIRS, tokenizers, replace(CONFIG.model, source_eos=False), CONFIG.data)
    assert no_eos.source_lengths.tolist() == [2, 6, 5, 3]  # "a b c d e f" has 6 without EOS; (1, 4) is uneven
    assert no_eos.report.length_ratio == 1


def test_source_bos_counts_as_a_token(tokenizers):
    model = replace(CONFIG.model, source_bos=True)
    encoded = encode_pairs(PAIRS, tokenizers, model, replace(CONFIG.data, max_length_ratio=9.0))
    assert encoded.source_lengths.tolist() == [4, 5, 3]  # "a b c d e" has 7 tokens with BOS and EOS
    assert encoded.report.long == 2


def test_evaluation_drops_no_pair(tokenizers):
    encoded = encode_pairs(PAIRS, tokenizers, CONFIG.model)
    assert len(encoded) == len(PAIRS)
    assert encoded.report is None
    assert encoded.source_lengths.tolist() == [3, 1, 2, 7, 6, 4, 2]


def test_filter_that_keeps_nothing_is_an_error(tokenizers):
    with pytest.raises(UserError, match="here: no pair is left for training: 7 pairs: 0 kept, 2 empty, 5 longer"):
        encode_pairs(PAIRS, tokenizers, CONFIG.model, replace(CONFIG.data, max_length=1))


def test_cache_round_trip(tmp_path, tokenizers, monkeypatch):
    first = load_or_encode(CONFIG, "train", tokenizers, tmp_path, PAIRS)
    assert isinstance(first.source_ids, np.memmap)
    expected = rows(first)  # read now: the mapped file is truncated below
    with monkeypatch.context() as patched:
        patched.setattr(encoding, "encode_pairs", None)
        second = load_or_encode(CONFIG, "train", tokenizers, tmp_path, PAIRS)
    assert rows(second) == expected
    assert second.report == first.report
    assert rows(load_cached(tmp_path, "train", first.sha256(), CONFIG.model)) == expected
    assert load_cached(tmp_path, "valid", first.sha256(), CONFIG.model) is None
    assert load_cached(tmp_path, "train", "0" * 64, CONFIG.model) is None


def test_cache_key_covers_every_input(tmp_path, tokenizers):
    def folders(config=CONFIG, split="train", tokenizers=tokenizers, pairs=PAIRS):
        load_or_encode(config, split, tokenizers, tmp_path, pairs)
        return len(list(tmp_path.iterdir()))

    assert folders() == 1
    assert folders(replace(CONFIG, data=replace(CONFIG.data, batch_tokens=777))) == 1  # not part of the key
    assert folders(replace(CONFIG, data=replace(CONFIG.data, max_length=7))) == 2
    assert folders(replace(CONFIG, model=replace(CONFIG.model, source_eos=False))) == 3
    assert folders(split="valid") == 4
    assert folders(pairs=Pairs([*PAIRS.source[:-1], "c"], PAIRS.target, "here")) == 5
    assert folders(pairs=Pairs(PAIRS.target, PAIRS.source, "here")) == 6
    assert folders(tokenizers=train_tokenizers(CONFIG, Pairs(["a"], ["b"], "there"))) == 7
    assert folders(replace(CONFIG, model=replace(CONFIG.model, source_bos=True))) == 8


def test_side_without_tokens_is_cached(tmp_path, tokenizers):
    pairs = Pairs(["", ""], ["", "a"], "here")
    for _ in range(2):
        encoded = load_or_encode(CONFIG, "test", tokenizers, tmp_path, pairs)
        assert rows(encoded) == [([], []), ([], tokenizers.target.encode(["a"])[0])]


def test_large_vocabulary_uses_32_bits():
    words = [f"w{i:05}" for i in range(70_000)]
    config = replace(CONFIG, model=ModelConfig(vocab_size=80_000))
    pairs = Pairs([" ".join(words[i : i + 100]) for i in range(0, 70_000, 100)], ["x"] * 700, "here")
    encoded = encode_pairs(pairs, train_tokenizers(config, pairs), config.model)
    assert encoded.source_ids.dtype == np.int32
    assert encoded.source_ids.max() == 70_004
