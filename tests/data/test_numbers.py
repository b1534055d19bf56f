"""Check the corpus of spelled-out numbers: correct, disjoint splits, reproducible."""

import numpy as np
import pytest
from num2words import num2words

from transformer_jax.config import DataConfig
from transformer_jax.data.corpus import read_split
from transformer_jax.data.synthetic import LIMIT, spell_numbers
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
