"""The vocabularies of a CTranslate2 folder: lists of tokens, of which a few are special by their name."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.folder_files import OWN_TOKENIZER
from transformer_jax.interop.imported import Start
from transformer_jax.types import UserError

PADDING = ("<pad>", "<blank>")


class Tokens(NamedTuple):
    """The tokenizers of a folder and the special ids of its model."""

    pair: TokenizerPair
    joint: bool
    """Whether both sides have one vocabulary."""
    start: Start
    """`model.decoder_start`, unless the decoder starts from zeros."""
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int | None


def read_tokens(folder: Path, settings: Mapping[str, Any], source_rows: int, target_rows: int) -> Tokens:
    """Reads the vocabularies.

    Where they have no padding, its id is the first that lies beyond the rows of both tables.

    Args:
        folder: the folder.
        settings: its `config.json`.
        source_rows, target_rows: of the embedding tables.

    Raises:
        UserError: files that are missing or damaged; special tokens that the two sides have at different places.
    """
    unknown = settings["unk_token"]
    source = _read(folder, "source", unknown, source_rows)
    target = _read(folder, "target", unknown, target_rows)
    eos_id = _find(target, settings["eos_token"], folder, "eos_token")
    start_id = _find(target, settings["decoder_start_token"], folder, "decoder_start_token")
    named = next((name for name in PADDING if name in target and _place(source, name) == _place(target, name)), None)
    pad_id = max(source_rows, target_rows) if named is None else target.index(named)
    bos_id = _place(target, settings["bos_token"])
    start: Start = "bos"
    if start_id == eos_id:
        start = "eos"
    elif start_id == pad_id:
        start = "pad"
    else:
        bos_id = start_id
    bos_id = eos_id if bos_id is None else bos_id
    unk_id = _place(source, unknown)
    for i in {pad_id, bos_id, eos_id}:
        if i < min(len(source), len(target)) and source[i] != target[i]:
            raise UserError(
                f"{folder}: id {i} is {source[i]!r} in the source and {target[i]!r} in the target; both "
                "sides have the same special ids here"
            )
    if settings["add_source_eos"] and _place(source, settings["eos_token"]) != eos_id:
        raise UserError(f"{folder}: the source vocabulary has {settings['eos_token']!r} at another id than {eos_id}")
    if (folder / OWN_TOKENIZER).is_dir():
        pair = TokenizerPair.load(folder / OWN_TOKENIZER)
        return Tokens(pair, source == target, start, pad_id, bos_id, eos_id, pair.source.unk_id)
    first = WordTokenizer("pretokenized", source, (pad_id, bos_id, eos_id, unk_id))
    if source == target:
        return Tokens(TokenizerPair(first, first), True, start, pad_id, bos_id, eos_id, unk_id)
    # A model has one id for what is unknown; at another place in the target it is a token like others.
    target_unk = unk_id if _place(target, unknown) == unk_id else None
    second = WordTokenizer("pretokenized", target, (pad_id, bos_id, eos_id, target_unk))
    return Tokens(TokenizerPair(first, second), False, start, pad_id, bos_id, eos_id, unk_id)


def _read(folder: Path, side: str, unknown: str, rows: int) -> list[str]:
    """A vocabulary. Without a token for unknown ones it gets one, if the table has a row for it."""
    for name in ("shared_vocabulary", f"{side}_vocabulary"):
        for ending in (".json", ".txt"):
            path = folder / (name + ending)
            if path.is_file():
                words = _words(path)
                if unknown not in words and len(words) < rows:
                    words.append(unknown)
                if len(words) > rows:
                    raise UserError(f"{path} has {len(words)} tokens, and the {side} table {rows} rows")
                return words
    if list(folder.glob(f"{side}_vocabulary_*")):
        raise UserError(f"{folder}: the {side} has more than one vocabulary (factors); the model here has one")
    raise UserError(f"{folder} has neither shared_vocabulary.json nor {side}_vocabulary.json (or .txt)")


def _words(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
        words = json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
    except ValueError as error:
        raise UserError(f"{path}: not a vocabulary: {error}") from error
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{path}: not a vocabulary: a list of tokens is needed")
    if len(set(words)) < len(words):
        twice = next(word for i, word in enumerate(words) if word in words[:i])
        raise UserError(f"{path}: has the token {twice!r} twice")
    return words


def _place(words: Sequence[str], word: str) -> int | None:
    return words.index(word) if word in words else None


def _find(words: Sequence[str], word: str, folder: Path, setting: str) -> int:
    if word not in words:
        raise UserError(f"{folder}: {setting} is {word!r}, which the target vocabulary does not have")
    return words.index(word)
