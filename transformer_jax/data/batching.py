"""Batches of few static shapes within a token budget (paper section 5.1), in an order that is a pure function.

Sentence pairs of similar length share a batch. XLA compiles once a shape, so the shapes form a short ladder: each at
least as long as the one before on both sides. A pair goes to the first shape it fits. The rows of a shape are so many,
within the budget, that its pairs fill whole batches. `packing` has the other way: several pairs a row, one shape.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.types import ALL_ROWS, Batch, RowParts, UserError

_MOST_LENGTHS = 512  # different lengths that choose_shapes looks at; its time and memory grow with the square


class Shape(NamedTuple):
    """The static shape of a batch: `src` is (rows, src_length), `tgt_in` and `tgt_out` are (rows, tgt_length)."""

    rows: int
    src_length: int
    tgt_length: int


def choose_shapes(
    source_lengths: np.ndarray, target_lengths: np.ndarray, batch_tokens: int, max_shapes: int
) -> tuple[Shape, ...]:
    """The ladder of at most `max_shapes` shapes that pads these pairs least, found by dynamic programming.

    Pairs are put in order of their longer side and cut into `max_shapes` groups. A shape is as long, on each side, as
    the longest of its group and the groups before. Its rows are as many as `batch_tokens` allow on its longer side, or
    less, so that the group's batches are equally full; a group that does not fill half a batch is made only if it is
    all there is.

    >>> choose_shapes(np.array([3, 3, 3, 9, 8]), np.array([2, 4, 4, 10, 7]), batch_tokens=20, max_shapes=2)
    (Shape(rows=3, src_length=3, tgt_length=4), Shape(rows=2, src_length=9, tgt_length=10))

    Args:
        source_lengths: tokens of each pair's source, EOS counted.
        target_lengths: the same of the target.
        batch_tokens: positions of a batch on either side, padding counted. A longer pair gets a shape of one row.
        max_shapes: at least 1.

    Returns:
        The shapes; every pair fits the last.
    """
    longer = np.maximum(source_lengths, target_lengths)
    step = -(-int(longer.max()) // _MOST_LENGTHS)
    keys, group, counts = np.unique(-(-longer // step), return_inverse=True, return_counts=True)
    src, tgt = np.ones(len(keys), np.int64), np.ones(len(keys), np.int64)  # no shape is of length 0
    np.maximum.at(src, group, source_lengths)
    np.maximum.at(tgt, group, target_lengths)
    src, tgt = np.maximum.accumulate(src), np.maximum.accumulate(tgt)

    # cost[i, j]: positions if one shape serves the groups i to j. best[j]: least cost of the groups before j.
    before = np.concatenate([[0], np.cumsum(counts)])
    most = np.maximum(1, batch_tokens // np.maximum(src, tgt))  # rows
    pairs = before[None, 1:] - before[:-1, None]
    cost = pairs * (src + tgt)[None, :]
    is_small = 2 * pairs < np.minimum(most, len(longer))[None, :]
    cost = np.where(is_small, np.inf, cost)  # those of no pairs among them
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
        start, number = int(first[last - 1]), int(most[last - 1])
        rows = equal_parts(int(before[last] - before[start]), number)
        ladder.append(Shape(rows, int(src[last - 1]), int(tgt[last - 1])))
        last = start
    return tuple(reversed(ladder))


class Rows(NamedTuple):
    """Which pairs stand in a batch."""

    shape: Shape
    """Of the batch; there may be fewer rows with pairs."""
    pairs: np.ndarray
    """Their numbers (int64), row after row."""
    in_row: np.ndarray | None = None
    """For a packed batch, how many of the pairs stand in each of the first rows. None: one a row."""


class Plan(Protocol):
    """Which pairs stand in which batch: what the input pipeline asks of a plan. Threads may share one."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes that batches have."""

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch: the same for each."""

    @property
    def padding_share(self) -> float:
        """The share of an epoch's positions, of both sides together, that hold padding; empty rows are padding."""

    @property
    def order_bits(self) -> float:
        """Entropy of an epoch's order: the logarithm to base 2 of the number of orders that are equally likely."""

    def rows(self, index: int) -> Rows:
        """What stands in global batch `index`, from 0 on over all epochs."""


