"""Batches of a few static shapes within a token budget (paper section 5.1), in an order that is a pure function.

XLA compiles once per shape, so pairs of similar length share one of a short ladder of shapes: each is at least as long
as the previous one on both sides, and a pair goes to the first that it fits. `packing` is the alternative.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.types import ALL_ROWS, Batch, RowParts, UserError

_MAX_LENGTHS = 512  # distinct lengths in choose_shapes, whose time and memory grow with their square


class Shape(NamedTuple):
    """The static shape of a batch: `src` is (rows, src_length), `tgt_in` and `tgt_out` are (rows, tgt_length)."""

    rows: int
    src_length: int
    tgt_length: int


def choose_shapes(
    source_lengths: np.ndarray, target_lengths: np.ndarray, batch_tokens: int, max_shapes: int
) -> tuple[Shape, ...]:
    """Return the ladder of at most `max_shapes` shapes that pads the pairs least, by dynamic programming.

    Pairs are sorted by their longer side and divided into groups, one for each shape. A group that does not fill half a
    batch is made only if it holds all pairs. Rows may be fewer than `batch_tokens` allows, so that a group's batches
    are equally full. Lengths include the BOS and EOS that batches add. A longer pair gets a shape of one row.

    >>> choose_shapes(np.array([3, 3, 3, 9, 8]), np.array([2, 4, 4, 10, 7]), batch_tokens=20, max_shapes=2)
    (Shape(rows=3, src_length=3, tgt_length=4), Shape(rows=2, src_length=9, tgt_length=10))
    """
    longer = np.maximum(source_lengths, target_lengths)
    step = -(-int(longer.max()) // _MAX_LENGTHS)
    keys, group, counts = np.unique(-(-longer // step), return_inverse=True, return_counts=True)
    src, tgt = np.ones(len(keys), np.int64), np.ones(len(keys), np.int64)  # no shape has length 0
    np.maximum.at(src, group, source_lengths)
    np.maximum.at(tgt, group, target_lengths)
    src, tgt = np.maximum.accumulate(src), np.maximum.accumulate(tgt)

    # cost[i, j] is the number of positions if one shape serves the groups i to j. best[j] is the minimum cost of the
    # groups before j.
    before = np.concatenate([[0], np.cumsum(counts)])
    max_rows = np.maximum(1, batch_tokens // np.maximum(src, tgt))
    pairs = before[None, 1:] - before[:-1, None]
    cost = pairs * (src + tgt)[None, :]
    is_small = 2 * pairs < np.minimum(max_rows, len(longer))[None, :]
    cost = np.where(is_small, np.inf, cost)  # is_small includes groups without pairs
    best = np.concatenate([[0.0], np.full(len(keys), np.inf)])
    choices = []
    for _ in range(min(max_shapes, len(keys))):
        total = best[:-1, None] + cost
        choices.append(total.argmin(axis=0))
        best = np.concatenate([[0.0], total.min(axis=0)])
    last, ladder = len(keys), []
    for first in reversed(choices):
        if last == 0:
            break
        start = int(first[last - 1])
        rows = equal_parts(int(before[last] - before[start]), int(max_rows[last - 1]))
        ladder.append(Shape(rows, int(src[last - 1]), int(tgt[last - 1])))
        last = start
    return tuple(reversed(ladder))


class Rows(NamedTuple):
    """The pairs of a batch, row after row, by number. Its last rows may hold no pair."""

    shape: Shape
    pairs: np.ndarray
    in_row: np.ndarray | None = None
    """Number of pairs in each of the first rows of a packed batch. None is one pair per row."""


class Plan(ABC):
    """Which pairs are in which batch: a pure function of (lengths, sizes, seed) and the batch's number. Thread-safe.

    Each epoch has every pair once. A pair changes places at random with pairs of its own group, given for each pair by
    `groups`, and the units, of which batches consist, are shuffled. `counts` has the number of batches of each shape.
    """

    def __init__(
        self, shapes: Sequence[Shape], counts: list[int], num_tokens: int, groups: np.ndarray, num_units: int, seed: int
    ) -> None:
        self.shapes, self.seed = tuple(shapes), seed
        self.batches_per_epoch = sum(counts)
        positions = [shape.rows * (shape.src_length + shape.tgt_length) for shape in shapes]
        self.padding_share = 1 - num_tokens / int(np.dot(counts, positions))  # of both sides' positions
        sizes = [*np.bincount(groups).tolist(), num_units]
        self.order_bits = sum(math.lgamma(size + 1) for size in sizes) / math.log(2)  # entropy of an order, in bits
        self._groups, self._num_units = groups, num_units
        self._lock = threading.Lock()
        # Two epochs, because prefetching threads cross the end of an epoch one at a time.
        self._cached_order = lru_cache(maxsize=2)(self._make_order)

    @abstractmethod
    def rows(self, index: int) -> Rows:
        """Return the pairs of global batch `index`, which counts from 0 over all epochs."""

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `_make_order(epoch)`, which one of the threads that need it computes."""
        with self._lock:
            return self._cached_order(epoch)

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the pairs, sorted by group, and the order of the units."""
        rng = np.random.default_rng([self.seed, epoch])
        mixed = rng.permutation(len(self._groups))
        pairs = mixed[np.argsort(self._groups[mixed], kind="stable")]
        return pairs, rng.permutation(self._num_units)


class BatchPlan(Plan):
    """Batches of pairs of similar length, one pair per row. Groups are the pairs of a shape, and units are batches."""

    def __init__(
        self, source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: Sequence[Shape], seed: int
    ) -> None:
        bucket = _buckets(source_lengths, target_lengths, shapes)
        self._cuts = _cut(bucket, shapes)
        counts = np.bincount([number for number, _ in self._cuts], minlength=len(shapes)).tolist()
        num_tokens = int(source_lengths.sum() + target_lengths.sum())
        super().__init__(shapes, counts, num_tokens, bucket, len(self._cuts), seed)

    def rows(self, index: int) -> Rows:
        """Return the pairs of global batch `index`."""
        epoch, place = divmod(index, self.batches_per_epoch)
        pairs, batches = self._order(epoch)
        number, span = self._cuts[batches[place]]
        return Rows(self.shapes[number], pairs[span])


def make_batch(
    encoded: EncodedPairs, chosen: Rows, model: ModelConfig, row_multiple: int = 1, parts: RowParts = ALL_ROWS
) -> Batch:
    """Return pairs as padded int32 arrays. Rows after the pairs hold only padding.

    The number of rows is rounded up to a multiple of `row_multiple`, and `parts` selects those to make.
    """
    shape, pairs, in_row = chosen
    rows = -(-shape.rows // row_multiple) * row_multiple
    row = np.arange(len(pairs)) if in_row is None else np.repeat(np.arange(len(in_row)), in_row)
    if len(parts.mine) < parts.num_parts:
        mine, new_row = parts.rows(rows), np.full(rows, -1)
        new_row[mine] = np.arange(len(mine))
        pairs, row, rows = pairs[new_row[row] >= 0], new_row[row], len(mine)
        row = row[row >= 0]
    segment = None if in_row is None else _counted_in(row, np.ones_like(row)) + 1

    def place(side: str, length: int, vocab_size: int, bos: bool, eos: bool) -> tuple[np.ndarray, ...]:
        """Return a side's ids, with space for BOS and EOS; its segments; and the columns of each pair's BOS and EOS."""
        ids, offsets = getattr(encoded, f"{side}_ids"), getattr(encoded, f"{side}_offsets")
        starts, lengths = offsets[pairs], offsets[pairs + 1] - offsets[pairs]
        spans = lengths + bos + eos
        _check_lengths(pairs, spans, model)
        first = _counted_in(row, spans)
        positions = _positions(row, first + bos, lengths)
        tokens = ids[np.repeat(starts - first - bos, lengths) + positions[1]]
        _check_ids(tokens, side, vocab_size, pairs, lengths)
        placed, segments = np.full((rows, length), model.pad_id, np.int32), np.zeros((rows, length), np.int32)
        placed[positions] = tokens
        if segment is not None:
            segments[_positions(row, first, spans)] = np.repeat(segment, spans)
        return placed, segments, first, first + bos + lengths

    src, src_segments, first, last = place(
        "source", shape.src_length, model.source_rows, model.source_bos, model.source_eos
    )
    if model.source_bos:
        src[row, first] = model.bos_id
    if model.source_eos:
        src[row, last] = model.eos_id
    tgt_out, tgt_segments, first, last = place("target", shape.tgt_length, model.vocab_size, bos=False, eos=True)
    tgt_in = np.full_like(tgt_out, model.pad_id)
    tgt_in[:, 1:] = tgt_out[:, :-1]
    tgt_in[row, first] = model.start_id
    tgt_out[row, last] = model.eos_id
    if segment is None:
        return Batch(src, tgt_in, tgt_out)
    return Batch(src, tgt_in, tgt_out, src_segments, tgt_segments)


def _check_ids(ids: np.ndarray, side: str, vocab_size: int, pairs: np.ndarray, lengths: np.ndarray) -> None:
    """Check that the embedding table has a row for every id: the model reads NaN beyond its end, without an error."""
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        first = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        raise UserError(
            f"pair {np.repeat(pairs, lengths)[first]}: {side} token id {ids[first]} is outside the vocabulary of "
            f"{vocab_size} rows. Encode the text with the model's own tokenizer, or set model.vocab_size to the size "
            "of the vocabulary"
        )


def _check_lengths(pairs: np.ndarray, lengths: np.ndarray, model: ModelConfig) -> None:
    """Check that learned positions suffice for every pair: beyond their end the model reads NaN, without an error."""
    capacity = model.max_length - model.position_offset
    if model.positions == "learned" and lengths.size and lengths.max() > capacity:
        raise UserError(
            f"pair {pairs[lengths.argmax()]} has {lengths.max()} tokens, but the learned position table of "
            f"model.max_length={model.max_length} rows has space for {capacity}. Lower data.max_length to {capacity}, "
            "or raise model.max_length"
        )


def eval_batches(
    encoded: EncodedPairs,
    shapes: Sequence[Shape],
    batch_tokens: int,
    model: ModelConfig,
    row_multiple: int = 1,
    parts: RowParts = ALL_ROWS,
) -> Iterator[Batch]:
    """Yield every pair once, in a fixed order, in batches of the shapes, and of one longer shape if a pair needs it."""
    source_lengths, target_lengths = encoded.source_lengths, encoded.target_lengths
    src = max(int(source_lengths.max()), shapes[-1].src_length)
    tgt = max(int(target_lengths.max()), shapes[-1].tgt_length)
    if (src, tgt) != shapes[-1][1:]:
        shapes = [*shapes, Shape(max(1, batch_tokens // max(src, tgt)), src, tgt)]
    bucket = _buckets(source_lengths, target_lengths, shapes)
    order = np.argsort(bucket, kind="stable")
    for number, span in _cut(bucket, shapes):
        yield make_batch(encoded, Rows(shapes[number], order[span]), model, row_multiple, parts)


def equal_parts(total: int, max_size: int) -> int:
    """Return ceil(total / n), where n is the minimum number of parts of at most `max_size`."""
    return -(-total // -(-total // max_size))


def _buckets(source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """Return for each pair the number of the first shape that it fits."""
    src = np.searchsorted([shape.src_length for shape in shapes], source_lengths)
    tgt = np.searchsorted([shape.tgt_length for shape in shapes], target_lengths)
    bucket = np.maximum(src, tgt)
    if bucket.max() >= len(shapes):
        pair = int(bucket.argmax())
        raise ValueError(
            f"pair {pair} of {source_lengths[pair]} and {target_lengths[pair]} tokens fits no shape: {shapes[-1]}"
        )
    return bucket.astype(np.min_scalar_type(len(shapes)))  # a small type sorts in linear time


def _cut(bucket: np.ndarray, shapes: Sequence[Shape]) -> list[tuple[int, slice]]:
    """Return each batch's shape and range in the pairs sorted by shape. Only a shape's last batch has empty rows."""
    ends = np.cumsum(np.bincount(bucket, minlength=len(shapes))).tolist()
    cuts, start = [], 0
    for number, (shape, end) in enumerate(zip(shapes, ends, strict=True)):
        cuts += [(number, slice(at, min(at + shape.rows, end))) for at in range(start, end, shape.rows)]
        start = end
    return cuts


def _counted_in(row: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return for each item the sum of the sizes before it in its row. Items of a row are adjacent."""
    before = np.cumsum(sizes) - sizes
    return before - before[np.searchsorted(row, row)]


def _positions(row: np.ndarray, first: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of all positions of spans, one span after the other."""
    in_span = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(row, lengths), np.repeat(first, lengths) + in_span
