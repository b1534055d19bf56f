"""Bucketed plans have every pair once per epoch, few shapes and little padding; batches of pairs by hand."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths_cases import caption_lengths, corpus, lengths, random_lengths

from transformer_jax.config import Config, DataConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.batching import (
    BatchPlan,
    Rows,
    Shape,
    choose_shapes,
    eval_batches,
    make_batch,
)
from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import encode_pairs
from transformer_jax.data.packing import PackedPlan
from transformer_jax.data.tokenizer_pair import train_tokenizers

MODEL = ModelConfig(vocab_size=100)


@settings(max_examples=150, deadline=None)
@given(lengths, st.integers(40, 300), st.integers(1, 12), st.integers(0, 5))
def test_an_epoch_has_every_pair_once_within_the_budget(sides, batch_tokens, max_shapes, seed):
    shapes = choose_shapes(*sides, batch_tokens, max_shapes)
    assert 1 <= len(shapes) <= max_shapes
    for shorter, longer in itertools.pairwise(shapes):
        assert shorter.src_length <= longer.src_length
        assert shorter.tgt_length <= longer.tgt_length
    plan = BatchPlan(*sides, shapes, seed)
    for epoch in range(2):
        seen = []
        for index in range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch):
            shape, pairs, _ = plan.rows(index)
            assert shape in shapes
            assert max(shape.rows * shape.src_length, shape.rows * shape.tgt_length) <= batch_tokens
            assert 1 <= len(pairs) <= shape.rows
            assert sides[0][pairs].max() <= shape.src_length
            assert sides[1][pairs].max() <= shape.tgt_length
            seen.extend(pairs.tolist())
        assert sorted(seen) == list(range(len(sides[0])))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=30).map(
        lambda pairs: tuple(np.array(pairs).T)
    ),
    st.integers(1, 4),
    st.integers(12, 100),
)
def test_choose_shapes_pads_as_little_as_brute_force(sides, max_shapes, batch_tokens):
    """Try all divisions of the pairs, ordered by their longer side, into groups of at least half a batch."""
    longer = np.maximum(*sides)

    def positions(tops):
        total, done = 0, np.zeros(len(longer), bool)
        for top in tops:
            group = longer <= top
            number = (group & ~done).sum()
            if number < min(batch_tokens // top, len(longer)) / 2:
                return float("inf")
            total += int(number * (sides[0][group].max() + sides[1][group].max()))
            done = group
        return total

    keys = np.unique(longer).tolist()
    best = min(
        positions([*cut, keys[-1]])
        for number in range(min(max_shapes, len(keys)))
        for cut in itertools.combinations(keys[:-1], number)
    )
    shapes = choose_shapes(*sides, batch_tokens, max_shapes)
    assert positions([max(shape.src_length, shape.tgt_length) for shape in shapes]) == best


def test_order_is_a_pure_function_of_seed_and_number():
    sides = random_lengths(2000)
    shapes = choose_shapes(*sides, 2000, 12)
    plan = BatchPlan(*sides, shapes, seed=3)
    number = plan.batches_per_epoch
    first = [plan.rows(i).pairs.tolist() for i in range(2 * number)]
    fresh = BatchPlan(*sides, shapes, seed=3)
    assert [fresh.rows(i).pairs.tolist() for i in reversed(range(2 * number))] == first[::-1]
    other = BatchPlan(*sides, shapes, seed=4)
    assert [other.rows(i).pairs.tolist() for i in range(number)] != first[:number]
    assert sorted(first[:number]) != sorted(first[number:])  # another epoch has other batches, not only another order
    assert [plan.rows(i).shape for i in range(number)] != sorted(plan.rows(i).shape for i in range(number))


# Captions are short and similar. News of 2 to 256 tokens has 6 % because the sides of a pair differ, and 10 % because
# shapes are few (shapes that are free on both sides save 0.7 %).
@pytest.mark.parametrize("batch_tokens", [4096, 8192, 25_000])
@pytest.mark.parametrize(("sides", "limit"), [(caption_lengths(), 0.1), (random_lengths(60_000), 0.165)])
def test_padding_is_small(sides, limit, batch_tokens):
    shapes = choose_shapes(*sides, batch_tokens, 12)
    plan = BatchPlan(*sides, shapes, seed=0)
    share = plan.padding_share
    assert share <= limit
    assert len(shapes) <= 12
    made = [plan.rows(i) for i in range(plan.batches_per_epoch)]
    positions = sum(shape.rows * (shape.src_length + shape.tgt_length) for shape, _, _ in made)
    assert share == pytest.approx(1 - (sides[0].sum() + sides[1].sum()) / positions)
    assert sum(shape.rows - len(pairs) for shape, pairs, _ in made) <= len(made)
    assert min(shape.rows * max(shape.src_length, shape.tgt_length) for shape in shapes) > 0.4 * batch_tokens


@pytest.mark.parametrize(
    ("plan", "batches", "orders"),
    [
        # Two shapes, each with 3! orders of its pairs, and 3! orders of the batches.
        (BatchPlan(*2 * [np.array([2, 2, 2, 9, 9, 9])], [Shape(3, 2, 2), Shape(2, 9, 9)], 0), 3, 6 * 6 * 6),
        # 4! orders of the pairs in two rows, which have 2! orders.
        (PackedPlan(np.full(4, 5), np.full(4, 3), 10, 10, 0), 2, 24 * 2),
    ],
)
def test_entropy_of_the_order_by_hand(plan, batches, orders):
    assert plan.batches_per_epoch == batches
    assert plan.order_bits == pytest.approx(np.log2(orders))


def test_order_is_random():
    """The entropy is close to that of a random permutation, and consecutive shapes are independent."""
    sides = caption_lengths()
    plan = BatchPlan(*sides, choose_shapes(*sides, 4096, 12), seed=0)
    limit = math.lgamma(29_001) / math.log(2)  # log2(29,000!)
    assert limit == pytest.approx(29_000 * np.log2(29_000 / np.e), rel=1e-4)  # Stirling
    assert 0.7 * limit < plan.order_bits < limit
    shapes = [plan.rows(i).shape for i in range(20 * plan.batches_per_epoch)]
    shares = np.unique([shapes.index(shape) for shape in shapes], return_counts=True)[1] / len(shapes)
    repeated = np.mean([one == other for one, other in itertools.pairwise(shapes)])
    assert repeated == pytest.approx((shares**2).sum(), abs=0.02)


def test_a_large_corpus_and_very_long_pairs():
    source, target = random_lengths(200_000)
    source[7], target[9] = 30_000, 20_000
    shapes = choose_shapes(source, target, 25_000, 12)
    assert shapes[-1] == Shape(1, 30_000, 20_000)
    plan = BatchPlan(source, target, shapes, 0)
    assert sum(len(plan.rows(i).pairs) for i in range(plan.batches_per_epoch)) == 200_000


def test_pair_that_fits_no_batch_is_rejected():
    sides = np.array([2, 2]), np.array([2, 9])
    with pytest.raises(ValueError, match="pair 1 of 2 and 9 tokens fits no shape"):
        BatchPlan(*sides, [Shape(1, 4, 4)], 0)
    with pytest.raises(ValueError, match="pair 1 of 2 and 9 tokens fits no row of 8"):
        PackedPlan(*sides, 8, 80, 0)


def test_batch_by_hand():
    encoded = corpus([[10, 11], [12], []], [[20], [21, 22], []])
    batch = make_batch(encoded, Rows(Shape(4, 4, 3), np.array([1, 0, 2])), MODEL, row_multiple=3)
    assert batch.src.tolist() == [[12, 2, 0, 0], [10, 11, 2, 0], [2, 0, 0, 0], [0] * 4, [0] * 4, [0] * 4]
    assert batch.tgt_in.tolist() == [[1, 21, 22], [1, 20, 0], [1, 0, 0], [0] * 3, [0] * 3, [0] * 3]
    assert batch.tgt_out.tolist() == [[21, 22, 2], [20, 2, 0], [2, 0, 0], [0] * 3, [0] * 3, [0] * 3]
    assert {array.dtype for array in batch[:3]} == {np.dtype(np.int32)}
    assert batch.src_segments is None
    assert batch.tgt_segments is None


def test_special_ids_come_from_the_model():
    model = replace(MODEL, pad_id=99, eos_id=0, bos_id=98, decoder_start="eos", source_eos=False)
    encoded = corpus([[10, 11], [12]], [[20], [21, 22]], source_eos=False)
    batch = make_batch(encoded, Rows(Shape(2, 2, 3), np.array([0, 1])), model)
    assert batch.src.tolist() == [[10, 11], [12, 99]]
    assert batch.tgt_in.tolist() == [[0, 20, 99], [0, 21, 22]]
    assert batch.tgt_out.tolist() == [[20, 0, 99], [21, 22, 0]]


@pytest.mark.parametrize("source_eos", [True, False])
def test_source_bos_batch_equals_ids_by_hand(source_eos):
    model = replace(MODEL, source_bos=True, source_eos=source_eos)
    sources = [[10, 11], [12, 13, 14], [], [15]]
    encoded = corpus(sources, [[20]] * 4, source_eos, source_bos=True)
    by_hand = [[model.bos_id, *ids, *[model.eos_id] * source_eos] for ids in sources]
    assert encoded.source_lengths.tolist() == [len(ids) for ids in by_hand]
    order = [1, 3, 0, 2]
    batch = make_batch(encoded, Rows(Shape(4, 5, 2), np.array(order)), model)
    assert batch.src.tolist() == [by_hand[i] + [0] * (5 - len(by_hand[i])) for i in order]
    packed = make_batch(encoded, Rows(Shape(2, 9, 4), np.array(order), np.array([2, 2])), model)
    rows = [by_hand[1] + by_hand[3], by_hand[0] + by_hand[2]]
    assert packed.src.tolist() == [row + [0] * (9 - len(row)) for row in rows]
    segments = [[1] * len(by_hand[i]) + [2] * len(by_hand[j]) for i, j in ((1, 3), (0, 2))]
    assert packed.src_segments.tolist() == [row + [0] * (9 - len(row)) for row in segments]


@pytest.mark.parametrize("row_multiple", [1, 8])
def test_evaluation_has_every_pair_once_in_few_shapes(row_multiple):
    rng = np.random.default_rng(1)
    sides = [[rng.integers(4, 100, n).tolist() for n in rng.integers(0, 60, 300)] for _ in range(2)]
    encoded = corpus(*sides)
    ladder = (Shape(40, 10, 10), Shape(20, 20, 20), Shape(10, 40, 38))
    batches = list(eval_batches(encoded, ladder, 400, MODEL, row_multiple))
    again = list(eval_batches(encoded, ladder, 400, MODEL, row_multiple))
    for one, other in zip(batches, again, strict=True):
        assert all(map(np.array_equal, one[:3], other[:3]))
    shapes = {batch.src.shape + batch.tgt_in.shape[1:] for batch in batches}
    assert len(shapes) <= 4
    assert all(rows % row_multiple == 0 for rows, _, _ in shapes)
    found = [
        ([i for i in src if i][:-1], [i for i in tgt if i][:-1])
        for batch in batches
        for src, tgt in zip(batch.src.tolist(), batch.tgt_out.tolist(), strict=True)
        if any(tgt)
    ]
    assert sorted(found) == sorted(zip(*sides, strict=True))


@pytest.mark.parametrize(
    ("folder", "kind", "vocab_size"), [("bpe10k-en-de", "pretokenized", 12_000), ("raw", "bpe", 8_000)]
)
def test_real_text(folder, kind, vocab_size, data_folder):
    directory = data_folder / "multi30k" / folder
    config = Config(
        model=ModelConfig(vocab_size=vocab_size),
        data=DataConfig(source="text", directory=str(directory)),
        tokenizer=TokenizerConfig(kind=kind),
    )
    pairs = read_split(config.data, "train")
    tokenizers = train_tokenizers(config, pairs)
    tokenizers.check_fits(config.model)
    encoded = encode_pairs(pairs, tokenizers, config.model, config.data)
    assert encoded.report.kept == 29_000
    lines = pairs.target[:1000]
    plain = [line.replace("@@ ", "") for line in lines] if kind == "pretokenized" else lines
    assert tokenizers.target.decode(tokenizers.target.encode(lines)) == plain
    sides = encoded.source_lengths, encoded.target_lengths
    for batch_tokens in (4096, 8192, 25_000):
        plan = BatchPlan(*sides, choose_shapes(*sides, batch_tokens, 12), seed=0)
        packed = PackedPlan(*sides, 256, batch_tokens, seed=0)
        assert plan.padding_share <= 0.1
        assert packed.padding_share <= 0.04
