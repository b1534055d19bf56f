"""Read text, TSV and JSON lines: line ends, compressed files, and errors that name file and line."""

import gzip
import json
import lzma

import pytest
import zstandard

from transformer_jax.config import DataConfig
from transformer_jax.data.corpus import read_split
from transformer_jax.data.files import read_lines
from transformer_jax.types import UserError

PACK = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def read(folder, source="text", split="train", **fields):
    return read_split(DataConfig(source=source, directory=str(folder), **fields), split)


@pytest.mark.parametrize("suffix", PACK)
def test_plain_and_compressed_text(tmp_path, suffix):
    write(tmp_path, {f"train.{k}{suffix}": PACK[suffix](f"{k} 1\n{k} ü\n".encode()) for k in ("en", "de")})
    pairs = read(tmp_path)
    assert pairs.source == ["en 1", "en ü"]
    assert pairs.target == ["de 1", "de ü"]
    assert f"train.en{suffix}" in pairs.origin


def test_compressed_file_with_several_members(tmp_path):
    for suffix in (".gz", ".xz", ".zst"):
        write(tmp_path, {f"x{suffix}": PACK[suffix](b"one\n") + PACK[suffix](b"two\n")})
        assert read_lines(tmp_path / f"x{suffix}") == ["one", "two"]


def test_only_newline_ends_a_line(tmp_path):
    lines = ["a\x85b\u2028c\u2029d\x0be\x0cf\x1cg\x1dh\x1ei\rj", "", "\u00a0 k ", "\r"]
    write(tmp_path, {"lf": "\n".join(lines) + "\n", "crlf": "\r\n".join(lines) + "\r\n", "cut": "a\nb", "no": ""})
    assert read_lines(tmp_path / "crlf") == lines
    assert read_lines(tmp_path / "lf") == [*lines[:-1], ""]  # one "\r" at the end is dropped
    assert read_lines(tmp_path / "cut") == ["a", "b"]
    assert read_lines(tmp_path / "no") == []


def test_byte_order_mark_is_dropped_only_at_file_start(tmp_path):
    write(tmp_path, {"x": "\ufeffone\n\ufefftwo\n"})
    assert read_lines(tmp_path / "x") == ["one", "\ufefftwo"]


def test_empty_split_is_none(tmp_path):
    assert read(tmp_path, split="valid", valid="") is None


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (b"good\nbad \xff\n", "a\nb\n", r"train\.en, line 2: not valid UTF-8: byte 0xff at column 5"),
        ("a\nb\n", "a\nb\nc\n", r"train\.en and .*train\.de: 2 source sentences and 3 target"),
        ("", "", r"train\.en and .*train\.de: no sentence pairs"),
    ],
)
def test_invalid_parallel_text_is_rejected(tmp_path, source, target, message):
    write(tmp_path, {"train.en": source, "train.de": target})
    with pytest.raises(UserError, match=message):
        read(tmp_path)


def test_missing_and_duplicate_files_are_rejected(tmp_path):
    with pytest.raises(UserError, match=r"no file .*train\.en, .*train\.en\.gz, .*train\.en\.xz or .*train\.en\.zst"):
        read(tmp_path)
    write(tmp_path, {"train.en": "a\n", "train.en.gz": gzip.compress(b"a\n")})
    with pytest.raises(UserError, match=r"train\.en and .*train\.en\.gz both exist"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"nowhere: cannot be read: No such file"):
        read_lines(tmp_path / "nowhere")


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_damaged_compressed_file_is_rejected(tmp_path, suffix):
    packed = PACK[suffix](bytes(range(256)) * 40)
    for content in (packed[:-5], packed[:-1], packed[: len(packed) // 2], b"not packed\n", packed + b"rest", b""):
        write(tmp_path, {f"x{suffix}": content})
        with pytest.raises(UserError, match=rf"x{suffix}: damaged, cannot be unpacked: .+; fetch or pack it again"):
            read_lines(tmp_path / f"x{suffix}")


def test_tsv_by_name_and_by_number(tmp_path):
    write(tmp_path, {"train.tsv": 'de\tid\ten\n"ü\t1\ta"\nv\t2\tb\n', "bare.tsv.gz": gzip.compress(b"x\t1\ty\r\n")})
    pairs = read(tmp_path, "tsv")
    assert (pairs.source, pairs.target) == (['a"', "b"], ['"ü', "v"])
    pairs = read(tmp_path, "tsv", train="bare", source_column="3", target_column="1")
    assert (pairs.source, pairs.target) == (["y"], ["x"])


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("en\tde\na\tb\nc\n", {}, r"train\.tsv, line 3: 1 columns, but line 1 has 2"),
        ("en\tde\n", {"target_language": "fr"}, r"train\.tsv, line 1: no column 'fr' among \['en', 'de'\]"),
        ("en\tde\n", {"source_column": "1", "target_column": "3"}, r"line 1: no column '3' among \['en', 'de'\]"),
        ("en\tde\n", {"source_column": "1"}, "two names or two numbers"),
        ("en\tde\n", {"source_column": "9" * 5000, "target_column": "1"}, "two names or two numbers"),
    ],
)
def test_invalid_tsv_is_rejected(tmp_path, text, fields, message):
    write(tmp_path, {"train.tsv": text})
    with pytest.raises(UserError, match=message):
        read(tmp_path, "tsv", **fields)


def test_jsonl_flat_and_nested(tmp_path):
    rows = [{"en": "a\nb\r\nc", "de": "ü"}, {"translation": {"en": "d", "de": "e"}}]
    write(tmp_path, {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows)})
    pairs = read(tmp_path, "jsonl")
    assert (pairs.source, pairs.target) == (["a b c", "d"], ["ü", "e"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON: "),
        ("", "line 2: not JSON: "),
        ("[1]", r"line 2: \[1\]; each line must be a JSON object"),
        ('{"en": "a"}', r"line 2: no key 'de' among \['en'\]"),
        ('{"en": "a", "de": 3}', "line 2, key 'de' is 3; it must be text"),
        (r'{"en": "\ud800", "de": "a"}', "line 2, key 'en': not valid UTF-8: surrogates not allowed"),
    ],
)
def test_invalid_jsonl_is_rejected(tmp_path, line, message):
    write(tmp_path, {"train.jsonl": '{"en": "a", "de": "b"}\n' + line + "\n"})
    with pytest.raises(UserError, match=r"train\.jsonl, " + message):
        read(tmp_path, "jsonl")
