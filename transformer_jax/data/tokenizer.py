"""From text to token ids and back: byte pairs, words, or text that is cut into pieces already.

Ids 0 to 3 are `types.SPECIAL_TOKENS`. No text gives the id of a special token, except that words outside the
vocabulary give `unk_id`: a sentence that contains "</s>" cannot end early.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from transformer_jax.types import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, UserError

logger = logging.getLogger(__name__)

Kind = Literal["bpe", "word", "pretokenized", "sentencepiece", "subword_nmt"]

_BYTES = 256


class Tokenizer(ABC):
    """Text to ids and back. Encoding adds no special token; `batching.make_batch` does.

    Attributes:
        kind: bpe, word or pretokenized.
        vocab_size: number of ids, special ones included.
        pad_id, bos_id, eos_id, unk_id: the special ids; unk_id None: what is not in the vocabulary is an error.
    """

    kind: Kind
    vocab_size: int
    pad_id: int = PAD_ID
    bos_id: int = BOS_ID
    eos_id: int = EOS_ID
    unk_id: int | None = UNK_ID

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""

    @abstractmethod
    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of ids. PAD, BOS and EOS give nothing, as do ids that are not in the vocabulary."""

    def plain(self, text: str) -> str:
        """The text as `decode` would write it: a corpus's references, to be compared with translations."""
        return text

    @abstractmethod
    def tokens(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id as the vocabulary spells it, for display."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The piece of each id for people to read: a space as \u2581; what cannot be seen, and bytes that are no whole
        letter, as Python escapes them."""
        return [_visible_piece(piece) for piece in self.tokens(ids)]

    @abstractmethod
    def to_json(self) -> str:
        """The whole tokenizer; the reverse is `tokenizer_from_json`."""

    def _visible(self, row: Sequence[int]) -> list[int]:
        hidden = {self.pad_id, self.bos_id, self.eos_id}
        return [int(i) for i in row if 0 <= i < self.vocab_size and i not in hidden]


class BytePairTokenizer(Tokenizer):
    """Byte pair encoding over UTF-8 bytes: any text comes back as it was, and nothing is unknown.

    Args:
        library: the JSON of the library `tokenizers`, without added tokens: those would be found in text.
    """

    kind: Kind = "bpe"

    def __init__(self, library: dict[str, Any]) -> None:
        self._library = tokenizers.Tokenizer.from_str(json.dumps(library | {"added_tokens": []}))
        self.vocab_size = self._library.get_vocab_size()
        if max(self._library.get_vocab().values(), default=0) >= self.vocab_size:
            raise ValueError(f"the ids of {self.vocab_size} entries must be 0 to {self.vocab_size - 1}")

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Bytes that are not UTF-8 give U+FFFD; `unk_id` gives nothing."""
        visible = [[i for i in self._visible(row) if i != self.unk_id] for row in rows]
        return self._library.decode_batch(visible, skip_special_tokens=False)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each piece with its bytes as the letters of GPT-2's table: a space is \u0120."""
        return [self._library.id_to_token(int(i)) or f"<{int(i)}>" for i in ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        special = (self.pad_id, self.bos_id, self.eos_id, self.unk_id)
        rows = zip(ids, self.tokens(ids), strict=True)
        return [_visible_piece(piece if i in special else _from_bytes(piece)) for i, piece in rows]

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "library": json.loads(self._library.to_str())}, ensure_ascii=False)


