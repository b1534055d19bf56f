"""Turn text into token ids and back: byte pairs, words, text that is already tokenized, and `tokenizer.json` files.

No text gives the id of PAD, BOS or EOS, so a sentence that contains "</s>" cannot end early.
"""

import json
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from transformer_jax.types import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, UNK_ID, UserError, library_errors

logger = logging.getLogger(__name__)

Kind = Literal["bpe", "word", "pretokenized", "sentencepiece", "subword_nmt", "huggingface"]
SpecialIds = tuple[int, int, int, int | None]
"""Ids of PAD, BOS, EOS and unknown words. None: text outside the vocabulary is an error."""


class Tokenizer(ABC):
    """Convert text to token ids and back. `encode` adds no special tokens; `batching.make_batch` adds them.

    Two tokenizers are equal if they give the same ids to every text. `unk_id` is None if unknown text is an error.
    """

    kind: Kind
    vocab_size: int
    pad_id: int = PAD_ID
    bos_id: int = BOS_ID
    eos_id: int = EOS_ID
    unk_id: int | None = UNK_ID
    _decodes_unk: bool = True
    _is_byte_level: bool = False  # whether tokens spell bytes with the letters of GPT-2's table

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens."""

    @abstractmethod
    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids. PAD, BOS, EOS and ids outside the vocabulary give no text."""

    @abstractmethod
    def _token(self, i: int) -> str | None:
        """Return the token with id `i` as the vocabulary spells it, or None."""

    @abstractmethod
    def _state(self) -> dict[str, object]:
        """Return the fields that `to_json` writes in addition to the kind."""

    def plain(self, text: str) -> str:
        """Return the text as `decode` would write it, to compare references with translations."""
        return text

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the token of each id as the vocabulary spells it. Ids outside the vocabulary give "<ID>"."""
        tokens = ((i, self._token(int(i))) for i in ids)
        return [f"<{int(i)}>" if token is None else token for i, token in tokens]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the tokens for display: \u2581 for a space, and anything invisible escaped as in Python."""
        tokens = self.tokens(ids)
        if self._is_byte_level:
            special = self.special_ids
            tokens = [token if i in special else _from_bytes(token) for i, token in zip(ids, tokens, strict=True)]
        return [_visible_piece(token) for token in tokens]

    def to_json(self) -> str:
        """Return the complete tokenizer as JSON, which `tokenizer_pair.tokenizer_from_json` reads."""
        return json.dumps({"kind": self.kind} | self._state(), ensure_ascii=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and (self is other or self.to_json() == other.to_json())

    def __hash__(self) -> int:
        return hash((self.kind, self.vocab_size))

    @property
    def special_ids(self) -> SpecialIds:
        """Ids of PAD, BOS, EOS and unknown words."""
        return self.pad_id, self.bos_id, self.eos_id, self.unk_id

    def _visible(self, row: Sequence[int]) -> list[int]:
        hidden = {self.pad_id, self.bos_id, self.eos_id} if self._decodes_unk else {*self.special_ids}
        return [int(i) for i in row if 0 <= i < self.vocab_size and i not in hidden]


class _LibraryTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`."""

    _library: tokenizers.Tokenizer

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [row.ids for row in self._library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self._library.decode_batch([self._visible(row) for row in rows], skip_special_tokens=True)

    def _token(self, i: int) -> str | None:
        return self._library.id_to_token(i) or None

    def _state(self) -> dict[str, object]:
        return {"library": json.loads(self._library.to_str())}


class BytePairTokenizer(_LibraryTokenizer):
    """Byte pair encoding over UTF-8 bytes: any text round-trips, and nothing is unknown.

    Added tokens in `library`, the JSON of the library `tokenizers`, are dropped because text could contain them.
    """

    kind: Kind = "bpe"
    _decodes_unk = False
    _is_byte_level = True

    def __init__(self, library: dict[str, object]) -> None:
        self._library = tokenizers.Tokenizer.from_str(json.dumps(library | {"added_tokens": []}))
        self.vocab_size = self._library.get_vocab_size()
        if max(self._library.get_vocab().values(), default=0) >= self.vocab_size:
            raise ValueError(f"the ids of {self.vocab_size} entries must be 0 to {self.vocab_size - 1}")


_SPECIAL_NAMES = {
    "PAD": ("<pad>", "[PAD]", "<PAD>", "<|pad|>", "<blank>"),
    "BOS": ("<s>", "[BOS]", "[SOS]", "<bos>", "<sos>", "<BOS>", "<SOS>", "[START]", "<start>", "[CLS]"),
    "EOS": ("</s>", "[EOS]", "<eos>", "<EOS>", "[END]", "<end>", "<|endoftext|>", "[SEP]"),
    "UNK": ("<unk>", "[UNK]", "<UNK>"),
}
"""Usual names of special tokens in `tokenizer.json` files; the first name that a file has counts."""


class HuggingFaceTokenizer(_LibraryTokenizer):
    """A `tokenizer.json` file of the library `tokenizers`, with any of its models (BPE, Unigram, WordLevel, WordPiece).

    A special token that occurs in the text is encoded as ordinary text. The file's padding and truncation are ignored.
    If `special` is None, the special tokens are found by their usual names. BOS may be missing, and is then PAD.
    """

    kind: Kind = "huggingface"

    def __init__(self, library: dict[str, object], special: SpecialIds | None = None) -> None:
        with library_errors("not a tokenizer.json that the library tokenizers reads"):
            self._library = tokenizers.Tokenizer.from_str(json.dumps(library))
        self._library.no_padding()
        self._library.no_truncation()
        self._library.encode_special_tokens = True
        self.vocab_size = max(self._library.get_vocab().values(), default=-1) + 1
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = special or self._find_special_ids()
        self._is_byte_level = "ByteLevel" in json.dumps(library.get("decoder"))

    def _find_special_ids(self) -> SpecialIds:
        added = {token.content: i for i, token in self._library.get_added_tokens_decoder().items()}
        vocabulary = self._library.get_vocab()

        def find(role: str) -> int | None:
            names = _SPECIAL_NAMES[role]
            return next((ids[name] for ids in (added, vocabulary) for name in names if name in ids), None)

        pad_id, bos_id, eos_id, unk_id = map(find, ("PAD", "BOS", "EOS", "UNK"))
        if pad_id is None or eos_id is None:
            role = "PAD" if pad_id is None else "EOS"
            raise UserError(
                f"the tokenizer has no {role} token under a usual name ({', '.join(_SPECIAL_NAMES[role])}); its added "
                f"tokens are {sorted(added, key=added.__getitem__)[:20]}. Rename the token in the file to one of these"
            )
        return pad_id, pad_id if bos_id is None else bos_id, eos_id, unk_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. PAD, BOS and EOS written in the text are unknown words, or are left out."""
        with library_errors("the tokenizer cannot encode the text"):
            rows = super().encode(texts)
        hidden = {self.pad_id, self.bos_id, self.eos_id}
        for number, row in enumerate(rows):
            if not hidden.isdisjoint(row):
                ids = (self.unk_id if i in hidden else i for i in row)
                rows[number] = [i for i in ids if i is not None]
        return rows

    def _state(self) -> dict[str, object]:
        return {"special": self.special_ids} | super()._state()


class WordTokenizer(Tokenizer):
    """Split text at white space into words, or at spaces into subwords that subword-nmt marked with "@@"."""

    def __init__(
        self, kind: Kind, vocabulary: Sequence[str], special: SpecialIds = (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
    ) -> None:
        self.kind = kind
        self.vocab_size = len(vocabulary)
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = special
        self._vocabulary = list(vocabulary)
        self._ids = {word: i for i, word in enumerate(self._vocabulary) if i not in special}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text. Words outside the vocabulary give `unk_id`."""
        return [[self._id(word, line) for word in self._split(text)] for line, text in enumerate(texts, 1)]

    def _split(self, text: str) -> list[str]:
        return _words(self.kind, text)

    def _id(self, word: str, line: int) -> int:
        word_id = self._ids.get(word, self.unk_id)
        if word_id is None:
            raise UserError(
                f"text {line}: {word!r} is not in the vocabulary, and this vocabulary has no token for unknown words"
            )
        return word_id

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of ids. An unknown word is kept as the vocabulary's token for `unk_id`."""
        return [self._join([self._vocabulary[i] for i in self._visible(row)]) for row in rows]

    def plain(self, text: str) -> str:
        """Return the text with single spaces between its words, as `decode` would write it."""
        return self._join(_words(self.kind, text))

    def _join(self, words: Sequence[str]) -> str:
        line = " ".join(words)
        # subword-nmt writes "walking" as "wal@@ king". A mark at the end of a line joins nothing.
        return line if self.kind == "word" else re.sub("@@( |$)", "", line)

    def _token(self, i: int) -> str | None:
        return self._vocabulary[i] if 0 <= i < self.vocab_size else None

    def _state(self) -> dict[str, object]:
        is_default = self.special_ids == (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
        return {"vocabulary": self._vocabulary} | ({} if is_default else {"special": self.special_ids})


def train_tokenizer(kind: Kind, texts: Iterable[str], vocab_size: int, min_frequency: int) -> Tokenizer:
    """Train a tokenizer of at most `vocab_size` ids, including special tokens. The result is deterministic.

    If there are too many words, the rarest become unknown; ties drop the last in alphabetical order. Words rarer than
    `min_frequency` also become unknown, and byte pairs rarer than `min_frequency` are not merged.
    """
    if kind == "bpe":
        return _train_byte_pairs(texts, vocab_size, min_frequency)
    if kind not in ("word", "pretokenized"):
        raise UserError(
            f"tokenizer.kind is {kind!r}, and such a tokenizer only comes with an imported model: set "
            "training.init_from to that model, or tokenizer.kind to bpe, word or pretokenized"
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
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise UserError(
            f"model.vocab_size is {vocab_size}; byte pairs need at least {smallest}: "
            f"{len(SPECIAL_TOKENS)} special tokens and 256 bytes"
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
    library.train_from_iterator(_split_long(texts), trainer)
    return BytePairTokenizer(json.loads(library.to_str()))


def _split_long(texts: Iterable[str]) -> Iterator[str]:
    """Split very long texts: the trainer's time is quadratic in a word's length, days for a megabyte."""
    for text in texts:
        size = 10_000 if len(text) <= 10_000 else 1_000
        yield from (text[start : start + size] for start in range(0, len(text), size))


# The letter that stands for each byte in a vocabulary of byte pairs.
_PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(_PRINTABLE)))}


def _from_bytes(piece: str) -> str:
    """Return a byte-level piece as text. A piece with other letters, such as "<300>", is returned unchanged."""
    if not _BYTE_OF.keys() >= set(piece):
        return piece
    return bytes(_BYTE_OF[letter] for letter in piece).decode("utf-8", "backslashreplace")


def _visible_piece(piece: str) -> str:
    """Return the piece with invisible characters escaped."""
    shown = piece.replace(" ", "\u2581")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def _words(kind: Kind, text: str) -> list[str]:
    if kind == "word":
        return text.split()
    return [piece for piece in text.split(" ") if piece]  # other white space is part of a piece
