"""SentencePiece models as Marian uses them: the model cuts text into pieces, a vocabulary of its own numbers them."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformer_jax.data.segmentation import Kind, Tokenizer
from transformer_jax.errors import UserError, first_line

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
