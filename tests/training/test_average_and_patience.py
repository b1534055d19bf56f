"""Validations: the moving average that they evaluate, early stopping, and interrupts while they run."""

import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_training import lessons, make_config, params_at, python_interrupt_handler, steps_of, train

from transformer_jax.checkpoint.checkpoint import resolve_checkpoint, write_checkpoint_manifest
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import TrainingConfig
from transformer_jax.testing import assert_trees_identical
from transformer_jax.training.loop import should_stop_early
from transformer_jax.training.metrics import Evaluation
from transformer_jax.training.optimizer import eval_params, make_optimizer, update_count
from transformer_jax.training.sharding import make_mesh, tree_shardings


def test_ema_equals_its_definition_and_changes_no_update():
    rng = np.random.default_rng(0)
    config = TrainingConfig(schedule="constant", warmup_steps=1, peak_learning_rate=0.1, clip_norm=1.0)
    plain, averaged = (make_optimizer(c, 16) for c in (config, TrainingConfig(**(vars(config) | {"ema_decay": 0.5}))))
    params = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
    states, expected = [plain.init(params), averaged.init(params)], params["w"].astype(np.float64)
    for t in range(1, 13):
        grads = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
        updates, states[0] = plain.update(grads, states[0], params)
        same, states[1] = averaged.update(grads, states[1], params)
        np.testing.assert_array_equal(updates["w"], same["w"])
        params = optax.apply_updates(params, updates)
        d = min(0.5, (1 + t) / (10 + t))  # 2 / 11, ..., 0.5 from the eighth on
        expected = d * expected + (1 - d) * np.asarray(params["w"], np.float64)
        np.testing.assert_allclose(states[1].ema["w"], expected, rtol=1e-5)
        assert [int(update_count(state)) for state in states] == [t, t]


def test_only_validations_and_checkpoints_use_the_average(tmp_path):
    seen = []

    def evaluate(params, step):
        seen.append(jax.device_get(params))
        return Evaluation({"valid_loss": 1.0})

    plain = train(tmp_path / "plain", make_config()).state
    config = make_config(ema_decay=0.5, validate_every=2)
    train(tmp_path / "run", make_config(ema_decay=0.5, num_steps=2), evaluate=evaluate)
    state = train(tmp_path / "run", config, evaluate=evaluate).state
    assert_trees_identical(state.params, plain.params)
    assert_trees_identical(seen[-1], eval_params(state))
    assert np.abs(seen[-1]["embedding"]["table"] - state.params["embedding"]["table"]).max() > 1e-3
    for step, params in zip((2, 4), seen, strict=True):
        assert_trees_identical(params_at(tmp_path / "run", step), params)
    # An average is sharded like its parameter.
    mesh = make_mesh(2, 2, 2)
    shardings = tree_shardings(state, mesh)
    assert shardings.opt_state.ema == shardings.params


PATIENT = {"validate_every": 1, "patience": 2}
VALID_LOSSES = (3.0, 2.0, 2.5, 2.0, 1.0)  # to be no worse is not to be better: training stops after the fourth


def reported(step_from_1):
    """Return validations that report VALID_LOSSES, starting at a step."""
    left = iter(VALID_LOSSES[step_from_1 - 1 :])
    return lambda params, step: Evaluation({"valid_loss": next(left)})


def test_run_without_improvement_stops_early_and_stays_stopped(tmp_path):
    config = make_config(num_steps=9, **PATIENT)
    outcome = train(tmp_path / "run", config, evaluate=reported(1))
    assert (outcome.step, outcome.stopped_early, outcome.interrupted_by) == (4, True, None)
    again = train(tmp_path / "run", config, batches=lambda position: iter(()))
    assert (again.step, again.stopped_early) == (4, True)
    assert_trees_identical(again.state, outcome.state)


@pytest.mark.parametrize("missing", ["nothing", "metrics.jsonl", "validations"])
def test_resumed_run_stops_early_where_an_uninterrupted_one_does(missing, tmp_path):
    """Early stopping reads the checkpoint, and falls back to the log for checkpoints of earlier versions."""
    run = tmp_path / "run"
    train(run, make_config(num_steps=3, **PATIENT), evaluate=reported(1))
    if missing == "metrics.jsonl":
        (run / missing).unlink()
    if missing == "validations":
        for history in run.glob("checkpoints/*/validations"):
            shutil.rmtree(history)
            write_checkpoint_manifest(history.parent)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 4, "valid_loss": 0.5}\n{"step": 5, "val')  # after the checkpoint
    resumed = train(run, make_config(num_steps=9, **PATIENT), evaluate=reported(4))
    assert (resumed.step, resumed.stopped_early) == (4, True)


def test_only_a_strictly_better_validation_counts_as_an_improvement():
    history = [{"valid_bleu": None}, {"loss": 1.0}, {"valid_bleu": 0.0}, {"valid_bleu": 5.0, "valid_loss": 9.0}]
    history.append({"valid_bleu": float("nan")})
    assert not should_stop_early(history, "valid_bleu", 2)
    history.append({"valid_bleu": 5.0})
    assert should_stop_early(history, "valid_bleu", 2)
    assert not should_stop_early([{"valid_loss": 1.0}] * 99, "valid_loss", 0)
    assert should_stop_early([{"valid_loss": None}] * 2, "valid_loss", 2)  # never finite, never better
    assert not should_stop_early([{"valid_loss": None}], "valid_loss", 2)


def figures_of(folder):
    """Return the logged rows without their speed, and the validations stored in the checkpoints."""
    files = [folder / "checkpoints" / str(step) / "metrics" / "metrics" for step in steps_of(folder)]
    best = resolve_checkpoint(RunDir(folder), "best").name
    samples = (folder / "samples.jsonl").read_text()
    return lessons(folder, "step"), samples, steps_of(folder), [json.loads(file.read_text()) for file in files], best


@pytest.mark.parametrize("step", [2, 4])
def test_two_interrupts_during_a_validation_change_nothing_after_resuming(step, tmp_path):
    def evaluate(params, now):
        loss = float(jax.device_get(jnp.sum(params["embedding"]["table"])))
        return Evaluation({"valid_loss": loss}, [{"source": "a", "reference": "b", "translation": str(now)}])

    def interrupted(params, now):
        if now == step:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return evaluate(params, now)

    config = make_config(validate_every=2)
    train(tmp_path / "uninterrupted", config, evaluate=evaluate)
    with python_interrupt_handler(), pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", config, evaluate=interrupted)
    assert steps_of(tmp_path / "run")[-1] == step, "the steps before the validation are saved"
    train(tmp_path / "run", config, evaluate=evaluate)
    assert figures_of(tmp_path / "run") == figures_of(tmp_path / "uninterrupted")