class WordTokenizer(Tokenizer):
    """Words between white space, joined by one space again; or pieces between spaces, "@@ " joins them again.

    Args:
        kind: word or pretokenized.
        vocabulary: the word of each id, special tokens included.
        special: the ids of PAD, BOS, EOS and of unknown words; None for the last: there is no such id.
    """

    def __init__(
        self,
        kind: Literal["word", "pretokenized"],
        vocabulary: Sequence[str],
        special: tuple[int, int, int, int | None] = (PAD_ID, BOS_ID, EOS_ID, UNK_ID),
    ) -> None:
        self.kind = kind
        self.vocab_size = len(vocabulary)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = special
        self._vocabulary = list(vocabulary)
        self._ids = {word: i for i, word in enumerate(self._vocabulary) if i not in special}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Words outside the vocabulary give `unk_id`.

        Raises:
            UserError: there are some, and the vocabulary has no `unk_id`.
        """
        return [[self._id(word, line) for word in _words(self.kind, text)] for line, text in enumerate(texts, 1)]

    def _id(self, word: str, line: int) -> int:
        found = self._ids.get(word, self.unk_id)
        if found is None:
            raise UserError(
                f"text {line}: {word!r} is not in the vocabulary, and this vocabulary has no token for unknown words"
            )
        return found

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """`unk_id` gives "<unk>": it stands for a word."""
        return [self._join(self.tokens(self._visible(row))) for row in rows]

    def plain(self, text: str) -> str:
        return self._join(_words(self.kind, text))

    def _join(self, words: Sequence[str]) -> str:
        line = " ".join(words)
        # The joints of subword-nmt: "wal@@ king" is "walking"; one at the end of a line joins nothing.
        return line if self.kind == "word" else re.sub("@@( |$)", "", line)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [self._vocabulary[i] if 0 <= i < self.vocab_size else f"<{int(i)}>" for i in ids]

    def to_json(self) -> str:
        tree: dict[str, Any] = {"kind": self.kind, "vocabulary": self._vocabulary}
        special = [self.pad_id, self.bos_id, self.eos_id, self.unk_id]
        if special != [PAD_ID, BOS_ID, EOS_ID, UNK_ID]:
            tree["special"] = special
        return json.dumps(tree, ensure_ascii=False)


def train_tokenizer(kind: Kind, texts: Iterable[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` ids, special ones included; the same for the same texts.

    Args:
        kind: bpe, word or pretokenized.
        texts: the training sentences, of both sides if the vocabulary is joint.
        vocab_size: the limit. The rarest words beyond it become unknown, of equally rare ones the last in the alphabet.
        min_frequency: rarer words become unknown; rarer byte pairs are not merged.

    Raises:
        UserError: bpe with a vocabulary too small for the 256 bytes; a kind that only comes with an imported model.
    """
    if kind == "bpe":
        return _train_byte_pairs(texts, vocab_size, min_frequency)
    if kind not in ("word", "pretokenized"):
        raise UserError(
            f"tokenizer.kind is {kind!r}: such a vocabulary comes with an imported model (training.init_from); "
            "bpe, word and pretokenized are trained here"
        )
    counts = Counter(word for text in texts for word in _words(kind, text))
    known = sorted((w for w, n in counts.items() if n >= min_frequency), key=lambda word: (-counts[word], word))
    kept = known[: max(0, vocab_size - len(SPECIAL_TOKENS))]
    if len(kept) < len(counts):
        share = sum(counts[word] for word in kept) / counts.total()
        logger.warning(
            "%d of %d different words kept (model.vocab_size %d, tokenizer.min_frequency %d): %.2f %% of the text; "
            "the others are unknown",
            *(len(kept), len(counts), vocab_size, min_frequency, 100 * share),
        )
    return WordTokenizer(kind, [*SPECIAL_TOKENS, *kept])


def _train_byte_pairs(texts: Iterable[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    least = len(SPECIAL_TOKENS) + _BYTES
    if vocab_size < least:
        raise UserError(
            f"model.vocab_size is {vocab_size}; byte pairs need at least {least}: "
            f"{len(SPECIAL_TOKENS)} special tokens and {_BYTES} bytes"
        )
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(_cut_long(texts), trainer)
    return BytePairTokenizer(json.loads(library.to_str()))


def _cut_long(texts: Iterable[str]) -> Iterator[str]:
    """Texts beyond 10,000 characters in pieces of 1,000: the trainer needs time with the square of a word's length, so
    that one word of a megabyte would take it days."""
    for text in texts:
        if len(text) <= 10_000:
            yield text
        else:
            yield from (text[start : start + 1_000] for start in range(0, len(text), 1_000))


# The letter that stands for each byte in a vocabulary of byte pairs.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


def _from_bytes(piece: str) -> str:
    """A byte-level piece as text; one that is spelled in other letters, such as "<300>", stays."""
    if not _BYTE_OF.keys() >= set(piece):
        return piece
    return bytes(_BYTE_OF[letter] for letter in piece).decode("utf-8", "backslashreplace")


def _visible_piece(piece: str) -> str:
    """The piece with nothing in it that cannot be seen."""
    shown = piece.replace(" ", "\u2581")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def _words(kind: Kind, text: str) -> list[str]:
    if kind == "word":
        return text.split()
    return [piece for piece in text.split(" ") if piece]  # other white space is part of a piece
