"""Every file that affects results is checked: damage raises an error that names the file."""

import errno
import io
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from checkpoint_cases import flip, garble, replace_by_file, replace_by_folder, truncate

import transformer_jax
from transformer_jax.checkpoint.checkpoint import METRICS, resolve_checkpoint, save_params
from transformer_jax.checkpoint.manifest import MANIFEST
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.evaluate import average
from transformer_jax.types import UserError


@pytest.fixture
def run(tiny, tmp_path):
    return RunDir(tiny.copy(tmp_path / "run"))


def translate(run, checkpoint="last"):
    return Translator.load(run.path, checkpoint=checkpoint).translate(["a"])


# File, damage, use of the run, message. test_manifest.py has each kind of damage to a file with a checksum.
DAMAGES = [
    ("tokenizer/joint.json", flip, "last", r"tokenizer/joint.json does not hold what was written"),
    ("tokenizer/joint.json", flip, "train", r"tokenizer/joint.json does not hold what was written"),
    ("tokenizer", replace_by_file, "last", r"tokenizer/joint.json is missing"),
    ("config.json", flip, "last", r"config.json does not hold what was written"),
    ("config.json", flip, "train", r"config.json does not hold what was written"),
    ("config.json", replace_by_folder, "last", r"config.json is not a file"),
    ("data.sha256", flip, "train", r"data.sha256 does not hold what was written"),
    ("format", lambda path: path.write_text("0\n"), "last", r"format does not hold what was written"),
    ("format", garble, "last", r"format: cannot be read as UTF-8"),
    ("format", replace_by_folder, "last", r"format: cannot be read: Is a directory"),
    ("lock", replace_by_folder, "train", r"lock: cannot be opened: Is a directory"),
    (MANIFEST, flip, "last", r"is damaged"),
    (MANIFEST, Path.unlink, "last", r"it has no manifest.json"),
    (f"checkpoints/4/{METRICS}", flip, "best", r"checkpoints/4 is damaged: metrics/metrics does not hold"),
    (f"checkpoints/2/{METRICS}", flip, "best", r"checkpoints/2 is damaged: metrics/metrics does not hold"),
    (f"checkpoints/2/{METRICS}", Path.unlink, "best", r"metrics/metrics is missing"),
    (f"checkpoints/4/{MANIFEST}", garble, "last", r"manifest.json is not readable"),
    ("checkpoints/4/state/_METADATA", replace_by_folder, "last", r"state/_METADATA is not a file"),
    ("checkpoints", replace_by_file, "last", r"has no checkpoint yet"),
    (f"average/{MANIFEST}", Path.unlink, "average", r"average is damaged: it has no manifest.json"),
    ("average/state/_METADATA", flip, "average", r"average is damaged: state/_METADATA does not hold"),
    ("average", replace_by_file, "average", r"has no averaged checkpoint"),
]


@pytest.mark.parametrize(
    ("name", "damage", "use", "message"), DAMAGES, ids=[f"{name}-{use}-{message}" for name, _, use, message in DAMAGES]
)
def test_damaged_file_raises_error_that_names_it(run, tiny, name, damage, use, message):
    if name.startswith("average"):
        average(run.path, last=2)
    damage(run.path / name)
    with pytest.raises(UserError, match=message) as error:
        transformer_jax.train(tiny.config, run.path) if use == "train" else translate(run, use)
    assert str(run.path) in str(error.value)


@pytest.mark.parametrize("damage", [flip, truncate, garble, replace_by_folder])
@pytest.mark.parametrize("strict", [False, True])
def test_damaged_metrics_of_an_older_checkpoint_move_it_aside(run, tiny, damage, strict):
    """`strict` concerns the newest checkpoint, from which training resumes."""
    damage(run.checkpoints / "2" / METRICS)
    with pytest.warns(UserWarning, match=rf"2 is damaged: metrics/metrics .* moved to {run.damaged / '2'}"):
        transformer_jax.train(tiny.config, run.path, strict=strict)
    assert resolve_checkpoint(run, "best").name == "4"


