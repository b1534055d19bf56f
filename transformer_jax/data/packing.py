"""Packed batches: a row holds several sentence pairs, one after the other on both sides, and there is one shape.

The rows are packed once. Each epoch assigns the pairs at random to the slots of their own lengths, and shuffles the
rows. So every epoch has the same number of batches, puts each pair next to other pairs, and depends on no other epoch.
"""

import numpy as np

from transformer_jax.data.batching import Plan, Rows, Shape, equal_parts

_STREAM = 4096  # pairs that are packed one after the other; the streams of a corpus are packed in parallel
_OPEN_ROWS = 32  # per stream


def pack(
    source_lengths: np.ndarray, target_lengths: np.ndarray, length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Put every pair into a row of `length` positions on each side: best-fit bin packing with few open rows.

    A pair, in an order that `rng` chooses, is added to the row that leaves the least space on its tighter side. If it
    fits into no open row, the fullest one is closed. Returns the pairs ordered by row, and the end of each row in them.
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


class PackedPlan(Plan):
    """Batches of rows with several pairs. Groups are the pairs of equal lengths on both sides, and units are rows.

    If eight rows fit `batch_tokens`, the largest number of rows is a multiple of 8, which most device counts divide.
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
        packed, self._ends = pack(source_lengths, target_lengths, length, np.random.default_rng(seed))
        max_rows = max(1, batch_tokens // length)
        max_rows = max_rows // 8 * 8 or max_rows
        shape = Shape(equal_parts(len(self._ends), max_rows), length, length)
        num_batches = -(-len(self._ends) // shape.rows)
        lengths = source_lengths.astype(np.int64) * (length + 1) + target_lengths
        groups = np.unique(lengths, return_inverse=True)[1].astype(np.int32)
        self._slots = np.argsort(groups[packed], kind="stable")  # the slots of each group, in order
        num_tokens = int(source_lengths.sum() + target_lengths.sum())
        super().__init__([shape], [num_batches], num_tokens, groups, len(self._ends), seed)

    def rows(self, index: int) -> Rows:
        """Return the pairs of global batch `index`."""
        epoch, place = divmod(index, self.batches_per_epoch)
        (shape,) = self.shapes
        pairs, rows = self._order(epoch)
        chosen = rows[place * shape.rows : (place + 1) * shape.rows]
        in_rows = [pairs[self._ends[row - 1] if row else 0 : self._ends[row]] for row in chosen]
        return Rows(shape, np.concatenate(in_rows), np.array([len(row) for row in in_rows]))

    def _make_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the pairs in their slots, and the order of the rows."""
        by_group, rows = super()._make_order(epoch)
        pairs = np.empty_like(by_group)
        pairs[self._slots] = by_group
        return pairs, rows
