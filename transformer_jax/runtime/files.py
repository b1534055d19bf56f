"""Read, write and check files: atomic replacement of files and folders, JSON, and SHA-256."""

import errno
import hashlib
import json
import math
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError

try:
    import fcntl
except ImportError:  # Windows, where nothing prevents two processes from writing the same folder
    fcntl = None  # type: ignore[assignment]  # the module or None, which mypy cannot express

JsonObject = dict[str, Any]
"""A JSON object as Python reads it. `read_json` checks that there is one; whoever reads a field checks its value."""

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class FolderInUseError(UserError):
    """Another process is writing the same folder."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the text of a UTF-8 file."""
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError; a null byte in the path
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path) -> JsonObject:
    """Return the JSON object in a UTF-8 file, or raise UserError if it cannot be read or holds something else."""
    text = read_text(path)
    tree = parse_json(text, path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: not a JSON object: {text[:40]!r}")
    return tree


def read_json_lines(path: Path) -> list[JsonObject]:
    """Return the JSON objects of a file with one per line, without damaged lines. A missing file has no lines."""
    text = read_text(path, errors="replace") if path.exists() else ""
    rows: list[object] = []
    for line in text.split("\n"):  # not splitlines(): a JSON string may contain other line separators
        with suppress(UserError):
            rows.append(parse_json(line, path))
    return [row for row in rows if isinstance(row, dict)]


def parse_json(text: str, origin: str | Path) -> object:
    """Return the value of JSON text, or raise a UserError that names the origin of the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{origin}: not JSON: {error}") from error


def to_json(tree: object, indent: int | None = None) -> str:
    """Return a tree of dicts, lists and scalars as JSON, on one line unless `indent` is given.

    Numbers that are not finite become null, because JSON has no notation for them.

    >>> to_json({"perplexity": float("inf"), "text": "ä"})
    '{"perplexity": null, "text": "ä"}'
    """
    text = json.dumps(_finite(tree), ensure_ascii=False, allow_nan=False, indent=indent)
    # UTF-8 cannot encode a lone surrogate, so it is written as an escape sequence.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(tree: object) -> object:
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def write_atomically(path: Path, text: str) -> None:
    """Write a UTF-8 file so that readers, even after a crash, find either the old text or the new text.

    Symbolic links are followed. Lines end in a line feed on every system. A terminal, a pipe or another device, and
    what standard output is connected to, are written directly.
    """
    with write_errors(path):
        if _is_stdout(path):
            sys.stdout.flush()
            _write(os.dup(1), text)  # continues where standard output is
        elif _is_device(path):
            _write(path, text)
        else:
            final = Path(os.path.realpath(path))
            temporary = final.with_name(final.name + ".tmp")
            _write(temporary, text)
            temporary.replace(final)


def check_writable(path: Path) -> None:
    """Check, before work that takes long, that its result can be written to a file; otherwise raise UserError."""
    if _is_stdout(path) or _is_device(path):
        return
    parent, problem = Path(os.path.realpath(path)).parent, f"{path}: cannot be written"
    require(not os.path.isdir(path), f"{problem}: {os.strerror(errno.EISDIR)}")
    require(os.path.isdir(parent), f"{problem}: there is no folder {parent}")
    require(os.access(parent, os.W_OK | os.X_OK), f"{problem}: no permission to write into the folder {parent}")


def _write(file: Path | int, text: str) -> None:
    with open(file, "w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            os.fsync(stream.fileno())


def _is_stdout(path: Path) -> bool:
    return sys.stdout is not None and _is_same(1, path)


def _is_device(path: Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed or the process ends. Return False if another process holds it."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # other errors come from file systems without locks
        return not isinstance(error, BlockingIOError)
    return True


@contextmanager
def atomic_dir(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the block ends without an exception.

    Readers find either no folder, the old folder, or the complete new folder. Only one process at a time can write
    `path`: the claim is a lock of the operating system on the yielded folder, so it ends with the process.
    Parents of `path` are created, and a symbolic link is followed. A folder that is not empty needs `replace`.

    Of the block's own errors, only those of the yielded folder's disk become a UserError.
    """
    final, unfinished = path.resolve(), unfinished_dir(path)
    old = final.with_name(f".{final.name}.old")
    with ExitStack() as claim:
        with write_errors(path):
            final.parent.mkdir(parents=True, exist_ok=True)
            claim.enter_context(_claimed(unfinished, path))
            if old.exists() and not final.exists():  # an earlier process was killed between the two renames below
                old.rename(final)
            if final.exists():
                require(final.is_dir(), f"{path}: exists and is not a folder; choose another output")
                require(replace or not any(final.iterdir()), f"{path}: exists already; choose another output")
        try:
            yield unfinished
        except OSError as error:
            if error.errno in _DISK_ERRORS and _concerns(error, unfinished):
                raise _write_error(path, error) from error
            raise
        with write_errors(path):
            shutil.rmtree(old, ignore_errors=True)
            if replace and final.exists():
                final.rename(old)
            try:
                unfinished.rename(final)
            except OSError:
                if old.exists():
                    old.rename(final)
                raise
            shutil.rmtree(old, ignore_errors=True)


def unfinished_dir(path: Path) -> Path:
    """Return the folder that `atomic_dir(path)` yields."""
    final = path.resolve()
    return final.with_name(f".{final.name}.unfinished")


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise an OSError as a UserError that names the path."""
    try:
        yield
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> UserError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = ". Free disk space and run the command again" if is_full else ""
    return UserError(f"{path}: cannot be written: {error.strerror or error}{fix}")


def _concerns(error: OSError, folder: Path) -> bool:
    """Return whether an error names a file in the folder, or no file."""
    name = error.filename
    return not isinstance(name, str | bytes) or Path(os.fsdecode(name)).resolve().is_relative_to(folder)


@contextmanager
def _claimed(folder: Path, path: Path) -> Iterator[None]:
    """Create an empty folder and hold an exclusive lock on it. Delete the folder if it still exists at the end."""
    handle = _lock_folder(folder, path)
    try:
        for entry in folder.iterdir():  # left by a process that was killed
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        yield
    finally:
        if handle is None or _is_same(handle, folder):  # otherwise it was renamed
            shutil.rmtree(folder, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _lock_folder(folder: Path, path: Path) -> int | None:
    """Create a folder. Return the file descriptor that holds its lock, or None where folders cannot be locked."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # another process has just finished and renamed the folder
            continue
        except OSError:  # Windows does not open folders
            return None
        if not try_lock(handle):
            os.close(handle)
            raise FolderInUseError(f"{path}: another process is writing it; choose another output")
        if _is_same(handle, folder):
            return handle
        os.close(handle)


def _is_same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:  # no such file, or the handle is closed
        return False
