"""Subword tokenizers that come with imported models: SentencePiece and subword-nmt."""

import base64
import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from transformer_jax.data.tokenizer import Kind, SpecialIds, Tokenizer, WordTokenizer
from transformer_jax.runtime.files import read_text
from transformer_jax.types import UserError, library_errors

# The option `clean_up` removes the spaces around these, in this order.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class SentencePieceTokenizer(Tokenizer):
    """Pieces of a SentencePiece model (the bytes of a `.spm` file), with the ids of a separate vocabulary.

    A language code at the start of a text, such as `>>fra<<`, is one token. Ids need not be contiguous. `clean_up`
    removes spaces before punctuation in decoded text (`clean_up_tokenization_spaces`).
    """

    kind: Kind = "sentencepiece"
    unk_id: int
    _decodes_unk = False

    def __init__(
        self, model: bytes, vocabulary: Mapping[str, int], special: tuple[int, int, int, int], clean_up: bool = False
    ) -> None:
        self.model, self.clean_up = model, bool(clean_up)
        self.vocabulary = dict(vocabulary)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = special
        for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
            if type(getattr(self, name)) is not int:
                raise UserError(f"SentencePiece vocabulary: {name} is {getattr(self, name)!r}; it must be a number")
        invalid = {piece: i for piece, i in self.vocabulary.items() if type(i) is not int or i < 0}
        if invalid or not self.vocabulary:
            raise UserError(f"SentencePiece vocabulary: ids must be numbers from 0; found {invalid}")
        self._pieces = {i: piece for piece, i in self.vocabulary.items()}
        if len(self._pieces) != len(self.vocabulary):
            duplicates = sorted(piece for piece, i in self.vocabulary.items() if self._pieces[i] != piece)
            raise UserError(f"SentencePiece vocabulary: these pieces have ids of other pieces: {duplicates[:10]}")
        self.vocab_size = max(self._pieces) + 1
        self._ids = {piece: i for piece, i in self.vocabulary.items() if i not in special[:3]}
        try:
            import sentencepiece
        except ImportError as error:
            raise UserError(
                "this tokenizer needs the package sentencepiece: python -m pip install 'transformer-jax[interop]'"
            ) from error
        self._processor = sentencepiece.SentencePieceProcessor()
        with library_errors("not a SentencePiece model"):
            self._processor.LoadFromSerializedProto(model)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. Pieces and language codes outside the vocabulary give `unk_id`."""
        return [[self._ids.get(piece, self.unk_id) for piece in self._split(text)] for text in texts]

    def _split(self, text: str) -> list[str]:
        code, end, rest = text.partition("<<")
        if text.startswith(">>") and end:
            return [code + end, *self._processor.encode(rest, out_type=str)]
        return self._processor.encode(text, out_type=str)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row. `unk_id` gives no text, like the other special tokens."""
        pieces = [[self._pieces[i] for i in self._visible(row) if i in self._pieces] for row in rows]
        return [self._join_pieces(row) if row else "" for row in pieces]

    def _join_pieces(self, pieces: list[str]) -> str:
        text = self._processor.decode_pieces(pieces).replace("\u2581", " ").strip()  # the letter for a space in a piece
        for spaced in _CLEANED if self.clean_up else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def _token(self, i: int) -> str | None:
        return self._pieces.get(i)

    def _state(self) -> dict[str, object]:
        return {
            "special": self.special_ids,
            "vocabulary": self.vocabulary,
            "clean_up": self.clean_up,
            "model": base64.b64encode(self.model).decode("ascii"),
        }


_END = "</w>"  # follows the last letter of a word


class SubwordTokenizer(WordTokenizer):
    """Words between spaces, split by the merges of subword-nmt. "@@" marks all pieces but a word's last."""

    def __init__(self, merges: Sequence[tuple[str, str]], vocabulary: Sequence[str], special: SpecialIds) -> None:
        super().__init__("subword_nmt", vocabulary, special)
        self._merges = [(left, right) for left, right in merges]
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(self._merges)))}
        self._pieces = lru_cache(maxsize=100_000)(self._split_word)

    def plain(self, text: str) -> str:
        """Return the text with single spaces between its words, as `decode` would write it."""
        return " ".join(text.split())

    def _split(self, text: str) -> list[str]:
        return [piece for word in text.split() for piece in self._pieces(word)]

    def _split_word(self, word: str) -> tuple[str, ...]:
        stretch = len(word) if len(word) <= 1000 else 200  # the time is quadratic in the length of a stretch
        letters = [*word[:-1], word[-1] + _END]
        pieces = [p for start in range(0, len(word), stretch) for p in self._merge(letters[start : start + stretch])]
        return (*(f"{piece}@@" for piece in pieces[:-1]), pieces[-1].removesuffix(_END))

    def _merge(self, pieces: list[str]) -> list[str]:
        while len(pieces) > 1:
            best = min(itertools.pairwise(pieces), key=lambda pair: self._ranks.get(pair, len(self._ranks)))
            if best not in self._ranks:
                break
            merged: list[str] = []
            for piece in pieces:
                if merged and (merged[-1], piece) == best:
                    merged[-1] += piece
                else:
                    merged.append(piece)
            pieces = merged
        return pieces

    def _state(self) -> dict[str, object]:
        return super()._state() | {"special": self.special_ids, "merges": self._merges}


def read_codes(path: Path) -> list[tuple[str, str]]:
    """Read the merges of a codes file of subword-nmt ("left right" on each line) or fastBPE ("left right count")."""
    lines = read_text(path).removesuffix("\n").split("\n")
    has_version, version = lines[0].startswith("#version:"), lines[0].removeprefix("#version:").strip()
    if has_version and version != "0.2":
        raise UserError(f"{path}, line 1: codes of version {version}; only 0.2 is read")
    merges = []
    for number, line in enumerate(lines[has_version:], 1 + has_version):
        fields = line.split(" ")
        if len(fields) == 3 and fields[2].isdecimal():
            fields.pop()
        if len(fields) != 2 or not all(fields):
            raise UserError(f"{path}, line {number}: {line!r} is not a pair of pieces")
        merges.append((fields[0], fields[1]))
    if not has_version and not any(piece.endswith(_END) for pair in merges for piece in pair):
        raise UserError(f"{path}: no piece ends with {_END}; these are not codes of subword-nmt 0.2 or fastBPE")
    return merges
