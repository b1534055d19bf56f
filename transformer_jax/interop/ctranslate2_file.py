"""CTranslate2's `model.bin`: a list of named arrays, little-endian, without any dependence on that package.

| field                 | type                                                                |
|-----------------------|---------------------------------------------------------------------|
| binary version        | u32: 2 to 6 are read, 6 is written                                  |
| name of the model     | string: u16 length, bytes, a zero that is counted                   |
| revision              | u32                                                                 |
| variables             | u32, then for each: name, u8 rank, u32 dimensions, then             |
|   from version 4 on   | u8 type, u32 bytes, data                                            |
|   before              | u8 size of an item (the type follows), u32 items, data              |
| aliases, from 3 on    | u32, then for each: its name, the name of the variable that it is   |
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer_jax.types import UserError

BINARY_VERSIONS = range(2, 7)
SPECS = ("TransformerSpec", "TransformerBase", "TransformerBig")
REVISION = 7  # of TransformerSpec

_TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_OLD_TYPES = {4: "float32", 1: "int8", 2: "int16"}
_ITEM_BYTES = {"float32": 4, "int8": 1, "int16": 2, "int32": 4, "float16": 2, "bfloat16": 2}
_MAX_RANK = 8


class ModelFile(NamedTuple):
    """What a `model.bin` holds."""

    variables: dict[str, np.ndarray]
    """Every array under its name and its aliases; weights are float32."""
    spec: str
    """The name of the model."""
    revision: int
    """Of the names of the variables."""


class _Reader:
    """Reads on through the bytes of a file; says where it ends too early."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)

    def take(self, count: int, what: str) -> np.ndarray:
        """The next `count` bytes."""
        if count > self.left:
            raise self.error(f"it ends within {what}: {count} bytes are needed at byte {self._place}, {self.left} left")
        self._place += count
        return self._bytes[self._place - count : self._place]

    def number(self, kind: str, what: str) -> int:
        """The next number; `kind` is B, H or I as the module `struct` has them."""
        return int(struct.unpack(f"<{kind}", self.take(struct.calcsize(kind), what).tobytes())[0])

    def text(self, what: str) -> str:
        """The next string."""
        raw = self.take(self.number("H", what), what).tobytes()
        try:
            return raw.removesuffix(b"\0").decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return len(self._bytes) - self._place

    def error(self, message: str) -> UserError:
        """What to say of this file."""
        return UserError(f"{self._path}: not a readable CTranslate2 model: {message}")


def read_model_file(path: Path) -> ModelFile:
    """Reads a `model.bin`. Its weights stay in the file until they are looked at.

    Raises:
        UserError: no such file; it is damaged, of another version or another kind of model, or its weights are not
            float32: the type is named.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    reader = _Reader(path)
    version = reader.number("I", "the binary version")
    if version not in BINARY_VERSIONS:
        raise reader.error(f"its binary version is {version}; {BINARY_VERSIONS[0]} to {BINARY_VERSIONS[-1]} are read")
    spec, revision = reader.text("the name of the model"), reader.number("I", "the revision")
    if spec not in SPECS:
        raise reader.error(f"it is a {spec!r:.60}; only {', '.join(SPECS)} are read")
    if not 1 <= revision <= REVISION:
        raise reader.error(f"{spec} has revision {revision}; 1 to {REVISION} are read")
    variables: dict[str, np.ndarray] = {}
    for _ in range(_count(reader, "the number of variables")):
        name = reader.text("the name of a variable")
        if name in variables:
            raise reader.error(f"it has {name} twice")
        variables[name] = _read_variable(reader, name, version)
    if version >= 3:
        for _ in range(_count(reader, "the number of aliases")):
            alias, name = reader.text("an alias"), reader.text("the variable of an alias")
            if name not in variables or alias in variables:
                raise reader.error(f"the alias {alias} of {name} leads nowhere, or is a variable too")
            variables[alias] = variables[name]
    if reader.left:
        raise reader.error(f"{reader.left} bytes are left over")
    return ModelFile(variables, spec, revision)


def _count(reader: _Reader, what: str) -> int:
    count = reader.number("I", what)
    if count > reader.left:
        raise reader.error(f"{what} is {count}, more than there are bytes")
    return count


def _read_variable(reader: _Reader, name: str, version: int) -> np.ndarray:
    rank = reader.number("B", name)
    if rank > _MAX_RANK:
        raise reader.error(f"{name} has {rank} dimensions; at most {_MAX_RANK} are read")
    shape = tuple(reader.number("I", name) for _ in range(rank))
    code = reader.number("B", name)
    kind = _OLD_TYPES.get(code) if version < 4 else dict(enumerate(_TYPES)).get(code)
    if kind is None:
        raise reader.error(f"{name} has the unknown type {code}")
    count = reader.number("I", name)
    size = count if version >= 4 else count * _ITEM_BYTES[kind]
    wanted = math.prod(shape) * _ITEM_BYTES[kind]
    if size != wanted:
        raise reader.error(f"{name} has shape {list(shape)} of {kind}, {wanted} bytes, and {size} are given")
    data = reader.take(wanted, name)
    if rank and kind != "float32":
        raise UserError(
            f"{reader.error(name)} holds {kind} weights; only float32 can be used: convert the model again without "
            "--quantization"
        )
    if kind == "bfloat16":
        raise reader.error(f"{name} is a number of type bfloat16")
    return data.view(np.dtype(kind).newbyteorder("<")).reshape(shape)


def write_model_file(path: Path, variables: Mapping[str, np.ndarray], aliases: Mapping[str, str]) -> None:
    """Writes a `model.bin` of the newest version.

    Args:
        path: the file.
        variables: arrays of float32 or small integers.
        aliases: further names: {alias: name}.
    """

    def text(value: str) -> bytes:
        raw = value.encode("utf-8") + b"\0"
        return struct.pack("<H", len(raw)) + raw

    with path.open("wb") as file:
        file.write(struct.pack("<I", BINARY_VERSIONS[-1]) + text(SPECS[0]) + struct.pack("<I", REVISION))
        file.write(struct.pack("<I", len(variables)))
        for name in sorted(variables):
            array = variables[name]
            shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
            file.write(text(name) + shape + struct.pack("<BI", _TYPES.index(array.dtype.name), array.nbytes))
            file.write(
                np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data if array.ndim else array.tobytes()
            )
        file.write(struct.pack("<I", len(aliases)))
        for alias in sorted(aliases):
            file.write(text(alias) + text(aliases[alias]))
