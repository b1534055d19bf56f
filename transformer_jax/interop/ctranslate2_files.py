"""The files of a CTranslate2 folder: `model.bin` and the vocabularies.

They are read and written without the package `ctranslate2`. `model.bin` is a list of named arrays, little-endian:

| field                 | type                                                                |
|-----------------------|---------------------------------------------------------------------|
| binary version        | u32: 2 to 6 are read, 6 is written                                  |
| name of the model     | string: u16 length, bytes, a zero that the length includes          |
| revision              | u32                                                                 |
| variables             | u32, then for each: name, u8 rank, u32 dimensions, then             |
|   from version 4 on   | u8 type, u32 bytes, data                                            |
|   before              | u8 size of an item (implies the type), u32 items, data              |
| aliases, from 3 on    | u32, then for each: its name, the name of the variable it refers to |
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.exchange import OWN_TOKENIZER, ModelFields, Settings
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import read_text
from transformer_jax.types import UserError

_VERSIONS = range(2, 7)
_SPECS = ("TransformerSpec", "TransformerBase", "TransformerBig")
_REVISION = 7  # of TransformerSpec

_ITEM_BYTES = {"float32": 4, "int8": 1, "int16": 2, "int32": 4, "float16": 2, "bfloat16": 2}
_TYPES = dict(enumerate(_ITEM_BYTES))
_OLD_TYPES = {4: "float32", 1: "int8", 2: "int16"}
_MAX_RANK = 8
_PADDING = ("<pad>", "<blank>")


class _Reader:
    """Reads the bytes of a file in order, and reports where the file is truncated."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)

    def take(self, count: int, what: str) -> np.ndarray:
        """Return the next `count` bytes."""
        start = self._position
        if count > self.left:
            raise self.error(f"it ends within {what}: {count} bytes are needed at byte {start}, {self.left} are left")
        self._position += count
        return self._bytes[start : self._position]

    def number(self, kind: str, what: str) -> int:
        """Return the next number, of the `struct` type B, H or I."""
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(kind), what).tobytes())[0])

    def text(self, what: str) -> str:
        """Return the next string."""
        raw = self.take(self.number("H", what), what).tobytes()
        try:
            return raw.removesuffix(b"\0").decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def entries(self, what: str) -> Iterator[str]:
        """Yield the name of each entry of a list, which the caller reads up to the next name."""
        count = self.number("I", f"the number of {what}")
        if count > self.left:
            raise self.error(f"the number of {what} is {count}, more than the file has bytes")
        for _ in range(count):
            yield self.text(f"the name of one of the {what}")

    @property
    def left(self) -> int:
        """Number of bytes not read yet."""
        return len(self._bytes) - self._position

    def error(self, message: str) -> UserError:
        """Return an error that names the file."""
        return UserError(f"{self._path}: not a readable CTranslate2 model: {message}")


def read_model_file(path: Path) -> dict[str, np.ndarray]:
    """Read every array of a `model.bin` under its name and its aliases, memory-mapped. Weights must be float32."""
    require(path.is_file(), f"{path}: no such file")
    reader = _Reader(path)
    version = reader.number("I", "the binary version")
    if version not in _VERSIONS:
        legal = f"{_VERSIONS[0]} to {_VERSIONS[-1]}"
        raise reader.error(f"its binary version is {version}; versions {legal} are supported")
    spec, revision = reader.text("the name of the model"), reader.number("I", "the revision")
    if spec not in _SPECS:
        raise reader.error(f"it is a {spec!r:.60}; only {', '.join(_SPECS)} are supported")
    if not 1 <= revision <= _REVISION:
        raise reader.error(f"{spec} has revision {revision}; 1 to {_REVISION} are supported")
    variables: dict[str, np.ndarray] = {}
    for name in reader.entries("variables"):
        if name in variables:
            raise reader.error(f"it has {name} twice")
        variables[name] = _read_variable(reader, name, version)
    for alias in reader.entries("aliases") if version >= 3 else ():
        name = reader.text("the variable of an alias")
        if name not in variables or alias in variables:
            raise reader.error(f"the alias {alias} of {name} refers to no variable, or is a variable too")
        variables[alias] = variables[name]
    if reader.left:
        raise reader.error(f"{reader.left} bytes are left over")
    return variables


def _read_variable(reader: _Reader, name: str, version: int) -> np.ndarray:
    rank = reader.number("B", name)
    if rank > _MAX_RANK:
        raise reader.error(f"{name} has {rank} dimensions; at most {_MAX_RANK} are supported")
    shape = [reader.number("I", name) for _ in range(rank)]
    code = reader.number("B", name)
    kind = (_TYPES if version >= 4 else _OLD_TYPES).get(code)
    if kind is None:
        raise reader.error(f"{name} has the unknown type {code}")
    size = reader.number("I", name) * (1 if version >= 4 else _ITEM_BYTES[kind])
    expected = math.prod(shape) * _ITEM_BYTES[kind]
    if size != expected:
        raise reader.error(f"{name} has shape {shape} of {kind}, {expected} bytes, but its size is {size}")
    data = reader.take(expected, name)
    if rank and kind != "float32":
        raise reader.error(
            f"{name} holds {kind} weights; only float32 is supported. Convert the model again without --quantization"
        )
    if kind == "bfloat16":
        raise reader.error(f"{name} is a number of type bfloat16")
    return data.view(np.dtype(kind).newbyteorder("<")).reshape(shape)


