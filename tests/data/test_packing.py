"""Packed plans have every pair once per epoch and little padding; packed batches by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lengths_cases import caption_lengths, corpus, lengths, random_lengths
from tiers import examples

from transformer_jax.config import ModelConfig
from transformer_jax.data.batching import Rows, Shape, make_batch
from transformer_jax.data.packing import PackedPlan, pack

MODEL = ModelConfig(vocab_size=100)


def rows_of(plan, index):
    """Return the pairs of each row of a batch."""
    _, pairs, in_row = plan.rows(index)
    return np.split(pairs, np.cumsum(in_row)[:-1])


@examples(100)
@given(lengths, st.integers(40, 90), st.integers(90, 900), st.integers(0, 5), st.data())
def test_an_epoch_has_every_pair_once_and_every_row_fits(sides, length, batch_tokens, seed, data):
    plan = PackedPlan(*sides, length, batch_tokens, seed)
    (shape,) = plan.shapes
    assert shape[1:] == (length, length)
    assert length <= shape.rows * length <= batch_tokens
    number = plan.batches_per_epoch
    batches = [rows_of(plan, index) for index in range(2 * number)]
    for epoch in (batches[:number], batches[number:]):
        assert sorted(int(pair) for batch in epoch for row in batch for pair in row) == list(range(len(sides[0])))
        assert sum(shape.rows - len(batch) for batch in epoch) < number
        for row in (row for batch in epoch for row in batch):
            assert len(row)
            assert all(side[row].sum() <= length for side in sides)
    start = data.draw(st.integers(0, 2 * number - 1))  # from any step, also backwards
    fresh = PackedPlan(*sides, length, batch_tokens, seed)
    again = [rows_of(fresh, index) for index in reversed(range(start, 2 * number))][::-1]
    assert [[row.tolist() for row in batch] for batch in again] == [
        [row.tolist() for row in batch] for batch in batches[start:]
    ]


@examples(50)
@given(lengths, st.integers(40, 90))
def test_no_two_rows_of_a_small_corpus_fit_into_one_row(sides, length):
    """While all rows are open, a new row is opened only for a pair that fits into none of them."""
    pairs, ends = pack(*sides, length, np.random.default_rng(0))
    if len(ends) > 32:
        return
    sums = np.array([[side[row].sum() for side in sides] for row in np.split(pairs, ends[:-1])])
    for i in range(len(sums)):
        others = np.delete(sums, i, axis=0) + sums[i]
        assert (others.max(axis=1) > length).all()


def test_order_depends_on_seed_and_epoch():
    sides = caption_lengths(3000)
    plan, other = (PackedPlan(*sides, 128, 1024, seed) for seed in (3, 4))
    number = plan.batches_per_epoch

    def company(plan, epoch):
        rows = [row for index in range(epoch * number, (epoch + 1) * number) for row in rows_of(plan, index)]
        return {frozenset(row.tolist()) for row in rows}

    # The other pairs in a row change too, not only the order of the rows.
    assert len(company(plan, 0) & company(plan, 1)) < 0.01 * 3000
    assert len(company(plan, 0) & company(other, 0)) < 0.01 * 3000
    # Pairs are not sorted: batches differ in length as little as random samples of the pairs.
    means = [np.mean(sides[0][plan.rows(index).pairs]) for index in range(number - 1)]
    assert np.std(means) < 2 * sides[0].std() / np.sqrt(3000 / number)
    limit = math.lgamma(3001) / math.log(2)  # log2(3000!)
    assert 0.35 * limit < plan.order_bits < limit


@pytest.mark.parametrize(
    ("sides", "length", "limit"),
    [(caption_lengths(), 128, 0.06), (caption_lengths(), 256, 0.04), (random_lengths(60_000), 256, 0.06)],
)
@pytest.mark.parametrize("batch_tokens", [4096, 25_000])
def test_padding_is_small(sides, length, limit, batch_tokens):
    plan = PackedPlan(*sides, length, batch_tokens, 0)
    # No row holds more than its longer side, so this share is the minimum for any packing.
    needed = 1 - (sides[0].sum() + sides[1].sum()) / (2 * max(side.sum() for side in sides))
    assert needed < plan.padding_share <= limit
    positions = 2 * plan.shapes[0].rows * length * plan.batches_per_epoch
    assert plan.padding_share == pytest.approx(1 - (sides[0].sum() + sides[1].sum()) / positions)


def test_rows_for_eight_devices():
    sides = random_lengths(30_000)
    assert PackedPlan(*sides, 256, 25_000, 0).shapes[0].rows == 95  # of length 96, not 97
    assert PackedPlan(*sides, 256, 1800, 0).shapes[0].rows == 7


def test_batch_by_hand():
    encoded = corpus([[10, 11], [12], []], [[20], [21, 22], []])
    batch = make_batch(encoded, Rows(Shape(2, 6, 6), np.array([1, 0, 2]), np.array([2, 1])), MODEL, 3)
    assert batch.src.tolist() == [[12, 2, 10, 11, 2, 0], [2, 0, 0, 0, 0, 0], [0] * 6]
    assert batch.src_segments.tolist() == [[1, 1, 2, 2, 2, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert batch.tgt_in.tolist() == [[1, 21, 22, 1, 20, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert batch.tgt_out.tolist() == [[21, 22, 2, 20, 2, 0], [2, 0, 0, 0, 0, 0], [0] * 6]
    assert batch.tgt_segments.tolist() == [[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0], [0] * 6]
    assert {array.dtype for array in batch} == {np.dtype(np.int32)}


def test_special_ids_come_from_the_model():
    model = replace(MODEL, pad_id=99, eos_id=0, bos_id=98, decoder_start="eos", source_eos=False)
    encoded = corpus([[10, 11], [12]], [[20], [21, 22]], source_eos=False)
    batch = make_batch(encoded, Rows(Shape(1, 3, 6), np.array([0, 1]), np.array([2])), model)
    assert batch.src.tolist() == [[10, 11, 12]]
    assert batch.src_segments.tolist() == [[1, 1, 2]]
    assert batch.tgt_in.tolist() == [[0, 20, 0, 21, 22, 99]]
    assert batch.tgt_out.tolist() == [[20, 0, 21, 22, 0, 99]]


@examples(30)
@given(st.integers(0, 1000))
def test_every_sentence_is_complete_in_a_batch(seed):
    rng = np.random.default_rng(seed)
    sides = [[rng.integers(4, 100, n).tolist() for n in rng.integers(0, 12, 40)] for _ in range(2)]
    encoded = corpus(*sides)
    plan = PackedPlan(encoded.source_lengths, encoded.target_lengths, 24, 100, seed)
    found = []
    for index in range(plan.batches_per_epoch):
        src, tgt_in, tgt_out, src_segments, tgt_segments = make_batch(encoded, plan.rows(index), MODEL, row_multiple=3)
        assert len(src) % 3 == 0
        for row in range(len(src)):
            for segment in range(1, src_segments[row].max() + 1):
                source = src[row][src_segments[row] == segment].tolist()
                read, target = (side[row][tgt_segments[row] == segment].tolist() for side in (tgt_in, tgt_out))
                assert (source[-1], read[0], target[-1]) == (2, 1, 2)
                assert read[1:] == target[:-1]
                found.append((source[:-1], target[:-1]))
    assert sorted(found) == sorted(zip(*sides, strict=True))