def test_damaged_result_is_computed_again(run, tiny):
    expected = run.read_result()
    run.result.write_text(run.result.read_text().replace('"num_sentences": 12', '"num_sentences": 13'))
    assert run.read_result() == {}
    transformer_jax.train(tiny.config, run.path)
    assert run.read_result()["num_sentences"] == expected["num_sentences"] == 12


def test_foreign_entries_in_checkpoints_are_ignored(run, tiny):
    for step in (5, 15):
        (run.checkpoints / f"{step}.old").mkdir()
        (run.checkpoints / f"{step}.tar").write_text("")
    assert transformer_jax.train(tiny.config.with_changes(training={"num_steps": 5}), run.path).step == 5
    assert resolve_checkpoint(run, "last").name == "5"
    assert (run.checkpoints / "5.tar").exists()


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev,
    reason="needs a second file system: /dev/shm does not exist, or is on the one of /tmp",
)
def test_damaged_checkpoint_is_moved_from_another_file_system(run, tiny, tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        shutil.move(run.checkpoints, Path(other) / "checkpoints")
        run.checkpoints.symlink_to(Path(other) / "checkpoints")
        flip(run.checkpoints / "4" / METRICS)
        with pytest.warns(UserWarning, match=rf"4 is damaged: .* moved to {run.damaged / '4'}"):
            transformer_jax.train(tiny.config, run.path)
        assert (run.damaged / "4" / METRICS).is_file()
        assert resolve_checkpoint(run, "last").name == "4"


@pytest.fixture
def read_only(monkeypatch):
    """Return a function that makes a folder read-only for this process, also for the superuser."""

    def protect(folder):
        original = {name: getattr(os, name) for name in ("open", "mkdir", "rename", "replace", "unlink")}
        open_file = io.open

        def refuse(path):
            if str(path).startswith(str(folder)):
                raise OSError(errno.EROFS, "Read-only file system", str(path))

        def guarded_open(file, mode="r", *args, **options):
            if set(mode) & set("wax+") and isinstance(file, str | os.PathLike):
                refuse(os.fspath(file))
            return open_file(file, mode, *args, **options)

        def guard(name):
            def guarded(path, *args, **options):
                if name != "open" or (args and args[0] & (os.O_WRONLY | os.O_RDWR)):
                    refuse(path)
                return original[name](path, *args, **options)

            return guarded

        for name in original:
            monkeypatch.setattr(os, name, guard(name))
        monkeypatch.setattr(io, "open", guarded_open)

    return protect


def test_finished_run_on_read_only_file_system_can_be_read(run, tiny, read_only):
    expected = translate(run)
    read_only(run.path)
    assert translate(run) == expected
    outcome = transformer_jax.train(tiny.config, run.path)
    assert outcome.step == 4
    assert outcome.test["exact_match"] == run.read_result()["exact_match"]
    with pytest.raises(UserError, match=r"average: cannot be written: the run is read-only"):
        average(run.path, last=2)
    with pytest.raises(UserError, match=r"run cannot be written, and the run is not finished"):
        transformer_jax.train(tiny.config.with_changes(training={"num_steps": 6}), run.path)
    with pytest.raises(UserError, match="cannot be written: Read-only file system"):
        save_params(run.average, {"w": 1})


SPECIAL_NAMES = [
    "a b'\"[0-9]*?{x}",
    "back\\slash",
    "new\nline",
    "gs:",
    "percent%41#?",
    os.fsdecode(b"not utf-8 \xff"),
    "two leading slashes",
]


@pytest.mark.parametrize("name", SPECIAL_NAMES, ids=[ascii(name) for name in SPECIAL_NAMES])
def test_run_in_a_folder_with_special_characters(tiny, tmp_path, name):
    folder = Path(f"/{tmp_path}") / "run" if name == "two leading slashes" else tmp_path / name
    run = RunDir(tiny.copy(folder))
    assert transformer_jax.train(tiny.config.with_changes(training={"num_steps": 5}), folder).step == 5
    assert translate(run) == translate(run, "5")
    assert average(folder, last=2)
    translate(run, "average")
