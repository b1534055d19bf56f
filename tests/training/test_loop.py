"""`fit`: resuming, saving, stopping, and the files of a run."""

import itertools
import json
import math
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import (
    MODEL,
    batches_from,
    lessons,
    losses,
    make_config,
    params_at,
    python_interrupt_handler,
    rows_of,
    steps_of,
    train,
)

from transformer_jax.checkpoint.checkpoint import resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.model.transformer import Transformer
from transformer_jax.testing import assert_trees_close, assert_trees_identical, log_lines, one_device_mesh, random_batch
from transformer_jax.training import loop, metrics
from transformer_jax.training.metrics import Evaluation
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.sharding import make_mesh, tree_shardings
from transformer_jax.training.step import init_rng, init_state, train_step
from transformer_jax.types import UserError


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return an uninterrupted run of four steps with a checkpoint at each, and its final state."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    outcome = train(folder, make_config(checkpoint_every=1))
    assert (outcome.step, outcome.interrupted_by) == (4, None)
    assert len(rows_of(folder, "step")) == 4, "a validation without figures writes nothing"
    return folder, outcome.state


def test_resumed_run_is_bit_identical(uninterrupted, tmp_path):
    positions = []

    def batches(position):
        positions.append(position)
        return batches_from(position)

    folder = tmp_path / "run"
    half = train(folder, make_config(num_steps=2), batches=batches)
    assert (half.step, steps_of(folder)) == (2, [2])
    outcome = train(folder, make_config(), batches=batches)
    assert (outcome.step, outcome.interrupted_by, steps_of(folder)) == (4, None, [2, 4])
    assert positions == [0, 2]
    assert_trees_identical(outcome.state, uninterrupted[1])
    assert len(lessons(folder)) == 4
    assert lessons(folder) == lessons(uninterrupted[0])
    # Later steps donate their state, and must not change a checkpoint.
    for step, tree in ((2, half.state.params), (4, outcome.state.params)):
        for run in (folder, uninterrupted[0]):
            assert_trees_identical(params_at(run, step), tree)


