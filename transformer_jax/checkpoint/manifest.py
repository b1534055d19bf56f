"""Detect damaged files: a manifest holds the size and SHA-256 of every file in a folder that decides a result.

Orbax and JSON readers accept many flipped bits without an error, so files are compared with the manifest before use.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from transformer_jax.runtime.files import JsonObject, file_sha256, read_json, to_json, write_atomically
from transformer_jax.types import UserError, first_line

T = TypeVar("T")

MANIFEST = "manifest.json"


class DamagedFileError(UserError):
    """A file of a run or of a checkpoint is not the file that was written."""


class Checksum(NamedTuple):
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of_file(cls, path: Path) -> "Checksum":
        """Return the checksum of a file on disk."""
        return cls(path.stat().st_size, file_sha256(path))


def write_manifest(folder: Path, files: Mapping[str, Iterable[Checksum]]) -> None:
    """Write a manifest of file names and the contents each may have: two while a file is replaced, otherwise one."""
    tree = {name: [checksum._asdict() for checksum in accepted] for name, accepted in files.items()}
    write_atomically(folder / MANIFEST, to_json({"files": tree}, indent=1) + "\n")


def write_checksums(folder: Path, paths: Iterable[Path]) -> None:
    """Write a manifest with the checksums of files in a folder as they are. Paths that are no files are left out."""
    files = {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
    write_manifest(folder, {name: [Checksum.of_file(path)] for name, path in sorted(files.items())})


def write_verified(folder: Path, texts: Mapping[str, str]) -> None:
    """Write files by name and text, in this order, and record their checksums. A kill leaves a valid folder."""
    manifest = read_manifest(folder) if (folder / MANIFEST).exists() else {}
    contents = {name: text.encode() for name, text in texts.items()}
    new = {name: [Checksum(len(data), hashlib.sha256(data).hexdigest())] for name, data in contents.items()}
    # Until an existing file is replaced, its old content is accepted as well. A new file is listed once it exists.
    existing = {name: [*new[name], Checksum.of_file(folder / name)] for name in texts if (folder / name).is_file()}
    if existing:
        write_manifest(folder, manifest | existing)
    for name, text in texts.items():
        write_atomically(folder / name, text)
    write_manifest(folder, manifest | new)


def read_manifest(folder: Path) -> dict[str, list[Checksum]]:
    """Return the manifest of a folder, or raise DamagedFileError if it is missing or damaged."""
    path = folder / MANIFEST
    if not path.exists():
        raise DamagedFileError(f"{folder} is damaged: it has no {MANIFEST}")
    try:
        entries = read_json(path)["files"].items()
        # Layout 1 has one checksum for each file.
        lists = {str(name): [entry] if isinstance(entry, dict) else entry for name, entry in entries}
        return {name: [Checksum(int(one["bytes"]), str(one["sha256"])) for one in ones] for name, ones in lists.items()}
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(f"{folder} is damaged: {MANIFEST} is not readable") from error


def verify(folder: Path, names: Iterable[str] | None = None) -> None:
    """Raise DamagedFileError unless the named files of a folder, or all that its manifest lists, agree with it.

    Names that lead out of the folder are never opened.
    """
    files = read_manifest(folder)
    for name in files if names is None else names:
        path, accepted = folder / name, files.get(name, [])
        if ".." in Path(name).parts or Path(name).is_absolute() or not path.exists():
            raise DamagedFileError(f"{folder} is damaged: {name} is missing")
        if not path.is_file():
            raise DamagedFileError(f"{folder} is damaged: {name} is not a file")
        size = path.stat().st_size
        if size not in {checksum.bytes for checksum in accepted}:
            expected = " or ".join(str(checksum.bytes) for checksum in accepted) or "none"
            raise DamagedFileError(f"{folder} is damaged: {name} has {size} bytes, expected {expected}")
        if Checksum.of_file(path) not in accepted:
            problem = f"{name} does not hold what was written (its SHA-256 differs)"
            raise DamagedFileError(f"{folder} is damaged: {problem}. Restore the file")


def read_verified(folder: Path, name: str, parse: Callable[[JsonObject], T], content: str) -> T | None:
    """Return what `parse` makes of a JSON object, after comparing its file with the folder's manifest.

    Return None if the manifest does not list the file. An error of `parse` becomes a UserError that states the
    expected `content`.
    """
    if name not in read_manifest(folder):
        return None
    verify(folder, [name])
    tree = read_json(folder / name)
    try:
        return parse(tree)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / name}: not {content}: {first_line(error)}") from error
