"""A run goes on from its newest checkpoint that is whole."""

import shutil
from pathlib import Path

import jax.numpy as jnp
import pytest

from transformer_jax.checkpoint.checkpoint import METRICS, Checkpoints, checkpoint_steps, resolve_checkpoint
from transformer_jax.checkpoint.manifest import MANIFEST, verify
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig
from transformer_jax.types import UserError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = RunDir(tmp_path_factory.mktemp("recovery") / "run")
    run.open_for_training(Config(model=ModelConfig(vocab_size=16, d_model=16, num_layers=1, num_heads=2, d_ff=32)))
    save(run, 1, 2, 3)
    return run


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made.path, tmp_path / "run")
    return RunDir(tmp_path / "run")


def save(run, *steps):
    checkpoints = Checkpoints(run)
    for step in steps:
        checkpoints.save(step, {"params": {"w": jnp.full(300, float(step))}}, {})
    checkpoints.close()


def restored(run, step):
    checkpoints = Checkpoints(run)
    state = checkpoints.restore(step, {"params": {"w": jnp.zeros(300)}})
    checkpoints.close()
    return float(state["params"]["w"][0])


def largest_file(run, step) -> Path:
    files = [path for path in (run.checkpoints / str(step) / "state").rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def test_every_save_has_a_manifest_and_nothing_happens_to_a_whole_run(run):
    before = sorted(path.relative_to(run.path) for path in run.path.rglob("*"))
    for step in (1, 2, 3):
        verify(run.checkpoints / str(step))
    assert recover(run, strict=True) == [1, 2, 3]
    assert sorted(path.relative_to(run.path) for path in run.path.rglob("*")) == before


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "no manifest"])
def test_the_one_before_a_damaged_one_is_used_and_the_step_is_written_again(run, harm):
    path = largest_file(run, 3)
    data = path.read_bytes()
    if harm == "flip":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
    elif harm == "truncate":
        path.write_bytes(data[: len(data) // 2])
    elif harm == "delete":
        path.unlink()
    else:
        (run.checkpoints / "3" / MANIFEST).unlink()
    with pytest.raises(UserError, match=r"3 is damaged: .*; without --strict, training resumes from an undamaged"):
        recover(run, strict=True)
    with pytest.warns(UserWarning, match=rf"3 is damaged: .* moved to {run.damaged / '3'}"):
        assert recover(run) == [1, 2]
    assert (run.damaged / "3").is_dir()
    assert resolve_checkpoint(run, "last") == run.checkpoints / "2"
    save(run, 3)
    assert recover(run, strict=True) == [1, 2, 3]
    assert restored(run, 3) == 3
    (run.checkpoints / "3" / MANIFEST).unlink()
    with pytest.warns(UserWarning, match=rf"moved to {run.damaged / '3-1'}"):
        recover(run)


def test_two_damaged_ones_are_passed_and_if_none_is_whole_nothing_begins_anew(run):
    for step in (2, 3):
        largest_file(run, step).write_bytes(b"")
    with pytest.warns(UserWarning, match=r"(2|3) is damaged") as warned:
        assert recover(run) == [1]
    assert len(warned) == 2
    largest_file(run, 1).write_bytes(b"")
    with pytest.raises(UserError, match=r"1 is damaged: .*; there is no earlier checkpoint"):
        recover(run)
    assert (run.checkpoints / "1").is_dir()


def test_a_run_from_before_the_manifests_keeps_its_checkpoints_and_gets_them(run):
    for step in (1, 2, 3):
        (run.checkpoints / str(step) / MANIFEST).unlink()
    assert checkpoint_steps(run) == [], "with the format of today these are no checkpoints"
    run.format_file.unlink()
    (run.path / MANIFEST).unlink()
    assert checkpoint_steps(run) == [1, 2, 3]
    assert recover(run, strict=True) == [1, 2, 3]
    assert run.format() == 2
    for step in (1, 2, 3):
        verify(run.checkpoints / str(step))


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


def test_a_run_of_a_later_version_is_refused(run):
    run.format_file.write_text("3\n")
    with pytest.raises(UserError, match=r"layout 3 of a later version of transformer_jax; this version .* up to 2"):
        run.load_config()
    run.format_file.write_text("one")
    with pytest.raises(UserError, match="holds 'one'; it must be a number up to 2"):
        run.load_config()
