"""Checkpoints are complete, unaltered by later steps, found by name, and rejected where they do not fit the model."""

import contextlib
import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import MODEL, save_steps
from failing_writes import fail_after
from interop_cases import random_params
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer_jax.checkpoint import checkpoint, manifest
from transformer_jax.checkpoint.checkpoint import (
    Checkpoints,
    ValidationHistory,
    checkpoint_steps,
    load_params,
    read_history,
    resolve_checkpoint,
    save_params,
    write_checkpoint_manifest,
)
from transformer_jax.checkpoint.manifest import verify
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def device_sharding(count):
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    return NamedSharding(mesh, PartitionSpec("x"))


@pytest.mark.parametrize("count", [1, 8])
def test_a_checkpoint_is_not_altered_by_the_donated_steps_that_follow(count, run):
    """The checkpoint is written in the background while later steps reuse the memory of the state."""
    sharding = device_sharding(count)
    start = np.arange(2**20, dtype=np.float32)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {f"w{i}": jax.device_put(jnp.asarray(start), sharding) for i in range(6)}
    for _ in range(3):
        old, state = state, step(state)
        assert all(leaf.is_deleted() for leaf in old.values())
    checkpoints = Checkpoints(run)
    checkpoints.save(3, state)
    for _ in range(20):
        state = step(state)
    checkpoints.wait()
    target = jax.ShapeDtypeStruct(start.shape, start.dtype, sharding=sharding)
    restored = checkpoints.restore(3, dict.fromkeys(state, target))
    checkpoints.close()
    for name, leaf in restored.items():
        np.testing.assert_array_equal(leaf, start + 3, err_msg=name)
        assert leaf.sharding == sharding


def test_a_state_is_restored_bit_for_bit_on_other_devices(run):
    values = np.array([1e-45, -0.0, 3.3, np.pi] * 4, np.float32)
    checkpoints = Checkpoints(run)
    assert checkpoints.latest_step() is None
    checkpoints.save(7, {"w": jax.device_put(values, device_sharding(8)), "step": jnp.int32(7)})
    checkpoints.wait()
    assert checkpoints.latest_step() == 7
    one = device_sharding(1)
    target = {
        "w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=one),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(one.mesh, PartitionSpec())),
    }
    restored = checkpoints.restore(7, target)
    checkpoints.close()
    assert np.array(restored["w"]).tobytes() == values.tobytes()
    assert restored["w"].sharding == one
    assert restored["step"] == 7


def test_an_existing_step_is_not_overwritten(run):
    save_steps(run, {1: {"valid_loss": 2.0}})
    save_steps(run, {1: {"valid_loss": 9.0}, 2: {"valid_loss": 5.0}})
    assert resolve_checkpoint(run, "best").name == "1"
    assert json.loads((run.checkpoints / "1" / "metrics" / "metrics").read_text()) == {"valid_loss": 2.0}


@pytest.mark.parametrize(
    ("best_by", "figures", "best"),
    [
        ("valid_loss", {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: None}, 2),
        ("valid_bleu", {1: 3.0, 2: 1.0, 3: 9.0, 4: 4.0, 5: None}, 3),
        ("valid_bleu", {1: 9.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 0.0}, 1),
    ],
)
def test_last_and_best_checkpoints_are_kept(best_by, figures, best, run):
    metrics = {step: None if value is None else {best_by: value, "other": 1.0} for step, value in figures.items()}
    # The second manager reads the metrics of the first one's checkpoints from the disk.
    for part in ((1, 2, 3), (4, 5)):
        save_steps(run, {step: metrics[step] for step in part}, keep=2, best_by=best_by)
    assert checkpoint_steps(run) == sorted({best, 4, 5})
    for which, step in (("best", best), ("last", 5), (str(best), best)):
        assert resolve_checkpoint(run, which, best_by) == run.checkpoints / str(step)


def test_last_checkpoints_are_kept_without_metrics(run):
    save_steps(run, dict.fromkeys(range(1, 6)), keep=2)
    assert {4, 5} <= set(checkpoint_steps(run))
    assert len(checkpoint_steps(run)) <= 3
    with pytest.raises(UserError, match="no best checkpoint: no checkpoint there has a valid_loss; use 'last'"):
        resolve_checkpoint(run, "best")


def test_multiples_of_keep_every_are_kept(run):
    save_steps(run, {step: {"valid_loss": 1.0} for step in range(1, 8)}, keep=1, keep_every=3)
    assert set(checkpoint_steps(run)) >= {3, 6, 7}
    assert not set(checkpoint_steps(run)) & {2, 4, 5}


def test_incomplete_checkpoints_are_not_listed(run):
    assert checkpoint_steps(run) == []
    save_steps(run, {9: None, 10: None, 100: None})
    (run.checkpoints / "200.orbax-checkpoint-tmp-123").mkdir()
    (run.checkpoints / "tmp").mkdir()
    (run.checkpoints / "300").write_text("a file")
    for name in ("007", "0100", "\u0663"):  # no step's folder has such a name
        shutil.copytree(run.checkpoints / "9", run.checkpoints / name)
    assert checkpoint_steps(run) == [9, 10, 100]
    assert resolve_checkpoint(run, "last").name == "100"


