"""Batches of few static shapes within a token budget (paper section 5.1), in an order that is a pure function.

Sentence pairs of similar length share a batch. XLA compiles once a shape, so the shapes form a short ladder: each at
least as long as the one before on both sides. A pair goes to the first shape it fits. Pairs too few for a batch of
their shape move up to the next, so that few batches have empty rows.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.types import Batch

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
    the longest of its group and the groups before, and has as many rows as `batch_tokens` allow on its longer side.

    >>> choose_shapes(np.array([3, 3, 9]), np.array([2, 4, 10]), batch_tokens=20, max_shapes=2)
    (Shape(rows=5, src_length=3, tgt_length=4), Shape(rows=2, src_length=9, tgt_length=10))

    Args:
        source_lengths: tokens of each pair's source, EOS counted.
        target_lengths: the same of the target.
        batch_tokens: positions of a batch on either side, padding counted. A longer pair gets a shape of one row.
        max_shapes: at least 1.
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
    cost = (before[None, 1:] - before[:-1, None]) * (src + tgt)[None, :]
    cost = np.where(np.tri(len(keys), k=-1, dtype=bool), np.inf, cost)
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
        ladder.append(_shape(int(src[last - 1]), int(tgt[last - 1]), batch_tokens))
        last = int(first[last - 1])
    return tuple(reversed(ladder))


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
        self._bucket = _buckets(source_lengths, target_lengths, self.shapes)
        self._cuts = _cut(self._bucket, self.shapes)
        self._lock = threading.Lock()
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch: the same for each."""
        return len(self._cuts)

    def rows(self, index: int) -> tuple[Shape, np.ndarray]:
        """Shape and pair numbers (int64, at most `shape.rows`) of global batch `index`, from 0 on over all epochs."""
        epoch, place = divmod(index, self.batches_per_epoch)
        pairs, batches = self._epoch(epoch)
        cut = self._cuts[batches[place]]
        return self.shapes[cut.shape], pairs[cut.start : cut.stop]

    def padding_share(self, source_lengths: np.ndarray, target_lengths: np.ndarray) -> float:
        """The share of an epoch's positions, of both sides together, that hold padding; empty rows are padding."""
        shapes = [self.shapes[cut.shape] for cut in self._cuts]
        positions = sum(shape.rows * (shape.src_length + shape.tgt_length) for shape in shapes)
        return 1 - float(source_lengths.sum() + target_lengths.sum()) / positions

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Order of the pairs, by shape, and order of the batches."""
        with self._lock:
            if epoch not in self._epochs:
                # Prefetching threads cross the end of an epoch one by one, so two are kept.
                self._epochs = {e: order for e, order in self._epochs.items() if e == epoch - 1}
                rng = np.random.default_rng([self.seed, epoch])
                mixed = rng.permutation(len(self._bucket))
                pairs = mixed[np.argsort(self._bucket[mixed], kind="stable")]
                self._epochs[epoch] = pairs, rng.permutation(len(self._cuts))
            return self._epochs[epoch]


def make_batch(
    encoded: EncodedPairs, pairs: np.ndarray, shape: Shape, model: ModelConfig, row_multiple: int = 1
) -> Batch:
    """The pairs as padded arrays.

    Args:
        encoded: the corpus.
        pairs: numbers of at most `shape.rows` pairs that fit the shape.
        shape: of the batch.
        model: says the special ids, what the decoder reads first and whether the source ends with EOS.
        row_multiple: `shape.rows` is rounded up to a multiple of it, so that devices divide the rows.

    Returns:
        int32 arrays; rows after the pairs hold nothing but padding.
    """
    rows = -(-shape.rows // row_multiple) * row_multiple
    src = np.full((rows, shape.src_length), model.pad_id, np.int32)
    tgt_in = np.full((rows, shape.tgt_length), model.pad_id, np.int32)
    tgt_out = np.full((rows, shape.tgt_length), model.pad_id, np.int32)
    used = np.arange(len(pairs))

    lengths = _fill(src, encoded.source_ids, encoded.source_offsets, pairs)
    if model.source_eos:
        src[used, lengths] = model.eos_id
    lengths = _fill(tgt_out, encoded.target_ids, encoded.target_offsets, pairs)
    tgt_in[used, 0] = model.start_id
    tgt_in[:, 1:] = tgt_out[:, :-1]
    tgt_out[used, lengths] = model.eos_id
    return Batch(src, tgt_in, tgt_out)


def eval_batches(
    encoded: EncodedPairs, shapes: Sequence[Shape], batch_tokens: int, model: ModelConfig, row_multiple: int = 1
) -> Iterator[Batch]:
    """Every pair once, in a fixed order, in batches of the shapes, and of one longer shape if some pair needs it.

    Args:
        encoded: the corpus.
        shapes: a ladder from `choose_shapes`, such as training's.
        batch_tokens: budget of the longer shape.
        model, row_multiple: as for `make_batch`.
    """
    source_lengths, target_lengths = encoded.source_lengths, encoded.target_lengths
    src = max(int(source_lengths.max()), shapes[-1].src_length)
    tgt = max(int(target_lengths.max()), shapes[-1].tgt_length)
    if (src, tgt) != shapes[-1][1:]:
        shapes = [*shapes, _shape(src, tgt, batch_tokens)]
    bucket = _buckets(source_lengths, target_lengths, shapes)
    order = np.argsort(bucket, kind="stable")
    for cut in _cut(bucket, shapes):
        yield make_batch(encoded, order[cut.start : cut.stop], shapes[cut.shape], model, row_multiple)


class _Cut(NamedTuple):
    """A batch: number of its shape, and its place in the pairs ordered by shape."""

    shape: int
    start: int
    stop: int


def _shape(src_length: int, tgt_length: int, batch_tokens: int) -> Shape:
    return Shape(max(1, batch_tokens // max(src_length, tgt_length)), src_length, tgt_length)


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
    """Batches over the pairs ordered by shape. Pairs left over stand before those of the next shape, and join them.

    Batches cost about the same whatever their shape, so pairs that would fill one of the next shape stay.
    """
    ends = np.cumsum(np.bincount(bucket, minlength=len(shapes))).tolist()
    last = int(bucket.max())
    cuts, start = [], 0
    for number in range(last + 1):
        fewest = 1 if number == last else min(shapes[number].rows, shapes[number + 1].rows)
        while ends[number] - start >= fewest:
            stop = min(start + shapes[number].rows, ends[number])
            cuts.append(_Cut(number, start, stop))
            start = stop
    return cuts


def _fill(rows: np.ndarray, ids: np.ndarray, offsets: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Writes the ids of sentence pairs[i] into rows[i] from the left; returns the sentences' lengths."""
    starts = offsets[pairs]
    lengths = offsets[np.asarray(pairs) + 1] - starts
    in_row = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    rows[np.repeat(np.arange(len(pairs)), lengths), in_row] = ids[np.repeat(starts, lengths) + in_row]
    return lengths
