"""Read sentence pairs from files: two parallel text files, tab-separated values, or JSON lines; also compressed."""

import codecs
import io
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_jax.config import DataConfig
from transformer_jax.data.pairs import Pairs, Split, check_column, clean_sentence, column_names
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import parse_json
from transformer_jax.types import UserError


def read_text(config: DataConfig, split: Split) -> Pairs:
    """Read `{directory}/STEM.{language}` for both languages, with one sentence per line. `config.{split}` is STEM."""
    paths = [_find(config, split, language) for language in (config.source_language, config.target_language)]
    return Pairs(read_lines(paths[0]), read_lines(paths[1]), f"{paths[0]} and {paths[1]}")


def read_tsv(config: DataConfig, split: Split) -> Pairs:
    """Read two tab-separated columns of `{directory}/STEM.tsv`, in which quotes are text.

    The first line names the columns, unless `data.source_column` and `data.target_column` are numbers (from 1).
    """
    path = _find(config, split, "tsv")
    wanted = column_names(config)
    rows = [line.split("\t") for line in read_lines(path) or [""]]
    first = rows[0]
    numbered = [name.isdecimal() and len(name) < 10 for name in wanted]
    if any(numbered) and not all(numbered):
        raise UserError(f"data.source_column, data.target_column are {wanted}: give two names or two numbers")
    if all(numbered):
        places = [int(name) - 1 for name in wanted]
    else:
        places = [first.index(name) if name in first else -1 for name in wanted]
    for name, place in zip(wanted, places, strict=True):
        if not 0 <= place < len(first):
            raise UserError(
                f"{path}, line 1: no column {name!r} among {first}; set data.source_column and data.target_column to "
                "names, or to numbers from 1 if the file has no line of names"
            )
    for number, row in enumerate(rows, 1):
        if len(row) != len(first):
            raise UserError(f"{path}, line {number}: {len(row)} columns, but line 1 has {len(first)}")
    source, target = ([row[place] for row in rows[not all(numbered) :]] for place in places)
    return Pairs(source, target, str(path))


def read_jsonl(config: DataConfig, split: Split) -> Pairs:
    """Read two keys of each object in `{directory}/STEM.jsonl`, or of the object under its key `translation`."""
    path = _find(config, split, "jsonl")
    names = column_names(config)
    sides: tuple[list[str], list[str]] = ([], [])
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        row = parse_json(line, where)
        if isinstance(row, dict) and isinstance(row.get("translation"), dict):
            row = row["translation"]
        if not isinstance(row, dict):
            raise UserError(f"{where}: {line:.80}; each line must be a JSON object")
        for name, side in zip(names, sides, strict=True):
            check_column(name, row, where, "key")
            side.append(clean_sentence(row[name], f"{where}, key {name!r}"))
    return Pairs(sides[0], sides[1], str(path))


def read_lines(path: Path) -> list[str]:
    r"""Return the lines of a UTF-8 text file, unpacked if its name ends with .gz, .xz or .zst. Only "\n" ends a line.

    One "\r" before it is dropped, and so is a byte-order mark at the start of the file.
    """
    lines = []
    for number, line in enumerate(io.BytesIO(_read_bytes(path).removeprefix(codecs.BOM_UTF8)), 1):
        try:
            text = line.removesuffix(b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}, line {number}: not valid UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}; "
                "convert the file to UTF-8"
            ) from error
        lines.append(text.removesuffix("\r"))
    return lines


def _read_bytes(path: Path) -> bytes:
    """Return the decompressed content of a file. Damage anywhere in the file is an error before any line is used."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        if path.suffix == ".gz":
            return _unpack(data, lambda: zlib.decompressobj(wbits=31))  # 31: with gzip's header and checksum
        if path.suffix == ".xz":
            return _unpack(data, lzma.LZMADecompressor)
        if path.suffix == ".zst":
            import zstandard

            return _unpack(data, zstandard.ZstdDecompressor().decompressobj)
    except Exception as error:  # each library has its own
        raise UserError(f"{path}: damaged, cannot be unpacked: {error}; fetch or pack it again") from error
    return data


def _unpack(data: bytes, decompressor: Callable[[], Any]) -> bytes:
    """Decompress all parts of a file. Unlike the libraries' own readers, this detects truncation and trailing bytes."""
    parts = []
    while True:
        part = decompressor()
        parts.append(part.decompress(data))
        if not part.eof:
            raise EOFError("it ends too early")
        data = part.unused_data.lstrip(b"\0")  # gzip and xz allow zeros after a part
        if not data:
            return b"".join(parts)


def _find(config: DataConfig, split: Split, suffix: str) -> Path:
    """Return the path of the split's file with this suffix, and with or without a suffix for compression."""
    name = f"{getattr(config, split)}.{suffix}"
    paths = [Path(config.directory).expanduser() / (name + packed) for packed in ("", ".gz", ".xz", ".zst")]
    found = [path for path in paths if path.is_file()]
    require(len(found) < 2, f"{' and '.join(map(str, found))} both exist; remove all but one")
    if not found:
        raise UserError(
            f"no file {', '.join(map(str, paths[:-1]))} or {paths[-1]}; the docstring of the config says how to get "
            "the data, and data.directory, data.train, data.valid and data.test where it is looked for"
        )
    return found[0]
