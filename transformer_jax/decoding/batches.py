"""Which sentences are decoded or scored together: those of about one length, in few shapes."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

_MOST_PAIR_TOKENS = 4096  # of a batch's longer side


def padded_length(length: int) -> int:
    """The few lengths that sources are padded to: steps of 8 up to 64, then about a fifth more each time.

    >>> [padded_length(n) for n in (1, 8, 9, 64, 65, 200)]
    [8, 8, 16, 64, 80, 224]
    """
    if length <= 64:
        return -(-length // 8) * 8
    step = 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


def longest_first(rows: Sequence[Sequence[int]]) -> list[int]:
    """The places of the rows, by their length."""
    return sorted(range(len(rows)), key=lambda index: -len(rows[index]))


def source_batches(
    rows: Sequence[Sequence[int]], batch_tokens: int, pad_id: int, room: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """(which rows, their ids padded), longest first; one shape for each padded length, empty rows left out."""
    groups: dict[int, list[int]] = {}
    for index in longest_first(rows):
        if rows[index]:
            groups.setdefault(min(padded_length(len(rows[index])), room), []).append(index)
    for length, indices in groups.items():
        # A power of two, so that small inputs share shapes too.
        size = min(1 << (len(indices) - 1).bit_length(), max(1, batch_tokens // length))
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            yield chosen, pad([rows[index] for index in chosen], (size, length), pad_id)


def pair_batches(
    source_lengths: Sequence[int], target_lengths: Sequence[int], room: int, most_rows: Callable[[int, int], int]
) -> Iterator[tuple[list[int], tuple[int, int, int]]]:
    """(which pairs, rows and padded lengths of their batch); one shape for each pair of padded lengths.

    Args:
        source_lengths, target_lengths: of the pairs.
        room: the longest sequence the model takes.
        most_rows: how many pairs of these two padded lengths there is memory for.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, lengths in enumerate(zip(source_lengths, target_lengths, strict=True)):
        source, target = (min(padded_length(max(length, 1)), room) for length in lengths)
        groups.setdefault((source, target), []).append(index)
    for (source, target), indices in groups.items():
        most = min(_MOST_PAIR_TOKENS // max(source, target), most_rows(source, target))
        size = max(1, min(most, len(indices)))
        for start in range(0, len(indices), size):
            yield indices[start : start + size], (size, source, target)


def pad(rows: Sequence[Sequence[int]], shape: tuple[int, int], value: int) -> np.ndarray:
    """The rows, and `value` where there is nothing, int32 of this shape."""
    padded = np.full(shape, value, np.int32)
    for row, ids in zip(padded, rows, strict=False):
        row[: len(ids)] = ids
    return padded
