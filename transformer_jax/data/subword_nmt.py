"""Byte pair encoding as subword-nmt and fastBPE apply it: "lower" becomes "low@@ er" (Sennrich et al. 2016)."""

import itertools
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformer_jax.data.segmentation import Kind, WordTokenizer
from transformer_jax.errors import UserError

_END = "</w>"  # stands behind the last letter of a word


class SubwordTokenizer(WordTokenizer):
    """Words between spaces, cut by merges into pieces of a vocabulary; "@@" marks a piece that is continued.

    Args:
        merges: pairs of pieces, the first merged first; the last piece of a word ends with "</w>".
        vocabulary: the piece of each id, special tokens included.
        special: the ids of PAD, BOS, EOS and UNK.
    """

    kind: Kind

    def __init__(
        self, merges: Sequence[tuple[str, str]], vocabulary: Sequence[str], special: tuple[int, int, int, int | None]
    ) -> None:
        super().__init__("presegmented", vocabulary, special)
        self.kind = "subword_nmt"
        self._merges = [(left, right) for left, right in merges]
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(self._merges)))}
        self._pieces = lru_cache(maxsize=100_000)(self._cut)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of the pieces; those outside the vocabulary give `unk_id`."""
        return [
            [self._id(piece, line) for word in text.split() for piece in self._pieces(word)]
            for line, text in enumerate(texts, 1)
        ]

    def plain(self, text: str) -> str:
        """Words with one space between: what `decode` makes of the pieces."""
        return " ".join(text.split())

    def _cut(self, word: str) -> tuple[str, ...]:
        """A word's pieces. The time goes with the square of its length, so one of more than 1,000 letters, such as a
        megabyte without a space, is cut in stretches of 200."""
        stretch = len(word) if len(word) <= 1000 else 200
        letters = [*word[:-1], word[-1] + _END]
        pieces = [p for start in range(0, len(word), stretch) for p in self._merge(letters[start : start + stretch])]
        return (*(f"{piece}@@" for piece in pieces[:-1]), pieces[-1].removesuffix(_END))

    def _merge(self, pieces: list[str]) -> list[str]:
        while len(pieces) > 1:
            best = min(itertools.pairwise(pieces), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            merged, place = [], 0
            while place < len(pieces):
                if tuple(pieces[place : place + 2]) == best:
                    merged.append("".join(best))
                    place += 2
                else:
                    merged.append(pieces[place])
                    place += 1
            pieces = merged
        return pieces

    def to_json(self) -> str:
        """The merges stand beside the vocabulary."""
        tree: dict[str, Any] = json.loads(super().to_json())
        special = [self.pad_id, self.bos_id, self.eos_id, self.unk_id]
        return json.dumps(tree | {"special": special, "merges": self._merges}, ensure_ascii=False)


def read_codes(path: Path) -> list[tuple[str, str]]:
    """The merges of a file of codes: `#version: 0.2` and "left right" lines, or fastBPE's with a count behind.

    Raises:
        UserError: another version, or a line that is no pair.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as codes: {error}") from error
    first = 0
    if lines[0].startswith("#version:"):
        version = lines[0].removeprefix("#version:").strip()
        if version != "0.2":
            raise UserError(f"{path}, line 1: codes of version {version}; only 0.2 is read")
        first = 1
    merges = []
    for number, line in enumerate(lines[first:], first + 1):
        fields = line.split(" ")
        if line == "" and number == len(lines):
            continue
        if len(fields) == 3 and fields[2].isdecimal():
            fields.pop()
        if len(fields) != 2 or not all(fields):
            raise UserError(f"{path}, line {number}: {line!r} is not a pair of pieces")
        merges.append((fields[0], fields[1]))
    if not first and not any(piece.endswith(_END) for pair in merges for piece in pair):
        raise UserError(f"{path}: no piece ends with {_END}; these are not codes of subword-nmt 0.2 or fastBPE")
    return merges
