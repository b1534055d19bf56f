"""Grain gives batch i as the plan says it, wherever one starts and however many processes share it."""

import itertools

import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.data.batching import BatchPlan, choose_shapes, make_batch
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.data.loader import batch_iterator
from transformer_jax.data.packing import PackedPlan
from transformer_jax.types import RowParts

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
    """Those that the batch has: three or, if it is packed, five."""
    return [array for array in batch if array is not None]


def same(first, second):
    return all(np.array_equal(x, y) for a, b in zip(first, second, strict=True) for x, y in zip(a, b, strict=True))


def test_batches_are_those_of_the_plan_over_epochs(encoded, plan):
    stop = 2 * plan.batches_per_epoch + 3
    expected = [make_batch(encoded, plan.rows(index), MODEL) for index in range(stop)]
    assert same(list(batch_iterator(encoded, plan, MODEL, 0, stop, prefetch=4)), expected)


def test_a_batch_does_not_depend_on_where_one_starts(encoded, plan):
    stop = plan.batches_per_epoch + 5
    whole = list(batch_iterator(encoded, plan, MODEL, 0, stop))
    for start in (1, plan.batches_per_epoch - 1, stop - 1):
        part = list(batch_iterator(encoded, plan, MODEL, start, stop, prefetch=1))
        assert same(part, whole[start:])
    assert list(batch_iterator(encoded, plan, MODEL, stop, stop)) == []


def test_processes_share_the_rows(encoded, plan):
    whole = list(batch_iterator(encoded, plan, MODEL, 0, 20, row_multiple=4))
    assert all(len(batch.src) % 4 == 0 for batch in whole)
    for one, other in (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2, 3), ())):  # of four parts
        halves = [
            list(batch_iterator(encoded, plan, MODEL, 0, 20, row_multiple=4, parts=RowParts(mine, 4)))
            for mine in (one, other)
        ]
        places = [part for mine in (one, other) for part in mine]
        for batch, *pair in zip(whole, *halves, strict=True):
            for x, *found in zip(arrays(batch), *map(arrays, pair), strict=True):
                assert np.array_equal(np.concatenate(found), np.concatenate([np.split(x, 4)[i] for i in places]))
    # A number of devices that does not divide the rows adds empty rows and changes nothing else.
    alone = batch_iterator(encoded, plan, MODEL, 0, 20)
    for one, more in zip(alone, whole, strict=True):
        rows = len(one.src)
        for x, y in zip(arrays(one), arrays(more), strict=True):
            assert np.array_equal(x, y[:rows])
            assert not y[rows:].any()
    with pytest.raises(ValueError, match="row_multiple 3 is not a multiple of the 2 parts"):
        batch_iterator(encoded, plan, MODEL, 0, 20, row_multiple=3, parts=RowParts((0,), 2))


def test_stopping_early_is_clean(encoded, plan):
    batches = batch_iterator(encoded, plan, MODEL, 0, 1_000_000, prefetch=8)
    assert len(list(itertools.islice(batches, 3))) == 3