def test_run_resumes_on_another_mesh(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    train(folder, make_config(num_steps=2))
    mesh = make_mesh(2, 2, 2)
    outcome = train(folder, make_config(), mesh=mesh)
    np.testing.assert_allclose(losses(folder), losses(uninterrupted[0]), rtol=1e-5)
    assert_trees_close(outcome.state.opt_state, uninterrupted[1].opt_state, rtol=1e-3, atol=1e-5)
    table = outcome.state.params["embedding"]["table"]
    assert table.sharding == tree_shardings(outcome.state.params, mesh)["embedding"]["table"]


def test_finished_run_takes_no_step(uninterrupted):
    before = (uninterrupted[0] / "metrics.jsonl").read_text()
    outcome = train(uninterrupted[0], make_config(), batches=lambda position: iter(()))
    assert outcome.step == 4
    assert_trees_identical(outcome.state, uninterrupted[1])
    assert (uninterrupted[0] / "metrics.jsonl").read_text() == before


def test_resuming_drops_later_rows_and_a_truncated_line(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    train(folder, make_config(num_steps=2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 77.0}\n{"step": 3, "valid_loss": 77.0}\n{"step": 4, "lo')
    (folder / "samples.jsonl").write_text('{"step": 2, "translation": "a\u2028b"}\n{"step": 3, "translation": "c"}\n')
    train(folder, make_config())
    assert lessons(folder) == lessons(uninterrupted[0])
    assert not rows_of(folder, "valid_loss")
    assert (folder / "samples.jsonl").read_text() == '{"step": 2, "translation": "a\u2028b"}\n'


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("place", ["batches", "evaluate"])
def test_signal_saves_the_current_step_and_stops(name, place, uninterrupted, tmp_path):
    def send():
        os.kill(os.getpid(), signal.Signals[name])

    def batches(position):
        for index, batch in enumerate(batches_from(position)):
            if place == "batches" and position + index == 2:  # while the third step waits for its batch
                send()
            yield batch

    def evaluate(params, step):
        if place == "evaluate":
            send()
        return Evaluation({"valid_loss": 1.0})

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    folder = tmp_path / "run"
    outcome = train(folder, make_config(validate_every=3), batches=batches, evaluate=evaluate)
    assert (outcome.step, outcome.interrupted_by) == (3, name)
    assert steps_of(folder) == [3]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    if place == "batches" and name == "SIGTERM":
        assert_trees_identical(train(folder, make_config()).state, uninterrupted[1])
        assert lessons(folder) == lessons(uninterrupted[0])


def test_signal_before_the_first_step_saves_step_0(tmp_path):
    def batches(position):
        os.kill(os.getpid(), signal.SIGTERM)
        return batches_from(position)

    outcome = train(tmp_path / "run", make_config(), batches=batches)
    assert (outcome.step, outcome.interrupted_by) == (0, "SIGTERM")


def test_second_interrupt_ends_at_once(tmp_path):
    def batches(position):
        for _ in range(2):  # sent from this thread one after the other: two pending signals would merge into one
            signal.raise_signal(signal.SIGINT)
        yield random_batch(0)

    with python_interrupt_handler(), pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", make_config(), batches=batches)


def poison(monkeypatch, step, name, value):
    """Make `train_step` report `value` as its loss or gradient at one step, and write it into the parameters."""

    def poisoned_step(state, batch, rng, **constants):
        new_state, metrics = train_step(state, batch, rng, **constants)
        hit = new_state.step == step
        params = jax.tree.map(lambda x: jnp.where(hit, value, x), new_state.params)
        metrics = metrics._replace(**{name: jnp.where(hit, value, getattr(metrics, name))})
        return new_state.replace(params=params), metrics

    monkeypatch.setattr(loop, "train_step", poisoned_step)


@pytest.mark.parametrize(
    ("name", "value", "reported", "training"),
    [
        ("loss", math.nan, "loss of step 3 is nan", {"checkpoint_every": 1}),
        ("loss", math.inf, "loss of step 3 is inf", {"checkpoint_seconds": 1e-9, "log_every": 100}),
        ("grad_norm", math.inf, "gradient's norm of step 3 is inf", {"checkpoint_every": 1, "log_every": 100}),
    ],
)
def test_nonfinite_step_stops_the_run_and_is_not_saved(name, value, reported, training, tmp_path, monkeypatch):
    poison(monkeypatch, 3, name, value)
    with pytest.raises(UserError, match=f"training stopped: the {reported}.*lower learning rate"):
        train(tmp_path / "run", make_config(**training))
    assert steps_of(tmp_path / "run") == [1, 2]
    assert all(row["step"] < 3 for row in rows_of(tmp_path / "run"))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(params_at(tmp_path / "run", 2)))


@pytest.mark.parametrize("place", ["validation", "interrupt", "end"])
def test_nonfinite_last_step_is_neither_evaluated_nor_saved(place, tmp_path, monkeypatch):
    poison(monkeypatch, 3, "loss", math.nan)
    evaluated = []

    def batches(position):
        for index, batch in enumerate(batches_from(position)):
            if place == "interrupt" and index == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    training = {"validation": {"validate_every": 3}, "interrupt": {}, "end": {"num_steps": 3}}[place]
    config = make_config(log_every=100, **training)
    with pytest.raises(UserError, match="loss of step 3 is nan"):
        train(tmp_path / "run", config, batches=batches, evaluate=lambda params, step: evaluated.append(step))
    assert evaluated == steps_of(tmp_path / "run") == []


@contextmanager
def compilations():
    """Record the compilations inside the block as a list of seconds."""
    found = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_warmup_batches_compile_before_the_first_step_and_nothing_compiles_later(tmp_path):
    """Implicit transfers to the device are also forbidden."""
    after_step = []

    def batches(position):
        jax.config.update("jax_transfer_guard_host_to_device", "disallow")
        while True:
            after_step.append(len(found))
            yield random_batch(position, length=6 + 2 * (position % 2))
            position += 1

    warmup_batches = [random_batch(0, length=length) for length in (6, 8)]
    try:
        with compilations() as found, log_lines() as lines:
            train(tmp_path / "run", make_config(), batches=batches, warmup_batches=warmup_batches)
    finally:
        jax.config.update("jax_transfer_guard_host_to_device", "allow")
    assert after_step[0] >= 2
    assert after_step == after_step[:1] * len(after_step)
    assert any(line.startswith("compiled 2 of 2, 8 rows of ") for line in lines)


def test_shape_without_warmup_batch_warns(tmp_path):
    with pytest.warns(UserWarning, match="8 rows of 6 \\+ 6 tokens is not among the warmup batches"):
        train(tmp_path / "run", make_config(num_steps=1), warmup_batches=[random_batch(0, length=8)])


def test_profile_writes_a_trace(tmp_path):
    train(tmp_path / "run", make_config(num_steps=8), profile=True)
    assert list((tmp_path / "run" / "profile").rglob("*perfetto_trace.json.gz"))


def test_run_writes_rows_validations_and_checkpoints_and_fetches_once_per_step(tmp_path, monkeypatch):
    """Check all outputs of one run: five steps of two shapes with logging and validation."""
    folder, traces, fetched, evaluated, seen = tmp_path / "run", [], [], [], []

    def counted_step(*args, **constants):
        traces.append(args[1].src.shape)
        return train_step(*args, **constants)

    device_get = jax.device_get

    def counted_fetch(values):
        if sys._getframe(1).f_globals["__name__"] == metrics.__name__:  # not Orbax's own
            fetched.append(values)
        return device_get(values)

    def evaluate(params, step):
        seen.append(params)
        evaluated.append(step)
        return Evaluation(
            {"valid_loss": {2: 1.0, 4: 3.0, 5: 2.0}[step], "valid_bleu": 7.0},
            [{"source": "eins", "reference": "one", "translation": "öne"}],
        )

    def batches(position):
        return (random_batch(index, length=6 + 2 * (index % 2)) for index in itertools.count(position))

    monkeypatch.setattr(loop, "train_step", counted_step)
    monkeypatch.setattr(jax, "device_get", counted_fetch)
    config = make_config(num_steps=5, log_every=2, validate_every=2, keep_checkpoints=1)
    with log_lines() as lines:
        outcome = train(folder, config, batches=batches, evaluate=evaluate)

    assert traces == [(8, 6), (8, 8)]  # one trace per shape
    assert [hasattr(metrics, "loss") for metrics, _ in fetched] == [True] * 5  # each step's, once, and nothing else

    training_rows, validation_rows = rows_of(folder), rows_of(folder, "valid_loss")
    assert [row["step"] for row in training_rows] == [2, 4, 5]
    assert all({"step", "loss", "learning_rate", "tokens_per_second"} <= row.keys() for row in training_rows)
    assert all(row["tokens_per_second"] > 0 for row in training_rows)
    np.testing.assert_allclose([row["learning_rate"] for row in training_rows], [0.0625, 0.125, 0.1118034], rtol=1e-5)
    assert [(row["step"], row["valid_loss"]) for row in validation_rows] == [(2, 1.0), (4, 3.0), (5, 2.0)]
    assert all(row.keys() == {"step", "valid_loss", "valid_bleu"} for row in validation_rows)
    assert evaluated == [2, 4, 5]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert samples[0] == {"step": 2, "source": "eins", "reference": "one", "translation": "öne"}
    assert len(samples) == 3
    assert any(line.startswith("step 5: valid_loss 2, valid_bleu 7") for line in lines)
    assert list((folder / "tensorboard").glob("events.out.tfevents*"))

    # Saved at each validation; the last is kept, and the best, which is an older one.
    assert steps_of(folder) == [2, 5]
    assert resolve_checkpoint(RunDir(folder), "best").name == "2"
    assert resolve_checkpoint(RunDir(folder), "last").name == "5"

    # Steps donate their state; the last one is the caller's.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(outcome.state))


def test_checkpoint_seconds_save_by_the_clock(tmp_path):
    train(tmp_path / "run", make_config(num_steps=3, checkpoint_seconds=1e-9))
    assert steps_of(tmp_path / "run") == [1, 2, 3]


def test_initial_params_are_used_and_not_donated(tmp_path):
    optimizer = make_optimizer(make_config().training, MODEL.d_model)
    given = jax.jit(lambda rng: init_state(Transformer(MODEL), optimizer, rng).params)(init_rng(99))
    given = jax.device_put(given, jax.sharding.NamedSharding(one_device_mesh(), jax.sharding.PartitionSpec()))
    copy = jax.tree.map(np.array, given)
    config = make_config(num_steps=1, schedule="constant", peak_learning_rate=1e-12, warmup_steps=1)
    outcome = train(tmp_path / "run", config, initial_params=given)
    assert_trees_close(outcome.state.params, copy)
    assert_trees_identical(given, copy)  # not donated to the first step
    assert outcome.state.opt_state[0].count == 1


def test_failing_evaluation_leaves_complete_checkpoints(tmp_path):
    def evaluate(params, step):
        raise RuntimeError("no reference")

    config = make_config(checkpoint_every=1, validate_every=3)
    with pytest.raises(RuntimeError, match="no reference"):
        train(tmp_path / "run", config, evaluate=evaluate)
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]


def test_training_reads_from_the_device_in_one_place():
    for module, count in ((loop, 0), (metrics, 1)):
        source = Path(module.__file__).read_text()
        assert source.count("device_get(") == count
        assert ".item()" not in source
    assert "block_until_ready" not in Path(loop.__file__).read_text()
