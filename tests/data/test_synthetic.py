"""Check the corpora of spelled-out numbers and of the copy task: correct, disjoint splits, reproducible."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from num2words import num2words

from transformer_jax.config import DataConfig
from transformer_jax.data.batching import BatchPlan, choose_shapes
from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import encode_pairs
from transformer_jax.data.synthetic import LIMIT, spell_numbers
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.presets import load_recipe
from transformer_jax.types import UserError


@pytest.mark.parametrize("language", ["en", "de"])
def test_spelling_equals_num2words(language):
    edges = [0, 1, 99, 100, 101, 999, 1000, 1001, 1099, 1100, 1101, 21_000, 100_000, 100_001, 999_999]
    values = edges + np.random.default_rng(0).integers(0, LIMIT, 1000).tolist()
    assert spell_numbers(values, language) == [num2words(value, lang=language) for value in values]


def read(*splits, **fields):
    return [read_split(DataConfig(**fields), split) for split in splits]


def test_number_splits_are_disjoint():
    splits = read("train", "valid", "test")
    assert [len(pairs) for pairs in splits] == [40_000, 500, 2_000]
    assert len(splits[0]) <= 0.05 * LIMIT
    for side in ("source", "target"):
        lines = [line for pairs in splits for line in getattr(pairs, side)]
        assert len(set(lines)) == len(lines)


def test_held_out_numbers_are_independent_of_the_training_size():
    small, *held_out = read("train", "valid", "test", synthetic_train_size=10)
    large, *others = read("train", "valid", "test", synthetic_train_size=1000)
    assert held_out == others
    assert small.source == large.source[:10]


def test_directions_and_empty_splits():
    forth, empty = read("train", "valid", synthetic_train_size=10, synthetic_valid_size=0)
    (back,) = read("train", synthetic_train_size=10, synthetic_valid_size=0, source_language="de", target_language="en")
    assert empty is None
    assert forth.source == back.target
    with pytest.raises(UserError, match=r"source_language is 'fr'.*legal: en, de"):
        read("train", source_language="fr")


def test_copy_task_rows_have_ten_symbols():
    rows = []
    sizes = {"train": 3_000, "valid": 100, "test": 50}
    fields = {"source": "copy"} | {f"synthetic_{split}_size": size for split, size in sizes.items()}
    splits = read(*sizes, **fields)
    for pairs, size in zip(splits, sizes.values(), strict=True):
        assert len(pairs) == size
        assert pairs.source == pairs.target
        rows += [line.split() for line in pairs.source]
    assert {len(row) for row in rows} == {10}
    assert {symbol for row in rows for symbol in row} == {str(number) for number in range(1, 11)}
    assert len(set(map(tuple, rows))) == len(rows), "the splits are disjoint"
    counts = [sum(row[place] == "7" for row in rows) / len(rows) for place in range(10)]
    assert all(0.08 < count < 0.12 for count in counts), "each symbol is equally probable at each position"
    fewer = fields | {"synthetic_train_size": 10, "synthetic_valid_size": 0}
    assert read("test", "valid", **fewer) == [splits[2], None], "test rows are independent of the other sizes"


def test_copy_task_batch_has_eighty_rows():
    config = load_recipe(str(Path(__file__).resolve().parents[2] / "configs" / "copy_task.py"))
    train = read_split(replace(config.data, synthetic_train_size=800), "train")
    tokenizers = train_tokenizers(config, train)
    assert tokenizers.source.vocab_size == config.model.vocab_size
    encoded = encode_pairs(train, tokenizers, config.model, config.data)
    lengths = encoded.source_lengths, encoded.target_lengths
    plan = BatchPlan(*lengths, choose_shapes(*lengths, config.data.batch_tokens, config.data.max_shapes), seed=0)
    assert plan.batches_per_epoch == 10
    assert len(plan.rows(0).pairs) == 80
