"""Packed batches: a row holds several sentence pairs, one after the other on both sides, and there is one shape.

The rows are packed once: pairs come in a random order, and each goes to that of the open rows in which the least room
is left. What stands in a row is then a list of lengths. An epoch deals the pairs anew to the places of their lengths,
and mixes the rows. So every epoch has as many batches, other company for each pair, and is known without the others.
"""

import numpy as np

from transformer_jax.data.batching import EpochOrders, Rows, Shape, equal_parts, log2_factorials

_STREAM = 4096  # pairs that are packed one after the other; the streams of a corpus are packed side by side
_OPEN_ROWS = 32  # of a stream


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Puts every pair into a row of `length` positions on each side.

    Best fit over a bounded number of open rows: a pair goes where the tighter side has the least room left; if it fits
    no open row, the fullest one is closed and a new one opened.

    >>> pairs, ends = pack(np.array([4, 6, 5]), np.array([5, 4, 9]), 10, np.random.default_rng(0))
    >>> [sorted(row.tolist()) for row in np.split(pairs, ends[:-1])]
    [[2], [0, 1]]

    Args:
        source_lengths: tokens of each pair's source, EOS counted.
        target_lengths: the same of the target.
        length: at least the longest pair's tokens on either side.
        rng: of the order in which pairs are packed.

    Returns:
        The pairs' numbers, row after row, and for each row where it ends in them.
    """
    number = len(source_lengths)
    streams = -(-number // _STREAM)
    steps = -(-number // streams)
    # The numbers after the last pair are of no length, and take no room.
    order = np.concatenate([rng.permutation(number), np.full(streams * steps - number, number)])
    lengths = np.zeros((number + 1, 2), np.int32)
    lengths[:number] = np.stack([source_lengths, target_lengths], axis=1)

    free = np.zeros((2, streams, _OPEN_ROWS), np.int32)
    open_rows = np.zeros((streams, _OPEN_ROWS), np.int64)
    row_of, rows, stream = np.empty(number + 1, np.int64), 0, np.arange(streams)
    for pairs in order.reshape(streams, steps).T:
        needed = lengths[pairs].T
        left = (free - needed[:, :, None]).min(axis=0)
        slot = np.where(left < 0, length, left).argmin(axis=1)
        full = np.flatnonzero(left[stream, slot] < 0)
        if len(full):
            slot[full] = free[:, full].sum(axis=0).argmin(axis=1)
            open_rows[full, slot[full]] = np.arange(rows, rows + len(full))
            free[:, full, slot[full]] = length
            rows += len(full)
        free[:, stream, slot] -= needed
        row_of[pairs] = open_rows[stream, slot]
    row_of = row_of[:number]
    return np.argsort(row_of, kind="stable"), np.cumsum(np.bincount(row_of, minlength=rows))


class PackedPlan:
    """Which pairs stand in which row of which batch: a pure function of (lengths, sizes, seed) and the batch's number.

    Each epoch has every pair once. Threads may share a plan.

    Args:
        source_lengths: tokens of each pair's source, EOS counted.
        target_lengths: the same of the target.
        length: positions of a row on each side.
        batch_tokens: positions of a batch on each side; at least `length`. Where eight rows fit, at most a multiple of
            eight is used, which most numbers of devices divide.
        seed: of the order.

    Raises:
        ValueError: a pair that fits no row.
    """

    def __init__(
        self, source_lengths: np.ndarray, target_lengths: np.ndarray, length: int, batch_tokens: int, seed: int
    ) -> None:
        longer = np.maximum(source_lengths, target_lengths)
        if longer.max() > length:
            pair = int(longer.argmax())
            raise ValueError(
                f"pair {pair} of {source_lengths[pair]} and {target_lengths[pair]} tokens fits no row of {length}"
            )
        self.seed = seed
        self._tokens = int(source_lengths.sum() + target_lengths.sum())
        packed, self._ends = pack(source_lengths, target_lengths, length, np.random.default_rng(seed))
        most = max(1, batch_tokens // length)
        most = most // 8 * 8 or most
        self._shape = Shape(equal_parts(len(self._ends), most), length, length)
        # Pairs of the same lengths on both sides are of one kind; _places has the places of each kind, in order.
        kinds = source_lengths.astype(np.int64) * (length + 1) + target_lengths
        self._kind = np.unique(kinds, return_inverse=True)[1].astype(np.int32)
        self._places = np.argsort(self._kind[packed], kind="stable")
        self._order = EpochOrders(self._make_order)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape."""
        return (self._shape,)

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch: the same for each."""
        return -(-len(self._ends) // self._shape.rows)

    def rows(self, index: int) -> Rows:
        """What stands in global batch `index`, from 0 on over all epochs."""
        epoch, place = divmod(index, self.batches_per_epoch)
        pairs, rows = self._order(epoch)
        chosen = rows[place * self._shape.rows : (place + 1) * self._shape.rows]
        in_rows = [pairs[self._ends[row - 1] if row else 0 : self._ends[row]] for row in chosen]
        return Rows(self._shape, np.concatenate(in_rows), np.array([len(row) for row in in_rows]))

    @property
    def padding_share(self) -> float:
        """The share of an epoch's positions, of both sides together, that hold padding; empty rows are padding."""
        rows, src_length, tgt_length = self._shape
        return 1 - self._tokens / (self.batches_per_epoch * rows * (src_length + tgt_length))

    @property
    def order_bits(self) -> float:
        """Entropy of an epoch's order, of the rows and of the pairs of the same lengths. All orders of the pairs have
        log2(pairs!)."""
        return log2_factorials(np.bincount(self._kind)) + log2_factorials([len(self._ends)])

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The pairs in their places, and the order of the rows."""
        rng = np.random.default_rng([self.seed, epoch])
        mixed = rng.permutation(len(self._kind))
        pairs = np.empty_like(mixed)
        pairs[self._places] = mixed[np.argsort(self._kind[mixed], kind="stable")]
        return pairs, rng.permutation(len(self._ends))
