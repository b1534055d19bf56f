"""Atomic files and folders, and JSON that is truncated, damaged or missing."""

import _pyio
import errno
import fcntl
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from transformer_jax.runtime import files
from transformer_jax.runtime.files import (
    FolderInUseError,
    atomic_dir,
    read_json,
    read_json_lines,
    unfinished_dir,
    write_atomically,
)
from transformer_jax.types import UserError

ROOT = Path(__file__).resolve().parents[2]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_open_reader_keeps_old_text_when_file_is_replaced(tmp_path):
    path = tmp_path / "file.json"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new ö")
        assert path.read_text(encoding="utf-8") == "new ö"
        assert reader.read() == "old"
    assert names(tmp_path) == ["file.json"]
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half, then \udc80")
    assert path.read_text(encoding="utf-8") == "new ö"


def test_write_to_folder_or_missing_parent_raises_user_error(tmp_path):
    (tmp_path / "folder").mkdir()
    for path, reason in ((tmp_path / "folder", "Is a directory"), (tmp_path / "none" / "file", "No such file")):
        with pytest.raises(UserError, match=f"{path}: cannot be written: {reason}"):
            write_atomically(path, "text")


def test_full_disk_error_names_file_and_fix(tmp_path, monkeypatch):
    def fail(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=r"a: cannot be written: No space left on device. Free disk space and run"):
        write_atomically(tmp_path / "a", "text")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b'{"a": ', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "cannot be read as UTF-8 text"),
        (b"[1]", r"not a JSON object: '\[1\]'"),
        (None, "No such file"),
        ("folder", "Is a directory"),
    ],
)
def test_unreadable_json_raises_user_error_with_path(tmp_path, data, message):
    path = tmp_path / "file.json"
    if data == "folder":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)
    with pytest.raises(UserError, match=f"{path}: .*{message}"):
        read_json(path)


def test_json_lines_skip_damaged_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert read_json_lines(path) == []
    path.write_bytes('{"a": 1}\n{"text": "one\u2028line"}\n[1]\n\xff\n{"b": \n{"c": 2}'.encode())
    assert read_json_lines(path) == [{"a": 1}, {"text": "one\u2028line"}, {"c": 2}]
    with pytest.raises(UserError, match="Is a directory"):
        read_json_lines(tmp_path)


def test_folder_appears_complete_or_not_at_all(tmp_path):
    path = tmp_path / "parent" / "out"
    with suppress(ZeroDivisionError), atomic_dir(path) as folder:
        (folder / "a").write_text("1")
        assert not path.exists()
        raise ZeroDivisionError
    assert names(path.parent) == []
    with atomic_dir(path) as folder:
        (folder / "a").write_text("1")
    assert names(path) == ["a"]
    with atomic_dir(path, replace=True) as folder:
        assert names(path) == ["a"]
        (folder / "b").write_text("2")
    assert (names(path.parent), names(path)) == (["out"], ["b"])


def test_old_folder_is_restored_when_rename_fails(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "a").write_text("1")
    rename = files.Path.rename

    def fail(self, target):
        if self == unfinished_dir(path):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(files.Path, "rename", fail)
    with pytest.raises(UserError, match=r"out: cannot be written: Input/output error"), atomic_dir(path, replace=True):
        pass
    assert (names(tmp_path), names(path)) == (["out"], ["a"])


def test_leftovers_of_a_killed_process_are_restored_or_removed(tmp_path):
    """The first process was killed between the two renames, the second one while it was writing."""
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "a").write_text("1")
    left = unfinished_dir(tmp_path / "out")
    (left / "folder").mkdir(parents=True)
    (left / "file").write_text("")
    with suppress(ZeroDivisionError), atomic_dir(tmp_path / "out", replace=True) as folder:
        assert names(folder) == []
        raise ZeroDivisionError
    assert names(tmp_path / "out") == ["a"]


def test_exactly_one_of_two_writers_wins(tmp_path):
    path = tmp_path / "out"
    with atomic_dir(path) as folder:
        for replace in (False, True):
            with (
                pytest.raises(FolderInUseError, match="another process is writing it"),
                atomic_dir(path, replace=replace),
            ):
                pytest.fail("two writers of one folder")
        (folder / "a").write_text("1")
    assert names(path) == ["a"]
    with pytest.raises(UserError, match="exists already"), atomic_dir(path):
        pytest.fail("a late writer replaced the folder")


def test_racing_writers_leave_one_complete_folder(tmp_path):
    path, outcomes, start = tmp_path / "out", [], threading.Barrier(8)

    def write(number):
        start.wait()
        try:
            with atomic_dir(path) as folder:
                for name in "abc":
                    (folder / name).write_text(str(number))
            outcomes.append("won")
        except UserError:
            outcomes.append("lost")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]
    assert len({(path / name).read_text() for name in "abc"}) == 1
    assert names(tmp_path) == ["out"]


def test_file_systems_without_locks_are_supported(tmp_path, monkeypatch):
    def fail(handle, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    with atomic_dir(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert names(tmp_path) == ["out"]


def test_newlines_are_the_same_bytes_on_every_system(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "linesep", "\r\n")
    monkeypatch.setattr(files, "open", _pyio.open, raising=False)  # _pyio reads os.linesep at run time
    write_atomically(tmp_path / "a", "one\ntwo\n")
    assert (tmp_path / "a").read_bytes() == b"one\ntwo\n"


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/file")  # its target does not exist before the first write
    for text in ("old", "new"):
        write_atomically(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (names(tmp_path / "real"), (tmp_path / "real" / "file").read_text()) == (["file"], text)


def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(pipe, "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert (names(tmp_path), pipe.is_fifo()) == (["pipe"], True)


PRINTING = """
import pathlib
import sys
from transformer_jax.runtime.files import write_atomically
print("before")
write_atomically(pathlib.Path(sys.argv[1]), "text\\n")
print("after")
"""


@pytest.mark.parametrize("to_file", [False, True])
def test_a_link_to_standard_output_is_written_in_order(tmp_path, to_file):
    link = tmp_path / "stdout"  # like /dev/stdout, which a failing test must not replace
    link.symlink_to("/proc/self/fd/1")
    command = [sys.executable, "-c", PRINTING, str(link)]
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out if to_file else subprocess.PIPE, text=True, check=True)
    assert link.is_symlink()
    text = (tmp_path / "out").read_text() if to_file else done.stdout
    assert text == "before\ntext\nafter\n"


def test_errors_in_the_block_are_not_attributed_to_the_output(tmp_path):
    for error in (FileNotFoundError(2, "No such file", "input"), OSError(5, "Input/output error", "/input")):
        with pytest.raises(type(error), match=str(error.strerror)) as caught, atomic_dir(tmp_path / "out"):
            raise error
        assert caught.value is error
    assert names(tmp_path) == []


@pytest.mark.parametrize("inside", [True, False], ids=["filename inside", "no filename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_in_the_block_is_a_user_error(tmp_path, number, inside):
    reason = os.strerror(number)
    with pytest.raises(UserError, match=f"out: cannot be written: {reason}"), atomic_dir(tmp_path / "out") as folder:
        raise OSError(number, reason, str(folder / "a") if inside else None)
    assert names(tmp_path) == []


def test_a_file_is_not_replaced_by_a_folder(tmp_path):
    (tmp_path / "out").write_text("1")
    with pytest.raises(UserError, match="out: exists and is not a folder"), atomic_dir(tmp_path / "out", replace=True):
        pytest.fail("the path is not free")
    assert (names(tmp_path), (tmp_path / "out").read_text()) == (["out"], "1")
