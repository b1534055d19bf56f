"""Damage of any kind to a checkpoint's files is detected and named."""

import json

import pytest
from checkpoint_cases import flip, replace_by_folder

from transformer_jax.checkpoint.checkpoint import write_checkpoint_manifest
from transformer_jax.checkpoint.manifest import MANIFEST, DamagedFileError, verify
from transformer_jax.types import UserError

DATA, METRICS = "state/d/data", "metrics/metrics"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "7"
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "metrics").mkdir()
    (folder / DATA).write_bytes(bytes(range(256)) * 5)
    (folder / METRICS).write_text('{"valid_loss": 1.0}')
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    write_checkpoint_manifest(folder)
    verify(folder)
    return folder


UNREADABLE = f"{MANIFEST} is not readable"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (DATA, flip, f"{DATA} does not hold what was written"),
        (DATA, lambda path: path.write_bytes(b"x" * 10), f"{DATA} has 10 bytes, expected 1280"),
        (METRICS, lambda path: path.unlink(), "metrics/metrics is missing"),
        (DATA, replace_by_folder, f"{DATA} is not a file"),
        (MANIFEST, lambda path: path.unlink(), f"it has no {MANIFEST}"),
        (MANIFEST, replace_by_folder, UNREADABLE),
        (MANIFEST, lambda path: path.write_text("{"), UNREADABLE),
        (MANIFEST, lambda path: path.write_text('{"files": {"a": 1}}'), UNREADABLE),
        (MANIFEST, lambda path: path.write_text("[]"), UNREADABLE),
        (MANIFEST, lambda path: path.write_bytes(b"\xff"), UNREADABLE),
    ],
)
def test_damage_raises_error_with_file(folder, name, damage, message):
    damage(folder / name)
    with pytest.raises(DamagedFileError, match=f"{folder} is damaged: {message}"):
        verify(folder)
    assert issubclass(DamagedFileError, UserError)


def test_every_byte_of_a_file_is_covered(folder):
    path = folder / METRICS
    original = path.read_bytes()
    for byte, value in enumerate(original):
        path.write_bytes(original[:byte] + bytes([value ^ 1 << byte % 8]) + original[byte + 1 :])
        with pytest.raises(DamagedFileError, match="metrics/metrics does not hold"):
            verify(folder)


def test_only_named_files_are_compared(folder):
    flip(folder / DATA)
    verify(folder, [METRICS])
    (folder / "unlisted").write_text("1")
    with pytest.raises(DamagedFileError, match="unlisted has 1 bytes, expected none"):
        verify(folder, ["unlisted"])


def test_files_next_to_the_subfolders_are_not_covered(folder):
    (folder / "_CHECKPOINT_METADATA").write_text("another time")
    (folder / "state" / ".DS_Store").write_text("")
    verify(folder)


@pytest.mark.parametrize("name", ["../secret", "{tmp_path}/secret"])
def test_names_in_manifest_open_no_file_outside(folder, tmp_path, name):
    name = name.format(tmp_path=tmp_path)
    (tmp_path / "secret").write_text("")
    manifest = json.loads((folder / MANIFEST).read_text())
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    manifest["files"][name] = {"bytes": 0, "sha256": empty}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DamagedFileError, match=f"{name} is missing"):
        verify(folder)