class EpochOrders:
    """What `make(epoch)` gives, kept for two epochs: prefetching threads cross the end of one one by one."""

    def __init__(self, make: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of an epoch, made by one of the threads that ask for it."""
        with self._lock:
            if epoch not in self._kept:
                self._kept = {kept: order for kept, order in self._kept.items() if kept == epoch - 1}
                self._kept[epoch] = self._make(epoch)
            return self._kept[epoch]


class BatchPlan:
    """Which pairs stand in which batch: a pure function of (lengths, shapes, seed) and the batch's number.

    Each epoch has every pair once. It mixes the pairs of each shape, cuts them into batches and mixes the batches.
    Threads may share a plan.

    Args:
        source_lengths: tokens of each pair's source, EOS counted.
        target_lengths: the same of the target.
        shapes: a ladder from `choose_shapes` that every pair fits.
        seed: of the order.

    Raises:
        ValueError: a pair that fits no shape.
    """

    def __init__(
        self, source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: Sequence[Shape], seed: int
    ) -> None:
        self.shapes = tuple(shapes)
        self.seed = seed
        self._tokens = int(source_lengths.sum() + target_lengths.sum())
        self._bucket = _buckets(source_lengths, target_lengths, self.shapes)
        self._cuts = _cut(self._bucket, self.shapes)
        self._order = EpochOrders(self._make_order)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch: the same for each."""
        return len(self._cuts)

    def rows(self, index: int) -> Rows:
        """What stands in global batch `index`, from 0 on over all epochs."""
        epoch, place = divmod(index, self.batches_per_epoch)
        pairs, batches = self._order(epoch)
        cut = self._cuts[batches[place]]
        return Rows(self.shapes[cut.shape], pairs[cut.start : cut.stop])

    @property
    def padding_share(self) -> float:
        """The share of an epoch's positions, of both sides together, that hold padding; empty rows are padding."""
        shapes = [self.shapes[cut.shape] for cut in self._cuts]
        positions = sum(shape.rows * (shape.src_length + shape.tgt_length) for shape in shapes)
        return 1 - self._tokens / positions

    @property
    def order_bits(self) -> float:
        """Entropy of an epoch's order, of the batches and of the pairs of each shape. All orders of the pairs have
        log2(pairs!)."""
        return log2_factorials(np.bincount(self._bucket)) + log2_factorials([len(self._cuts)])

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Order of the pairs, by shape, and order of the batches."""
        rng = np.random.default_rng([self.seed, epoch])
        mixed = rng.permutation(len(self._bucket))
        pairs = mixed[np.argsort(self._bucket[mixed], kind="stable")]
        return pairs, rng.permutation(len(self._cuts))


def make_batch(
    encoded: EncodedPairs, chosen: Rows, model: ModelConfig, row_multiple: int = 1, parts: RowParts = ALL_ROWS
) -> Batch:
    """The pairs as padded arrays.

    Args:
        encoded: the corpus.
        chosen: the shape and the pairs, which fit.
        model: states the special ids, what the decoder reads first, and whether the source starts with BOS and ends
            with EOS.
        row_multiple: the shape's rows are rounded up to a multiple of it, so that devices divide the rows.
        parts: which of the rows are made; their number divides `row_multiple`.

    Returns:
        int32 arrays; rows after the pairs hold nothing but padding.
    """
    shape, pairs, in_row = chosen
    rows = -(-shape.rows // row_multiple) * row_multiple
    row = np.arange(len(pairs)) if in_row is None else np.repeat(np.arange(len(in_row)), in_row)
    if len(parts.mine) < parts.num_parts:
        mine, place = parts.rows(rows), np.full(rows, -1)
        place[mine] = np.arange(len(mine))
        pairs, row, rows = pairs[place[row] >= 0], place[row], len(mine)
        row = row[row >= 0]
    src = np.full((rows, shape.src_length), model.pad_id, np.int32)
    tgt_in = np.full((rows, shape.tgt_length), model.pad_id, np.int32)
    tgt_out = np.full((rows, shape.tgt_length), model.pad_id, np.int32)

    lengths = encoded.source_offsets[pairs + 1] - encoded.source_offsets[pairs]
    spans = lengths + model.source_bos + model.source_eos
    _check_lengths(pairs, spans, model)
    first = _counted_in(row, spans)
    _fill(src, row, first + model.source_bos, encoded.source_ids, encoded.source_offsets[pairs], lengths)
    if model.source_bos:
        src[row, first] = model.bos_id
    if model.source_eos:
        src[row, first + model.source_bos + lengths] = model.eos_id
    src_spans = first, spans
    lengths = encoded.target_offsets[pairs + 1] - encoded.target_offsets[pairs]
    _check_lengths(pairs, lengths + 1, model)
    first = _counted_in(row, lengths + 1)
    _fill(tgt_out, row, first, encoded.target_ids, encoded.target_offsets[pairs], lengths)
    tgt_in[:, 1:] = tgt_out[:, :-1]
    tgt_in[row, first] = model.start_id
    tgt_out[row, first + lengths] = model.eos_id
    _check_ids(src, "source", model.source_rows, encoded.source, pairs)
    _check_ids(tgt_out, "target", model.vocab_size, encoded.target, pairs)
    if in_row is None:
        return Batch(src, tgt_in, tgt_out)
    segment = _counted_in(row, np.ones_like(row)) + 1
    src_segments, tgt_segments = np.zeros_like(src), np.zeros_like(tgt_out)
    for segments, (starts, spans) in ((src_segments, src_spans), (tgt_segments, (first, lengths + 1))):
        segments[_places(row, starts, spans)] = np.repeat(segment, spans)
    return Batch(src, tgt_in, tgt_out, src_segments, tgt_segments)


def _check_ids(
    ids: np.ndarray, side: str, vocab_size: int, sentence: Callable[[int], np.ndarray], pairs: np.ndarray
) -> None:
    """Check that the embedding table has a row for every id: the model reads NaN beyond its end, without an error.

    Raises:
        UserError: An id of a pair is out of range.
    """
    if not ids.size or (ids.min() >= 0 and ids.max() < vocab_size):
        return
    for pair in pairs.tolist():
        for token in sentence(pair).tolist():
            if not 0 <= token < vocab_size:
                raise UserError(
                    f"pair {pair}: {side} token id {token} is outside the vocabulary of {vocab_size} rows. Encode the "
                    "text with the model's own tokenizer, or set model.vocab_size to the size of the vocabulary"
                )


def _check_lengths(pairs: np.ndarray, lengths: np.ndarray, model: ModelConfig) -> None:
    """Check that learned positions suffice for every pair: beyond their end the model reads NaN, without an error.

    Args:
        pairs: The numbers of the pairs.
        lengths: Tokens of one side of each pair, EOS included.
        model: The model.

    Raises:
        UserError: A pair is too long.
    """
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
    """Every pair once, in a fixed order, in batches of the shapes, and of one longer shape if some pair needs it.

    Args:
        encoded: the corpus.
        shapes: a ladder from `choose_shapes`, such as training's.
        batch_tokens: budget of the longer shape.
        model, row_multiple, parts: as for `make_batch`.
    """
    source_lengths, target_lengths = encoded.source_lengths, encoded.target_lengths
    src = max(int(source_lengths.max()), shapes[-1].src_length)
    tgt = max(int(target_lengths.max()), shapes[-1].tgt_length)
    if (src, tgt) != shapes[-1][1:]:
        shapes = [*shapes, Shape(max(1, batch_tokens // max(src, tgt)), src, tgt)]
    bucket = _buckets(source_lengths, target_lengths, shapes)
    order = np.argsort(bucket, kind="stable")
    for cut in _cut(bucket, shapes):
        yield make_batch(encoded, Rows(shapes[cut.shape], order[cut.start : cut.stop]), model, row_multiple, parts)


class _Cut(NamedTuple):
    """A batch: number of its shape, and its place in the pairs ordered by shape."""

    shape: int
    start: int
    stop: int


def log2_factorials(numbers: np.ndarray | Sequence[int]) -> float:
    """log2(n!), summed over the numbers."""
    return sum(math.lgamma(int(number) + 1) for number in numbers) / math.log(2)


def equal_parts(number: int, most: int) -> int:
    """The size of the fewest parts of at most `most` that hold `number`, as equal as can be."""
    return -(-number // -(-number // most))


def _buckets(source_lengths: np.ndarray, target_lengths: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """For each pair the number of the first shape it fits."""
    src = np.searchsorted([shape.src_length for shape in shapes], source_lengths)
    tgt = np.searchsorted([shape.tgt_length for shape in shapes], target_lengths)
    bucket = np.maximum(src, tgt)
    if bucket.max() >= len(shapes):
        pair = int(bucket.argmax())
        raise ValueError(
            f"pair {pair} of {source_lengths[pair]} and {target_lengths[pair]} tokens fits no shape: {shapes[-1]}"
        )
    return bucket.astype(np.min_scalar_type(len(shapes)))  # a small type sorts in linear time


def _cut(bucket: np.ndarray, shapes: Sequence[Shape]) -> list[_Cut]:
    """Batches over the pairs ordered by shape; only the last of a shape has empty rows."""
    ends = np.cumsum(np.bincount(bucket, minlength=len(shapes))).tolist()
    cuts, start = [], 0
    for number, (shape, end) in enumerate(zip(shapes, ends, strict=True)):
        cuts += [_Cut(number, first, min(first + shape.rows, end)) for first in range(start, end, shape.rows)]
        start = end
    return cuts


def _counted_in(row: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """For each item, the sizes of those before it in its row; items of a row stand together."""
    before = np.cumsum(sizes) - sizes
    return before - before[np.searchsorted(row, row)]


def _places(row: np.ndarray, first: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of all positions of spans, one span after the other."""
    in_span = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(row, lengths), np.repeat(first, lengths) + in_span


def _fill(
    rows: np.ndarray, row: np.ndarray, first: np.ndarray, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray
) -> None:
    """Writes ids[starts[i] : starts[i] + lengths[i]] into rows[row[i]] from column first[i] on."""
    places = _places(row, first, lengths)
    rows[places] = ids[np.repeat(starts - first, lengths) + places[1]]
