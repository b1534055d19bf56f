"""Damage of any kind to a checkpoint's files is noticed and named."""

import json

import pytest

from transformer_jax.checkpoint.manifest import NAME, DamagedCheckpointError, has_manifest, verify, write_manifest
from transformer_jax.types import UserError


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "7"
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "metrics").mkdir()
    (folder / "state" / "d" / "data").write_bytes(bytes(range(256)) * 5)
    (folder / "metrics" / "metrics").write_text('{"valid_loss": 1.0}')
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    assert not has_manifest(folder)
    write_manifest(folder)
    assert has_manifest(folder)
    verify(folder)
    return folder


def flip(path, byte=700, bit=3):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: flip(folder / "state" / "d" / "data"), r"state/d/data does not hold what was written"),
        (
            lambda folder: (folder / "state" / "d" / "data").write_bytes(b"x" * 10),
            "state/d/data has 10 bytes, not 1280",
        ),
        (lambda folder: (folder / "metrics" / "metrics").unlink(), "metrics/metrics is missing"),
        (lambda folder: (folder / NAME).unlink(), f"it has no {NAME}"),
        (lambda folder: (folder / NAME).write_text("{"), f"{NAME} is not readable"),
        (lambda folder: (folder / NAME).write_text('{"files": {"a": 1}}'), f"{NAME} is not readable"),
        (lambda folder: (folder / NAME).write_text("[]"), f"{NAME} is not readable"),
        (lambda folder: (folder / NAME).write_bytes(b"\xff"), f"{NAME} is not readable"),
    ],
)
def test_damage_is_named(folder, harm, said):
    harm(folder)
    with pytest.raises(DamagedCheckpointError, match=f"the checkpoint {folder} is damaged: {said}"):
        verify(folder)
    assert issubclass(DamagedCheckpointError, UserError)


def test_every_single_bit_of_a_file_counts(folder):
    path = folder / "metrics" / "metrics"
    whole = path.read_bytes()
    for byte in range(len(whole)):
        flip(path, byte, byte % 8)
        with pytest.raises(DamagedCheckpointError, match="metrics/metrics does not hold"):
            verify(folder)
        path.write_bytes(whole)
    verify(folder)


def test_what_stands_beside_the_manifest_may_change_and_names_in_it_open_nothing(folder, tmp_path):
    (folder / "_CHECKPOINT_METADATA").write_text("another time")
    (folder / "state" / ".DS_Store").write_text("")
    verify(folder)
    (tmp_path / "secret").write_text("")
    manifest = json.loads((folder / NAME).read_text())
    manifest["files"]["../secret"] = {
        "bytes": 0,
        "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }
    (folder / NAME).write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpointError, match=r"\.\./secret is missing"):
        verify(folder)
