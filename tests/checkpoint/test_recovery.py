"""A run resumes from its newest undamaged checkpoint."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_cases import MODEL, flip, save_steps, truncate

from transformer_jax.checkpoint.checkpoint import METRICS, Checkpoints, checkpoint_steps, resolve_checkpoint
from transformer_jax.checkpoint.manifest import MANIFEST, verify
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.types import UserError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    run = RunDir(tmp_path_factory.mktemp("recovery") / "run")
    run.open_for_training(Config(model=MODEL))
    save_steps(run, {1: {}, 2: {}, 3: {}})
    return run


@pytest.fixture
def run(original, tmp_path):
    return RunDir(Path(shutil.copytree(original.path, tmp_path / "run")))


def largest_file(run, step) -> Path:
    files = [path for path in (run.checkpoints / str(step) / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_an_undamaged_run_is_not_changed(run):
    before = sorted(path.relative_to(run.path) for path in run.path.rglob("*"))
    for step in (1, 2, 3):
        verify(run.checkpoints / str(step))
    assert recover(run, strict=True) == [1, 2, 3]
    assert sorted(path.relative_to(run.path) for path in run.path.rglob("*")) == before


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, "no manifest"])
def test_a_damaged_newest_checkpoint_is_moved_and_written_again(run, damage):
    if damage == "no manifest":
        (run.checkpoints / "3" / MANIFEST).unlink()
    else:
        damage(largest_file(run, 3))
    with pytest.raises(UserError, match=r"3 is damaged: .*; without --strict, training resumes from an undamaged"):
        recover(run, strict=True)
    with pytest.warns(UserWarning, match=rf"3 is damaged: .* moved to {run.damaged / '3'}"):
        assert recover(run) == [1, 2]
    assert (run.damaged / "3").is_dir()
    assert resolve_checkpoint(run, "last") == run.checkpoints / "2"
    save_steps(run, {3: {}})
    assert recover(run, strict=True) == [1, 2, 3]
    checkpoints = Checkpoints(run)
    assert checkpoints.restore(3, {"params": {"w": jnp.zeros(300)}})["params"]["w"][0] == 3
    checkpoints.close()
    (run.checkpoints / "3" / MANIFEST).unlink()
    with pytest.warns(UserWarning, match=rf"moved to {run.damaged / '3-1'}"):
        recover(run)


def test_two_damaged_checkpoints_are_moved_but_never_all(run):
    for step in (2, 3):
        largest_file(run, step).write_bytes(b"")
    with pytest.warns(UserWarning, match=r"(2|3) is damaged") as warned:
        assert recover(run) == [1]
    assert len(warned) == 2
    largest_file(run, 1).write_bytes(b"")
    with pytest.raises(UserError, match=r"1 is damaged: .*; there is no earlier checkpoint"):
        recover(run)
    assert (run.checkpoints / "1").is_dir()


def test_a_checkpoint_without_manifest_is_not_complete(run):
    (run.checkpoints / "3" / MANIFEST).unlink()
    assert checkpoint_steps(run) == [1, 2]
    assert checkpoint_steps(run, complete=False) == [1, 2, 3]


def test_half_deleted_older_checkpoint_is_deleted_without_warning(run, recwarn):
    """Orbax deletes older checkpoints file by file, and a kill may leave a part of one."""
    (run.checkpoints / "1" / MANIFEST).unlink()
    shutil.rmtree(run.checkpoints / "1" / "state")
    assert recover(run, strict=True) == [2, 3]
    assert not (run.checkpoints / "1").exists()
    (run.checkpoints / "2" / MANIFEST).unlink()
    assert recover(run) == [3]
    assert not run.damaged.exists()
    assert not recwarn.list


def test_strict_accepts_damage_of_an_older_checkpoint(run):
    (run.checkpoints / "1" / METRICS).write_text("damaged")
    with pytest.warns(UserWarning, match=rf"1 is damaged: .* moved to {run.damaged / '1'}"):
        assert recover(run, strict=True) == [2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3\n", r"layout 3 of a later version of transformer_jax; this version .* up to 2"),
        ("one", "holds 'one'; it must be a number up to 2"),
    ],
)
def test_a_run_of_a_later_version_raises(run, text, message):
    run.format_file.write_text(text)
    with pytest.raises(UserError, match=message):
        run.load_config()
