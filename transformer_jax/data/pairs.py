"""Sentence pairs: two columns of text of equal length."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from transformer_jax.types import UserError

Split = Literal["train", "valid", "test"]

_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs of one split; `source[i]` and `target[i]` belong together. No sentence has a newline in it.

    Args:
        source: one sentence an item.
        target: as many sentences.
        origin: where they come from, for messages, such as the names of the files.
    """

    source: Sequence[str]
    target: Sequence[str]
    origin: str

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise UserError(
                f"{self.origin}: {len(self.source)} source sentences and {len(self.target)} target sentences; "
                "there must be as many of both"
            )
        if not self.source:
            raise UserError(f"{self.origin}: no sentence pairs; an empty corpus is of no use")

    def __len__(self) -> int:
        return len(self.source)

    def chunks(self, size: int = _ROWS_AT_ONCE) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
        """The pairs in order, at most `size` at a time: lists of source and of target sentences."""
        for start in range(0, len(self), size):
            yield self.source[start : start + size], self.target[start : start + size]


class LazyColumn(Sequence[str]):
    """A column of text that stays in its memory-mapped table until it is read, some thousand rows at a time.

    Args:
        fetch: fetch(start, stop) gives the sentences of those rows.
        length: number of rows.
    """

    def __init__(self, fetch: Callable[[int, int], list[str]], length: int) -> None:
        self._fetch = fetch
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                return [self[row] for row in range(start, stop, step)]
            return self._fetch(start, stop) if start < stop else []
        row = range(self._length)[index]
        return self._fetch(row, row + 1)[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, self._length, _ROWS_AT_ONCE):
            yield from self._fetch(start, min(start + _ROWS_AT_ONCE, self._length))


def clean_sentence(value: Any, where: str) -> str:
    """`value` as one line of text. Newlines become spaces, since a line is a sentence everywhere else.

    Args:
        value: text, or bytes in UTF-8.
        where: file and line, or data set and row, for the message.

    Raises:
        UserError: not text, not UTF-8, or text that UTF-8 cannot hold (half a surrogate pair).
    """
    try:
        if isinstance(value, bytes):
            value = value.decode("utf-8")
        if not isinstance(value, str):
            raise UserError(f"{where} is {value!r:.80}; it must be text")
        if not value.isascii():
            value.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(f"{where}: not valid UTF-8: {error.reason}; put the text right") from error
    return value.replace("\r\n", " ").replace("\n", " ")
