"""Checkpoints: whole, unaltered by what comes after, found by name, and refused where they do not fit."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failing_writes import fail_after
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
)
from transformer_jax.checkpoint.manifest import verify
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError

CONFIG = ModelConfig(vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=16)


def random_params(config=CONFIG, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract_params(config))


def save(run, values, **options):
    """One checkpoint for each step: {step: metrics}."""
    checkpoints = Checkpoints(run, **options)
    for step, metrics in values.items():
        checkpoints.save(step, {"params": {"w": jnp.full(3, float(step))}}, metrics)
    checkpoints.close()


def device_sharding(count):
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    return NamedSharding(mesh, PartitionSpec("x"))


@pytest.mark.parametrize("count", [1, 8])
def test_a_checkpoint_is_not_altered_by_the_donated_steps_that_follow(count, tmp_path):
    """Written in the background while the next steps reuse the memory of the state."""
    sharding = device_sharding(count)
    start = np.arange(2**20, dtype=np.float32)
    step = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = {f"w{i}": jax.device_put(jnp.asarray(start), sharding) for i in range(6)}
    for _ in range(3):
        old, state = state, step(state)
        assert all(leaf.is_deleted() for leaf in old.values())
    checkpoints = Checkpoints(RunDir(tmp_path))
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


def test_a_state_is_restored_bit_for_bit_on_other_devices(tmp_path):
    values = np.array([1e-45, -0.0, 3.3, np.pi] * 4, np.float32)
    checkpoints = Checkpoints(RunDir(tmp_path))
    assert checkpoints.latest_step() is None
    checkpoints.save(7, {"w": jax.device_put(values, device_sharding(8)), "step": jnp.int32(7)})
    checkpoints.wait()
    assert checkpoints.latest_step() == 7
    whole = device_sharding(1)
    target = {
        "w": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=whole),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(whole.mesh, PartitionSpec())),
    }
    restored = checkpoints.restore(7, target)
    checkpoints.close()
    assert np.array(restored["w"]).tobytes() == values.tobytes()
    assert restored["w"].sharding == whole
    assert restored["step"] == 7


def test_a_step_that_is_saved_already_stays(tmp_path):
    save(RunDir(tmp_path), {1: {"valid_loss": 2.0}})
    save(RunDir(tmp_path), {1: {"valid_loss": 9.0}, 2: {"valid_loss": 5.0}})
    assert resolve_checkpoint(RunDir(tmp_path), "best").name == "1"


@pytest.mark.parametrize(
    ("best_by", "figures", "best"),
    [
        ("valid_loss", {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: None}, 2),
        ("valid_bleu", {1: 3.0, 2: 1.0, 3: 9.0, 4: 4.0, 5: None}, 3),
        ("valid_bleu", {1: 9.0, 2: 1.0, 3: 2.0, 4: 4.0, 5: 0.0}, 1),
    ],
)
def test_the_last_are_kept_and_the_best(best_by, figures, best, tmp_path):
    metrics = {step: None if value is None else {best_by: value, "other": 1.0} for step, value in figures.items()}
    run = RunDir(tmp_path)
    # In two sittings: the second knows the first one's figures from the disk.
    for part in ({1, 2, 3}, {4, 5}):
        save(run, {step: metrics[step] for step in sorted(part)}, keep=2, best_by=best_by)
    assert checkpoint_steps(run) == sorted({best, 4, 5})
    assert resolve_checkpoint(run, "best", best_by) == run.checkpoints / str(best)
    assert resolve_checkpoint(run, "last", best_by) == run.checkpoints / "5"
    assert resolve_checkpoint(run, str(best)) == run.checkpoints / str(best)


def test_without_figures_the_last_are_kept(tmp_path):
    run = RunDir(tmp_path)
    save(run, dict.fromkeys(range(1, 6)), keep=2)
    assert {4, 5} <= set(checkpoint_steps(run))
    assert len(checkpoint_steps(run)) <= 3
    with pytest.raises(UserError, match="no best checkpoint: no checkpoint there has a valid_loss; use 'last'"):
        resolve_checkpoint(run, "best")


def test_what_is_not_whole_is_no_checkpoint(tmp_path):
    run = RunDir(tmp_path)
    assert checkpoint_steps(run) == []
    save(run, {9: None, 10: None, 100: None})
    (run.checkpoints / "200.orbax-checkpoint-tmp-123").mkdir()
    (run.checkpoints / "tmp").mkdir()
    (run.checkpoints / "300").write_text("a file")
    assert checkpoint_steps(run) == [9, 10, 100]
    assert resolve_checkpoint(run, "last").name == "100"


def test_no_save_is_begun_that_the_disk_has_no_room_for(tmp_path, monkeypatch):
    checkpoints = Checkpoints(RunDir(tmp_path))
    state = {"w": jnp.zeros(2**20)}
    checkpoints.save(1, state)
    checkpoints.wait()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * 2**20))
    said = r"step 2 needs 5.7 MB and \S+ has 4.2 MB free: it was not written. The last complete .* of step 1: free disk"
    with pytest.raises(UserError, match=said):
        checkpoints.save(2, state)
    checkpoints.close()
    assert checkpoint_steps(RunDir(tmp_path)) == [1]


@pytest.mark.parametrize("writes", range(5))
def test_replacing_a_pending_checkpoint_leaves_a_valid_one_at_any_moment(writes, tmp_path, monkeypatch):
    run, state = RunDir(tmp_path), {"w": jnp.arange(3.0)}
    run.write_config(Config())
    checkpoints = Checkpoints(run, keep=1)
    checkpoints.save(1, state, history=ValidationHistory(is_pending=True))
    checkpoints.wait()
    fail_after(writes, monkeypatch, manifest)
    is_complete = writes == 4
    history = ValidationHistory(({"valid_loss": 2.0},))
    with contextlib.nullcontext() if is_complete else pytest.raises(UserError):
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


def test_a_save_that_fails_on_the_disk_says_so_and_is_no_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(RunDir(tmp_path))
    save, full = checkpoint.write_checkpoint_manifest, OSError(28, "No space left on device")

    def fail(folder):
        raise full

    monkeypatch.setattr(checkpoint, "write_checkpoint_manifest", fail)
    checkpoints.save(1, {"w": jnp.zeros(3)})
    with pytest.raises(
        UserError, match=r"step 1 could not be written to .*No space left.*There is no earlier checkpoint"
    ):
        checkpoints.wait()
    monkeypatch.setattr(checkpoint, "write_checkpoint_manifest", save)
    assert checkpoint_steps(RunDir(tmp_path)) == []


def test_a_multiple_is_kept_beside_the_last(tmp_path):
    run = RunDir(tmp_path)
    save(run, {step: {"valid_loss": 1.0} for step in range(1, 8)}, keep=1, keep_every=3)
    assert set(checkpoint_steps(run)) >= {3, 6, 7}
    assert not set(checkpoint_steps(run)) & {2, 4, 5}


def test_errors_list_what_there_is(tmp_path):
    run = RunDir(tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} has no checkpoint yet"):
        resolve_checkpoint(run, "last")
    save(run, {1: None, 20: None})
    for which in ("3", "first", "-1", ""):
        with pytest.raises(UserError, match=f"no checkpoint '{which}'; there are last, best, .* and the steps 1, 20$"):
            resolve_checkpoint(run, which)
    with pytest.raises(UserError, match=f"no averaged checkpoint: make one with `average {tmp_path} --last 5`"):
        resolve_checkpoint(run, "average")
    save_params(run.average, random_params())
    assert resolve_checkpoint(run, "average") == run.average


def test_figures_are_plain_json_beside_the_state(tmp_path):
    run = RunDir(tmp_path)
    save(run, {1: {"valid_loss": 2.5}})
    assert json.loads((run.checkpoints / "1" / "metrics" / "metrics").read_text()) == {"valid_loss": 2.5}


def test_parameters_are_written_and_read_bit_for_bit(tmp_path):
    params = random_params()
    save_params(tmp_path / "a", random_params(seed=1))
    save_params(tmp_path / "a", params)  # what stood there is replaced
    loaded = load_params(tmp_path / "a", abstract_params(CONFIG))
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(loaded))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"d_ff": 32}, r"feed_forward/inner/bias has shape \(16,\), not \(32,\); .*\(and 3 more\)"),
        ({"logits_bias": True}, "does not fit the model: logits_bias is missing$"),
        ({"decoder_num_layers": 2}, r"decoder/layer_1/\S+ is missing; .*more\)"),
    ],
)
def test_parameters_of_another_model_are_named(changes, said, tmp_path):
    save_params(tmp_path / "a", random_params())
    with pytest.raises(UserError, match=said):
        load_params(tmp_path / "a", abstract_params(dataclasses.replace(CONFIG, **changes)))


def test_parameters_that_the_model_lacks_are_named(tmp_path):
    save_params(tmp_path / "a", random_params(dataclasses.replace(CONFIG, logits_bias=True)))
    with pytest.raises(UserError, match=r"logits_bias is not part of the model$"):
        load_params(tmp_path / "a", abstract_params(CONFIG))


def test_what_is_no_checkpoint_cannot_be_read(tmp_path):
    (tmp_path / "a" / "state").mkdir(parents=True)
    for name in ("a", "b"):
        with pytest.raises(UserError, match=f"cannot read the checkpoint {tmp_path / name}: .+"):
            load_params(tmp_path / name, abstract_params(CONFIG))
