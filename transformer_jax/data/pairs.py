"""Store sentence pairs as two columns of text of equal length."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from transformer_jax.config import DataConfig
from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError

Split = Literal["train", "valid", "test"]

_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class Pairs:
    """Sentence pairs of one split, without newlines. `origin` names the files or the data set, for messages."""

    source: Sequence[str]
    target: Sequence[str]
    origin: str

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise UserError(
                f"{self.origin}: {len(self.source)} source sentences and {len(self.target)} target sentences; "
                "sentence n of one side must be the translation of sentence n of the other"
            )
        require(self.source, f"{self.origin}: no sentence pairs; the corpus is empty")

    def __len__(self) -> int:
        return len(self.source)

    def chunks(self, size: int = _ROWS_AT_ONCE) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
        """Yield the pairs in order, at most `size` at a time, as lists of source and of target sentences."""
        for start in range(0, len(self), size):
            yield self.source[start : start + size], self.target[start : start + size]


class LazyColumn(Sequence[str]):
    """A column of text that `fetch(start, stop)` reads from its memory-mapped table, thousands of rows at a time."""

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
        rows = range(self._length)[index]
        if isinstance(rows, int):
            return self._fetch(rows, rows + 1)[0]
        return self._fetch(rows.start, rows.stop) if rows.step == 1 and rows else [self[row] for row in rows]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, self._length, _ROWS_AT_ONCE):
            yield from self._fetch(start, min(start + _ROWS_AT_ONCE, self._length))


def column_names(config: DataConfig) -> list[str]:
    """Return the names of the source and the target column of a table. By default these are the languages."""
    return [config.source_column or config.source_language, config.target_column or config.target_language]


def check_column(name: str, names: Collection[str], where: str, kind: str = "column") -> None:
    """Raise UserError unless `name` is one of the names of a table's columns."""
    if name not in names:
        found = f"{where}: no {kind} {name!r} among {list(names)}"
        raise UserError(f"{found}; set data.source_column and data.target_column")


def clean_sentence(value: object, where: str) -> str:
    """Return text, or bytes in UTF-8, as one line: newlines become spaces, because a line holds one sentence."""
    try:
        if isinstance(value, bytes):
            value = value.decode("utf-8")
        if not isinstance(value, str):
            raise UserError(f"{where} is {value!r:.80}; it must be text")
        if not value.isascii():
            value.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UserError(f"{where}: not valid UTF-8: {error.reason}; correct the text") from error
    return value.replace("\r\n", " ").replace("\n", " ")
