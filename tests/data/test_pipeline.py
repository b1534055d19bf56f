"""`TrainingData` yields batch i of the plan, wherever it starts and however many processes share its rows."""

import itertools

import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.data.batching import BatchPlan, Rows, Shape, choose_shapes, make_batch
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.data.loader import TrainingData
from transformer_jax.data.packing import PackedPlan
from transformer_jax.types import RowParts, UserError

MODEL = ModelConfig(vocab_size=100)


@pytest.fixture(scope="module")
def encoded():
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 50, 400))])
        sides += [rng.integers(4, 100, offsets[-1]).astype(np.uint16), offsets]
    return EncodedPairs(*sides, source_eos=True)


@pytest.fixture(scope="module", params=["bucketed", "packed"])
def plan(encoded, request):
    sides = encoded.source_lengths, encoded.target_lengths
    if request.param == "packed":
        return PackedPlan(*sides, 64, 400, seed=1)
    return BatchPlan(*sides, choose_shapes(*sides, 400, 6), seed=1)


def arrays(batch):
    """Return the arrays of the batch: three or, if it is packed, five."""
    return [array for array in batch if array is not None]


def same(first, second):
    return all(np.array_equal(x, y) for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True))


def test_batches_are_those_of_the_plan_over_epochs(encoded, plan):
    stop = 2 * plan.batches_per_epoch + 3
    expected = [make_batch(encoded, plan.rows(index), MODEL) for index in range(stop)]
    assert same(list(TrainingData(encoded, plan, MODEL, prefetch=4).iterator(0, stop)), expected)


def test_batches_do_not_depend_on_the_first_step(encoded, plan):
    stop = plan.batches_per_epoch + 5
    complete = list(TrainingData(encoded, plan, MODEL).iterator(0, stop))
    for start in (1, plan.batches_per_epoch - 1, stop - 1):
        part = list(TrainingData(encoded, plan, MODEL, prefetch=1).iterator(start, stop))
        assert same(part, complete[start:])
    assert list(TrainingData(encoded, plan, MODEL).iterator(stop, stop)) == []


def test_rows_are_split_between_processes(encoded, plan):
    complete = list(TrainingData(encoded, plan, MODEL, row_multiple=4).iterator(0, 20))
    assert all(len(batch.src) % 4 == 0 for batch in complete)
    for one, other in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3), ())):  # of four parts
        halves = [
            list(TrainingData(encoded, plan, MODEL, row_multiple=4, parts=RowParts(mine, 4)).iterator(0, 20))
            for mine in (one, other)
        ]
        places = [part for mine in (one, other) for part in mine]
        for batch, *pair in zip(complete, *halves, strict=True):
            for x, *found in zip(arrays(batch), *map(arrays, pair), strict=True):
                assert np.array_equal(np.concatenate(found), np.concatenate([np.split(x, 4)[i] for i in places]))
    # A number of devices that does not divide the rows adds empty rows and changes nothing else.
    alone = TrainingData(encoded, plan, MODEL).iterator(0, 20)
    for one, more in zip(alone, complete, strict=True):
        rows = len(one.src)
        for x, y in zip(arrays(one), arrays(more), strict=True):
            assert np.array_equal(x, y[:rows])
            assert not y[rows:].any()
    with pytest.raises(ValueError, match="row_multiple 3 is not a multiple of the 2 parts"):
        TrainingData(encoded, plan, MODEL, row_multiple=3, parts=RowParts((0,), 2))


def test_iteration_may_stop_early(encoded, plan):
    batches = TrainingData(encoded, plan, MODEL, prefetch=8).iterator(0, 1_000_000)
    assert len(list(itertools.islice(batches, 3))) == 3


def test_padding_batches_have_every_shape_of_the_plan_and_no_pair(encoded, plan):
    data = TrainingData(encoded, plan, MODEL, row_multiple=4)
    shapes = {tuple(array.shape for array in arrays(data.batch(index))) for index in range(plan.batches_per_epoch)}
    batches = data.padding_batches()
    assert {tuple(array.shape for array in arrays(batch)) for batch in batches} >= shapes
    assert not any(array.any() for batch in batches for array in arrays(batch))


def test_batch_description_lists_its_pairs(encoded, plan):
    described = TrainingData(encoded, plan, MODEL).describe(3)
    assert [row["pair"] for row in described] == plan.rows(3).pairs.tolist()
    for row in described:
        assert row["source_ids"] == encoded.source(row["pair"]).tolist()
        assert row["target_ids"] == encoded.target(row["pair"]).tolist()


@pytest.mark.parametrize(
    ("side", "vocabulary"), [("source", {"source_vocab_size": 23}), ("target", {"vocab_size": 23})]
)
def test_a_token_id_outside_the_vocabulary_is_rejected(encoded, plan, side, vocabulary):
    """The model would read NaN beyond its embedding table, and report nothing."""
    model = ModelConfig(**{"vocab_size": 100, "source_vocab_size": 100, "tie_embeddings": "none"} | vocabulary)
    with pytest.raises(UserError, match=rf"pair \d+: {side} token id \d\d is outside the vocabulary of 23 rows"):
        list(TrainingData(encoded, plan, model).iterator(0, 2))


def test_a_negative_token_id_is_rejected():
    ids, offsets = np.array([5, -1, 6], np.int32), np.array([0, 1, 3])
    encoded = EncodedPairs(np.array([5, 6, 7]), offsets, ids, offsets, source_eos=True)
    with pytest.raises(UserError, match="pair 1: target token id -1 is outside the vocabulary of 100 rows"):
        make_batch(encoded, Rows(Shape(2, 4, 4), np.array([0, 1])), MODEL)


def test_a_sentence_longer_than_the_learned_position_table_is_rejected(encoded, plan):
    """Positions in a packed row are looked up one by one, and the model would read NaN beyond the table."""
    model = ModelConfig(vocab_size=100, positions="learned", max_length=20, position_offset=2)
    with pytest.raises(UserError, match=r"pair \d+ has \d\d tokens, .* model.max_length=20 rows has space for 18"):
        list(TrainingData(encoded, plan, model).iterator(0, plan.batches_per_epoch))
