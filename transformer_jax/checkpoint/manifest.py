"""The SHA-256 of a checkpoint's files, so that damage is noticed: Orbax restores flipped bits without a word."""

import json
from pathlib import Path

from transformer_jax.runtime.files import file_sha256, write_atomically
from transformer_jax.types import UserError

NAME = "manifest.json"


class DamagedCheckpointError(UserError):
    """A checkpoint's files are not those that were written."""


def write_manifest(folder: Path) -> None:
    """Writes `manifest.json` into a checkpoint's folder: size and SHA-256 of every file in its subfolders.

    Files beside the manifest are Orbax's notes on the whole, which it writes last.
    """
    files = {name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for name, path in _files(folder).items()}
    write_atomically(folder / NAME, json.dumps({"files": files}, indent=1) + "\n")


def has_manifest(folder: Path) -> bool:
    """Whether the checkpoint was whole once."""
    return (folder / NAME).is_file()


def verify(folder: Path) -> None:
    """Reads every file of a checkpoint and compares it with the manifest.

    Raises:
        DamagedCheckpointError: the first file that is missing or not as it was written, or the manifest itself.
    """
    try:
        written = json.loads((folder / NAME).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in written.items()}
    except FileNotFoundError:
        raise DamagedCheckpointError(f"the checkpoint {folder} is damaged: it has no {NAME}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"the checkpoint {folder} is damaged: {NAME} is not readable") from error
    found = _files(folder)  # only what is found here is opened, whatever names the manifest has
    for name, (size, sha256) in expected.items():
        if name not in found:
            raise DamagedCheckpointError(f"the checkpoint {folder} is damaged: {name} is missing")
        if found[name].stat().st_size != size:
            raise DamagedCheckpointError(
                f"the checkpoint {folder} is damaged: {name} has {found[name].stat().st_size} bytes, not {size}"
            )
        if file_sha256(found[name]) != sha256:
            raise DamagedCheckpointError(
                f"the checkpoint {folder} is damaged: {name} does not hold what was written (its SHA-256 differs)"
            )


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.glob("*/**/*")) if path.is_file()}
