"""Check the corpus of the copy task."""

import dataclasses
from pathlib import Path

from transformer_jax.config import DataConfig
from transformer_jax.data.batching import BatchPlan, choose_shapes
from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import encode_pairs
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.presets import load_recipe

RECIPE = str(Path(__file__).resolve().parents[2] / "configs" / "copy_task.py")
SMALL = DataConfig(source="copy", synthetic_train_size=3_000, synthetic_valid_size=100, synthetic_test_size=50)


def test_copy_task_rows_have_ten_symbols():
    rows = []
    for split, size in (("train", 3_000), ("valid", 100), ("test", 50)):
        pairs = read_split(SMALL, split)
        assert len(pairs) == size
        assert list(pairs.source) == list(pairs.target)
        rows += [line.split() for line in pairs.source]
    assert {len(row) for row in rows} == {10}
    assert {symbol for row in rows for symbol in row} == {str(number) for number in range(1, 11)}
    assert len(set(map(tuple, rows))) == len(rows), "the splits are disjoint"
    counts = [sum(row[place] == "7" for row in rows) / len(rows) for place in range(10)]
    assert all(0.08 < count < 0.12 for count in counts), "each symbol is equally probable at each position"


def test_copy_task_test_rows_are_independent_of_other_sizes():
    other = dataclasses.replace(SMALL, synthetic_train_size=10, synthetic_valid_size=0)
    assert list(read_split(other, "test").source) == list(read_split(SMALL, "test").source)
    assert read_split(other, "valid") is None


def test_copy_task_batch_has_eighty_rows():
    config = load_recipe(RECIPE)
    train = read_split(dataclasses.replace(config.data, synthetic_train_size=800), "train")
    tokenizers = train_tokenizers(config, train)
    assert tokenizers.source.vocab_size == config.model.vocab_size
    encoded = encode_pairs(train, tokenizers, config.model, config.data)
    lengths = encoded.source_lengths, encoded.target_lengths
    plan = BatchPlan(*lengths, choose_shapes(*lengths, config.data.batch_tokens, config.data.max_shapes), seed=0)
    assert plan.batches_per_epoch == 10
    assert len(plan.rows(0).pairs) == 80
