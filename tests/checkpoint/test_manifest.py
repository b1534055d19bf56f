"""Damage of any kind to a checkpoint's files is detected and named."""

import json

import pytest

from transformer_jax.checkpoint.checkpoint import write_checkpoint_manifest
from transformer_jax.checkpoint.manifest import MANIFEST, DamagedFileError, verify
from transformer_jax.types import UserError

DATA = "state/d/data"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "7"
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "metrics").mkdir()
    (folder / DATA).write_bytes(bytes(range(256)) * 5)
    (folder / "metrics" / "metrics").write_text('{"valid_loss": 1.0}')
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    write_checkpoint_manifest(folder)
    verify(folder)
    return folder


def flip(path, byte=700, bit=3):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: flip(folder / DATA), f"{DATA} does not hold what was written"),
        (lambda folder: (folder / DATA).write_bytes(b"x" * 10), f"{DATA} has 10 bytes, expected 1280"),
        (lambda folder: (folder / "metrics" / "metrics").unlink(), "metrics/metrics is missing"),
        (lambda folder: replace_by_folder(folder / DATA), f"{DATA} is not a file"),
        (lambda folder: (folder / MANIFEST).unlink(), f"it has no {MANIFEST}"),
        (lambda folder: replace_by_folder(folder / MANIFEST), f"{MANIFEST} is not readable"),
        (lambda folder: (folder / MANIFEST).write_text("{"), f"{MANIFEST} is not readable"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {"a": 1}}'), f"{MANIFEST} is not readable"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), f"{MANIFEST} is not readable"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff"), f"{MANIFEST} is not readable"),
    ],
)
def test_damage_raises_error_with_file(folder, harm, message):
    harm(folder)
    with pytest.raises(DamagedFileError, match=f"{folder} is damaged: {message}"):
        verify(folder)
    assert issubclass(DamagedFileError, UserError)


def test_every_bit_of_a_file_is_covered(folder):
    path = folder / "metrics" / "metrics"
    original = path.read_bytes()
    for byte in range(len(original)):
        flip(path, byte, byte % 8)
        with pytest.raises(DamagedFileError, match="metrics/metrics does not hold"):
            verify(folder)
        path.write_bytes(original)
    verify(folder)


def test_only_named_files_are_compared(folder):
    flip(folder / DATA)
    verify(folder, ["metrics/metrics"])
    (folder / "unlisted").write_text("1")
    with pytest.raises(DamagedFileError, match="unlisted has 1 bytes, expected none"):
        verify(folder, ["unlisted"])


@pytest.mark.parametrize("name", ["../secret", "{tmp_path}/secret"])
def test_names_in_manifest_open_no_file_outside(folder, tmp_path, name):
    name = name.format(tmp_path=tmp_path)
    (folder / "_CHECKPOINT_METADATA").write_text("another time")
    (folder / "state" / ".DS_Store").write_text("")
    verify(folder)
    (tmp_path / "secret").write_text("")
    manifest = json.loads((folder / MANIFEST).read_text())
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest["files"][name] = {"bytes": 0, "sha256": empty}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DamagedFileError, match=f"{name} is missing"):
        verify(folder)