def test_save_without_disk_space_raises_before_writing(run, monkeypatch):
    checkpoints, state = Checkpoints(run), {"w": jnp.zeros(2**20)}
    checkpoints.save(1, state)
    checkpoints.wait()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * 2**20))
    message = r"step 2 needs 5.7 MB and \S+ has 4.2 MB free: it was not written. The last complete .* of step 1: free"
    with pytest.raises(UserError, match=message):
        checkpoints.save(2, state)
    checkpoints.close()
    assert checkpoint_steps(run) == [1]


@pytest.mark.parametrize("writes", range(5))
def test_replacing_a_pending_checkpoint_leaves_a_valid_one_at_any_moment(writes, run, monkeypatch):
    state, history = {"w": jnp.arange(3.0)}, ValidationHistory(({"valid_loss": 2.0},))
    run.write_config(Config())
    checkpoints = Checkpoints(run, keep=1)
    checkpoints.save(1, state, history=ValidationHistory(is_pending=True))
    checkpoints.wait()
    fail_after(writes, monkeypatch, manifest)
    with contextlib.nullcontext() if writes == 4 else pytest.raises(UserError):
        checkpoints.save(1, state, {"valid_loss": 2.0}, history)
        checkpoints.close()
    monkeypatch.undo()
    assert recover(run, strict=True) == [1]
    assert read_history(run, 1) in (history, ValidationHistory(is_pending=True))

    again = Checkpoints(run, keep=1)
    again.save(1, state, {"valid_loss": 2.0}, history)
    again.save(2, state, {"valid_loss": 3.0}, history)
    again.close()
    verify(run.checkpoints / "1")
    assert read_history(run, 1) == history
    assert checkpoint_steps(run) == [1, 2], "the best one is kept"
    assert resolve_checkpoint(run, "best").name == "1"


def test_a_save_that_fails_in_the_background_raises_and_leaves_no_checkpoint(run, monkeypatch):
    def fail(folder):
        raise OSError(28, "No space left on device")

    checkpoints = Checkpoints(run)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_checkpoint_manifest", fail)
        checkpoints.save(1, {"w": jnp.zeros(3)})
        message = r"step 1 could not be written to .*No space left.*There is no earlier checkpoint"
        with pytest.raises(UserError, match=message):
            checkpoints.wait()
    assert checkpoint_steps(run) == []


def test_errors_list_the_checkpoints_of_the_run(run):
    with pytest.raises(UserError, match=f"{run.path} has no checkpoint yet"):
        resolve_checkpoint(run, "last")
    save_steps(run, {1: None, 20: None})
    for which in ("3", "first", "-1", ""):
        with pytest.raises(UserError, match=f"no checkpoint '{which}'; there are last, best, .* and the steps 1, 20$"):
            resolve_checkpoint(run, which)
    with pytest.raises(UserError, match=f"no averaged checkpoint: make one with `average {run.path} --last 5`"):
        resolve_checkpoint(run, "average")
    save_params(run.average, random_params(MODEL))
    assert resolve_checkpoint(run, "average") == run.average


def test_parameters_are_written_and_read_bit_for_bit(tmp_path):
    params = random_params(MODEL)
    save_params(tmp_path / "a", random_params(MODEL, seed=1))
    save_params(tmp_path / "a", params)  # replaces the folder
    loaded = load_params(tmp_path / "a", abstract_params(MODEL))
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded))


@pytest.mark.parametrize(
    ("stored", "expected", "message"),
    [
        ({}, {"d_ff": 32}, r"feed_forward/inner/bias has shape \(16,\), not \(32,\); .*\(and 3 more\)"),
        ({}, {"logits_bias": True}, "does not fit the model: logits_bias is missing$"),
        ({}, {"decoder_num_layers": 2}, r"decoder/layer_1/\S+ is missing; .*more\)"),
        ({"logits_bias": True}, {}, r"logits_bias is not part of the model$"),
    ],
)
def test_differences_from_another_model_are_listed(stored, expected, message, tmp_path):
    save_params(tmp_path / "a", random_params(dataclasses.replace(MODEL, **stored)))
    with pytest.raises(UserError, match=message):
        load_params(tmp_path / "a", abstract_params(dataclasses.replace(MODEL, **expected)))


def test_a_folder_that_is_not_a_checkpoint_raises(tmp_path):
    (tmp_path / "a" / "state").mkdir(parents=True)
    write_checkpoint_manifest(tmp_path / "a")
    for name, message in (("a", f"cannot read the checkpoint {tmp_path / 'a'}: .+"), ("b", "it has no manifest.json")):
        with pytest.raises(UserError, match=message):
            load_params(tmp_path / name, abstract_params(MODEL))
