"""Tokenizers of imported models: SentencePiece and subword-nmt."""

import base64
import itertools
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformer_jax.data.tokenizer import Kind, Tokenizer, WordTokenizer
from transformer_jax.types import UserError, first_line

_SPACE = "\u2581"  # stands for a space in a piece
# Before these the option `clean_up` takes the space away, and around a lone apostrophe both, one after the other.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class SentencePieceTokenizer(Tokenizer):
    """Pieces of a SentencePiece model, each with the id that the vocabulary gives it.

    A language code at the start of a line, `>>fra<<`, is one token.

    Args:
        model: the bytes of a `.spm` file.
        vocabulary: the id of each piece, special tokens included; ids may be missing in between.
        special: the ids of PAD, BOS, EOS and of unknown pieces. The first three are never found in text.
        clean_up: whether decoding takes spaces before punctuation away (`clean_up_tokenization_spaces`).

    Raises:
        UserError: sentencepiece is not installed, the model is damaged, or the vocabulary gives an id twice.
    """

    kind: Kind = "sentencepiece"
    unk_id: int

    def __init__(
        self,
        model: bytes,
        vocabulary: Mapping[str, int],
        special: tuple[int, int, int, int],
        clean_up: bool = False,
    ) -> None:
        self.model, self.clean_up = model, bool(clean_up)
        self.vocabulary = dict(vocabulary)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = special
        for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
            if type(getattr(self, name)) is not int:
                raise UserError(f"SentencePiece vocabulary: {name} is {getattr(self, name)!r}; it must be a number")
        strange = {piece: i for piece, i in self.vocabulary.items() if type(i) is not int or i < 0}
        if strange or not self.vocabulary:
            raise UserError(f"SentencePiece vocabulary: ids must be numbers from 0; found {strange}")
        self._pieces = {i: piece for piece, i in self.vocabulary.items()}
        if len(self._pieces) != len(self.vocabulary):
            twice = sorted(piece for piece, i in self.vocabulary.items() if self._pieces[i] != piece)
            raise UserError(f"SentencePiece vocabulary: these pieces have ids of other pieces: {twice[:10]}")
        self.vocab_size = max(self._pieces) + 1
        hidden = {self.pad_id, self.bos_id, self.eos_id}
        self._ids = {piece: i for piece, i in self.vocabulary.items() if i not in hidden}
        self._processor = _load(model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Pieces outside the vocabulary give `unk_id`, as does a language code that is not in it."""
        return [[self._ids.get(piece, self.unk_id) for piece in self._cut(text)] for text in texts]

    def _cut(self, text: str) -> list[str]:
        code, end, rest = text.partition("<<")
        if text.startswith(">>") and end:
            return [code + end, *self._processor.encode(rest, out_type=str)]
        return self._processor.encode(text, out_type=str)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """`unk_id` gives nothing, like the other special tokens."""
        found = [[self._pieces.get(i) for i in self._visible(row) if i != self.unk_id] for row in rows]
        pieces = [[piece for piece in row if piece is not None] for row in found]
        return [self._joined(row) if row else "" for row in pieces]

    def _joined(self, pieces: list[str]) -> str:
        text = self._processor.decode_pieces(pieces).replace(_SPACE, " ").strip()
        for spaced in _CLEANED if self.clean_up else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id, as the vocabulary spells it."""
        return [self._pieces.get(int(i), f"<{int(i)}>") for i in ids]

    def to_json(self) -> str:
        """The whole tokenizer, the model as base64."""
        tree = {
            "kind": self.kind,
            "special": [self.pad_id, self.bos_id, self.eos_id, self.unk_id],
            "vocabulary": self.vocabulary,
            "clean_up": self.clean_up,
            "model": base64.b64encode(self.model).decode("ascii"),
        }
        return json.dumps(tree, ensure_ascii=False)


def _load(model: bytes) -> Any:
    """The library's processor; it keeps nothing but the bytes."""
    try:
        import sentencepiece
    except ImportError as error:
        raise UserError(
            "this tokenizer needs the package sentencepiece: python -m pip install 'transformer-jax[interop]'"
        ) from error
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
    except (RuntimeError, OSError, TypeError) as error:
        raise UserError(f"not a SentencePiece model: {first_line(error)}") from error
    return processor


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
        super().__init__("pretokenized", vocabulary, special)
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