def write_model_file(path: Path, variables: Mapping[str, np.ndarray], aliases: Mapping[str, str]) -> None:
    """Write a `model.bin` of the newest version, with further names of variables as {alias: name}."""

    def text(value: str) -> bytes:
        raw = value.encode("utf-8") + b"\0"
        return struct.pack("<H", len(raw)) + raw

    with path.open("wb") as file:
        file.write(struct.pack("<I", _VERSIONS[-1]) + text(_SPECS[0]) + struct.pack("<II", _REVISION, len(variables)))
        for name in sorted(variables):
            array = variables[name]
            code = list(_ITEM_BYTES).index(array.dtype.name)
            file.write(text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape))
            file.write(struct.pack("<BI", code, array.nbytes))
            file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        file.write(struct.pack("<I", len(aliases)))
        for alias in sorted(aliases):
            file.write(text(alias) + text(aliases[alias]))


def read_tokens(
    folder: Path, settings: Settings, source_rows: int, target_rows: int
) -> tuple[TokenizerPair, bool, ModelFields]:
    """Return the tokenizers, whether both sides share one vocabulary, and the special ids with the decoder's start.

    The padding of vocabularies without one gets the first id beyond the rows of both embedding tables.
    """
    unknown = settings.read("unk_token", str)
    source = _read_vocabulary(folder, "source", unknown, source_rows)
    target = _read_vocabulary(folder, "target", unknown, target_rows)
    eos_id, start_id = (_find(target, settings, name, folder) for name in ("eos_token", "decoder_start_token"))
    named = next((name for name in _PADDING if name in target and _index(source, name) == _index(target, name)), None)
    pad_id = max(source_rows, target_rows) if named is None else target.index(named)
    start = {pad_id: "pad", eos_id: "eos"}.get(start_id, "bos")
    bos_id = start_id if start == "bos" else _index(target, settings.read("bos_token", str))
    bos_id = eos_id if bos_id is None else bos_id
    unk_id = _index(source, unknown)
    for i in {pad_id, bos_id, eos_id}:
        if i < min(len(source), len(target)):
            problem = f"id {i} is {source[i]!r} in the source and {target[i]!r} in the target"
            require(source[i] == target[i], f"{folder}: {problem}, but both sides must have equal special ids")
    for name, wanted in (("bos", bos_id), ("eos", eos_id)):
        token = settings.read(f"{name}_token", str)
        found = _index(source, token)
        problem = f"but its id in the source vocabulary is {found} and model.{name}_id is {wanted}"
        is_legal = found == wanted or not settings.read(f"add_source_{name}", bool)
        require(is_legal, f"{folder}: add_source_{name} puts {token!r} into the source, {problem}")
    joint = source == target
    if (folder / OWN_TOKENIZER).is_dir():
        pair = TokenizerPair.load(folder / OWN_TOKENIZER)
        unk_id = pair.source.unk_id
    else:
        first = second = WordTokenizer("pretokenized", source, (pad_id, bos_id, eos_id, unk_id))
        if not joint:
            # A model has one id for unknown words. At another id of the target the unknown token is an ordinary one.
            target_unk = unk_id if _index(target, unknown) == unk_id else None
            second = WordTokenizer("pretokenized", target, (pad_id, bos_id, eos_id, target_unk))
        pair = TokenizerPair(first, second)
    ids = {"pad_id": pad_id, "bos_id": bos_id, "eos_id": eos_id, "unk_id": pad_id if unk_id is None else unk_id}
    return pair, joint, ids | {"decoder_start": start}


def _read_vocabulary(folder: Path, side: str, unknown: str, rows: int) -> list[str]:
    """Return the tokens of a side, with an unknown token appended if there is none and the table has a row for it."""
    files = [folder / f"{name}_vocabulary{ending}" for name in ("shared", side) for ending in (".json", ".txt")]
    path = next((file for file in files if file.is_file()), None)
    if path is None and list(folder.glob(f"{side}_vocabulary_*")):
        raise UserError(f"{folder}: the {side} has more than one vocabulary (factors); only one is supported")
    if path is None:
        raise UserError(f"{folder} has neither shared_vocabulary.json nor {side}_vocabulary.json (or .txt)")
    text = read_text(path)
    try:
        words = json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
    except ValueError as error:
        raise UserError(f"{path}: not a vocabulary: {error}") from error
    is_legal = isinstance(words, list) and all(isinstance(word, str) for word in words)
    require(is_legal, f"{path}: not a vocabulary: a list of tokens is needed")
    if len(set(words)) < len(words):
        duplicate = next(word for i, word in enumerate(words) if word in words[:i])
        raise UserError(f"{path}: has the token {duplicate!r} twice")
    if unknown not in words and len(words) < rows:
        words.append(unknown)
    require(len(words) <= rows, f"{path} has {len(words)} tokens, but the {side} table has {rows} rows")
    return words


def _index(words: Sequence[str], word: str) -> int | None:
    return words.index(word) if word in words else None


def _find(words: Sequence[str], settings: Settings, setting: str, folder: Path) -> int:
    word = settings.read(setting, str)
    require(word in words, f"{folder}: {setting} is {word!r}, which is not in the target vocabulary")
    return words.index(word)
