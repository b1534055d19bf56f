"""Packed batches: a row holds several sentence pairs, one after the other on both sides, and there is one shape.

The rows are packed once: pairs are taken in a random order, and each goes to the open row that has the least space
left. The content of a row is then a list of lengths. Each epoch assigns the pairs at random to the slots of their own
lengths, and shuffles the rows. So every epoch has the same number of batches, puts each pair next to other pairs, and
does not depend on the epochs before it.
"""

import numpy as np

from transformer_jax.data.batching import EpochOrders, Rows, Shape, equal_parts, log2_factorials

_STREAM = 4096  # pairs that are packed one after the other; the streams of a corpus are packed in parallel
_OPEN_ROWS = 32  # per stream


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Put every pair into a row of `length` positions on each side.

    This is best-fit bin packing with a bounded number of open rows. A pair is added to the row that leaves the least
    space on its tighter side. If a pair fits into no open row, the fullest row is closed and a new row is opened.

    >>> pairs, ends = pack(np.array([4, 6, 5]), np.array([5, 4, 9]), 10, np.random.default_rng(0))
    >>> [sorted(row.tolist()) for row in np.split(pairs, ends[:-1])]
    [[2], [0, 1]]

    Args:
        source_lengths: Number of tokens of each source sentence, with the BOS and EOS that batches add.
        target_lengths: Number of tokens of each target sentence, EOS included.
        length: Number of positions of a row. It must be at least the length of the longest sentence.
        rng: Chooses the order in which pairs are packed.

    Returns:
        The indices of the pairs, ordered by row, and the end of each row as an index into them.
    """
    number = len(source_lengths)
    streams = -(-number // _STREAM)
    steps = -(-number // streams)
    # The numbers after the last pair have length 0 and take no space.
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
    """Which pairs are in which row of which batch: a pure function of (lengths, sizes, seed) and the batch's number.

    Each epoch has every pair once. Threads may share a plan.

    Args:
        source_lengths: Number of tokens of each source sentence, with the BOS and EOS that batches add.
        target_lengths: Number of tokens of each target sentence, EOS included.
        length: Number of positions of a row on each side.
        batch_tokens: Number of positions of a batch on each side, at least `length`. If eight rows fit, the maximum
            number of rows is a multiple of eight, which most numbers of devices divide.
        seed: Seed of the order.

    Raises:
        ValueError: A pair fits no row.
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
        max_rows = max(1, batch_tokens // length)
        max_rows = max_rows // 8 * 8 or max_rows
        self._shape = Shape(equal_parts(len(self._ends), max_rows), length, length)
        # Pairs with the same lengths on both sides are of one kind. _slots has the slots of each kind, in order.
        kinds = source_lengths.astype(np.int64) * (length + 1) + target_lengths
        self._kind = np.unique(kinds, return_inverse=True)[1].astype(np.int32)
        self._slots = np.argsort(self._kind[packed], kind="stable")
        self._order = EpochOrders(self._make_order)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The one shape."""
        return (self._shape,)

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches per epoch."""
        return -(-len(self._ends) // self._shape.rows)

    def rows(self, index: int) -> Rows:
        """Return the pairs of global batch `index`, which counts from 0 over all epochs."""
        epoch, place = divmod(index, self.batches_per_epoch)
        pairs, rows = self._order(epoch)
        chosen = rows[place * self._shape.rows : (place + 1) * self._shape.rows]
        in_rows = [pairs[self._ends[row - 1] if row else 0 : self._ends[row]] for row in chosen]
        return Rows(self._shape, np.concatenate(in_rows), np.array([len(row) for row in in_rows]))

    @property
    def padding_share(self) -> float:
        """The fraction of an epoch's positions, over both sides, that hold padding. Empty rows are padding."""
        rows, src_length, tgt_length = self._shape
        return 1 - self._tokens / (self.batches_per_epoch * rows * (src_length + tgt_length))

    @property
    def order_bits(self) -> float:
        """Entropy of an epoch's order: of the rows, and of the pairs of each kind. The maximum is log2(pairs!)."""
        return log2_factorials(np.bincount(self._kind)) + log2_factorials([len(self._ends)])

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs in their slots, and the order of the rows."""
        rng = np.random.default_rng([self.seed, epoch])
        mixed = rng.permutation(len(self._kind))
        pairs = np.empty_like(mixed)
        pairs[self._slots] = mixed[np.argsort(self._kind[mixed], kind="stable")]
        return pairs, rng.permutation(len(self._ends))
