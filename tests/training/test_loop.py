"""`fit`: resuming, saving, stopping, and what is written on the way."""

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
from tiny_training import MODEL, batches_from, make_config, train

from transformer_jax.checkpoint.checkpoint import checkpoint_steps, load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.testing import assert_trees_close, assert_trees_identical, log_lines, one_device_mesh, random_batch
from transformer_jax.training import loop, metrics
from transformer_jax.training.metrics import Evaluation
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.sharding import make_mesh, tree_shardings
from transformer_jax.training.step import init_rng, init_state, train_step
from transformer_jax.types import UserError


def rows_of(folder, kind="loss"):
    """The rows of `metrics.jsonl` that have this key."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if kind in row]


def lessons(folder):
    """What was learned at each step, without how fast."""
    names = ("step", "loss", "learning_rate", "grad_norm")
    return [tuple(row[name] for name in names) for row in rows_of(folder)]


def steps_of(folder):
    return checkpoint_steps(RunDir(folder))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four steps in one go, a checkpoint at each, and the state after them."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    outcome = train(folder, make_config(checkpoint_every=1))
    assert outcome.step == 4
    assert outcome.interrupted_by is None
    return folder, outcome.state


def test_four_steps_are_two_and_two_more_bit_for_bit(whole, tmp_path):
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
    assert_trees_identical(outcome.state, whole[1])
    assert len(lessons(folder)) == 4
    assert lessons(folder) == lessons(whole[0])
    # A checkpoint is what the state was then: the donated steps that came after it have changed nothing in it.
    for step, tree in ((2, half.state.params), (4, outcome.state.params)):
        for run in (folder, whole[0]):
            assert_trees_identical(load_params(run / "checkpoints" / str(step), abstract_params(MODEL)), tree)


def test_another_mesh_goes_on_where_the_first_stopped(whole, tmp_path):
    folder = tmp_path / "run"
    train(folder, make_config(num_steps=2))
    mesh = make_mesh(2, 2, 2)
    outcome = train(folder, make_config(), mesh=mesh)
    np.testing.assert_allclose([row[1] for row in lessons(folder)], [row[1] for row in lessons(whole[0])], rtol=1e-5)
    assert_trees_close(outcome.state.opt_state, whole[1].opt_state, rtol=1e-3, atol=1e-5)
    table = outcome.state.params["embedding"]["table"]
    assert table.sharding == tree_shardings(outcome.state.params, mesh)["embedding"]["table"]


def test_a_finished_run_takes_no_step(whole):
    before = (whole[0] / "metrics.jsonl").read_text()
    outcome = train(whole[0], make_config(), batches=lambda position: iter(()))
    assert outcome.step == 4
    assert_trees_identical(outcome.state, whole[1])
    assert (whole[0] / "metrics.jsonl").read_text() == before


def test_rows_after_the_restored_step_and_a_torn_line_are_dropped(whole, tmp_path):
    folder = tmp_path / "run"
    train(folder, make_config(num_steps=2))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 77.0}\n{"step": 3, "valid_loss": 77.0}\n{"step": 4, "lo')
    (folder / "samples.jsonl").write_text('{"step": 2, "translation": "a\u2028b"}\n{"step": 3, "translation": "c"}\n')
    train(folder, make_config())
    assert lessons(folder) == lessons(whole[0])
    assert not rows_of(folder, "valid_loss")
    assert (folder / "samples.jsonl").read_text() == '{"step": 2, "translation": "a\u2028b"}\n'


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("place", ["batches", "evaluate"])
def test_a_signal_saves_the_step_in_hand_and_leaves(name, place, whole, tmp_path):
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
        assert_trees_identical(train(folder, make_config()).state, whole[1])
        assert lessons(folder) == lessons(whole[0])


def test_a_signal_before_a_step_saves_that_there_was_none(tmp_path):
    def batches(position):
        os.kill(os.getpid(), signal.SIGTERM)
        return batches_from(position)

    outcome = train(tmp_path / "run", make_config(), batches=batches)
    assert (outcome.step, outcome.interrupted_by) == (0, "SIGTERM")


def test_a_second_interrupt_ends_at_once(tmp_path, request):
    # Python's own, which is not there in a job that a shell has put into the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def batches(position):
        for _ in range(2):  # in this thread and at once: two on their way at the same time would be one
            signal.raise_signal(signal.SIGINT)
        yield random_batch(0)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", make_config(), batches=batches)


def poisoned(step, name, value):
    """`train_step` that reports `value` as its loss or gradient at one step, and spoils the parameters with it."""

    def spoilt(state, batch, rng, **constants):
        new_state, metrics = train_step(state, batch, rng, **constants)
        hit = new_state.step == step
        params = jax.tree.map(lambda x: jnp.where(hit, value, x), new_state.params)
        return new_state.replace(params=params), metrics._replace(
            **{name: jnp.where(hit, value, getattr(metrics, name))}
        )

    return spoilt


@pytest.mark.parametrize(
    ("name", "value", "said", "training"),
    [
        ("loss", math.nan, "loss of step 3 is nan", {"checkpoint_every": 1}),
        ("loss", math.inf, "loss of step 3 is inf", {"checkpoint_seconds": 1e-9, "log_every": 100}),
        ("grad_norm", math.inf, "gradient's norm of step 3 is inf", {"checkpoint_every": 1, "log_every": 100}),
    ],
)
def test_what_is_not_finite_stops_with_step_and_cause_and_is_not_saved(
    name, value, said, training, tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "train_step", poisoned(3, name, value))
    with pytest.raises(UserError, match=f"training stopped: the {said}.*lower learning rate"):
        train(tmp_path / "run", make_config(**training))
    assert steps_of(tmp_path / "run") == [1, 2]
    assert all(row["step"] < 3 for row in rows_of(tmp_path / "run"))
    for leaf in jax.tree.leaves(load_params(tmp_path / "run" / "checkpoints" / "2", abstract_params(MODEL))):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize("place", ["validation", "interrupt", "end"])
def test_what_is_not_finite_is_neither_evaluated_nor_saved_at_last(place, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train_step", poisoned(3, "loss", math.nan))
    evaluated = []

    def batches(position):
        for index, batch in enumerate(batches_from(position)):
            if place == "interrupt" and index == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    def evaluate(params, step):
        evaluated.append(step)
        return Evaluation({"valid_loss": 1.0})

    training = {"validation": {"validate_every": 3}, "interrupt": {}, "end": {"num_steps": 3}}[place]
    with pytest.raises(UserError, match="loss of step 3 is nan"):
        train(tmp_path / "run", make_config(log_every=100, **training), batches=batches, evaluate=evaluate)
    assert evaluated == []
    assert steps_of(tmp_path / "run") == []


def test_a_learning_rate_that_is_far_too_high_is_the_users_to_lower(tmp_path):
    config = make_config(schedule="constant", peak_learning_rate=1e38, warmup_steps=1, checkpoint_every=1)
    with pytest.raises(UserError, match="step 2 is"):
        train(tmp_path / "run", config)
    for leaf in jax.tree.leaves(
        load_params(resolve_checkpoint(RunDir(tmp_path / "run"), "last"), abstract_params(MODEL))
    ):
        assert np.all(np.isfinite(leaf))


@contextmanager
def compilations():
    """The compilations inside, as a list of seconds."""
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
    """Nothing is copied to the device implicitly either."""
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


def test_a_shape_that_was_not_warmed_up_warns(tmp_path):
    with pytest.warns(UserWarning, match="8 rows of 6 \\+ 6 tokens is not among the warmup batches"):
        train(tmp_path / "run", make_config(num_steps=1), warmup_batches=[random_batch(0, length=8)])


def test_a_trace_of_some_steps_can_be_written(tmp_path):
    train(tmp_path / "run", make_config(num_steps=8), profile=True)
    assert list((tmp_path / "run" / "profile").rglob("*perfetto_trace.json.gz"))


def test_rows_validations_checkpoints_and_the_device(tmp_path, monkeypatch):
    """One run looked at from all sides: five steps of two shapes, logged and validated now and then."""
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
        while True:
            yield random_batch(position, length=6 + 2 * (position % 2))
            position += 1

    monkeypatch.setattr(loop, "train_step", counted_step)
    monkeypatch.setattr(jax, "device_get", counted_fetch)
    config = make_config(num_steps=5, log_every=2, validate_every=2, keep_checkpoints=1)
    with log_lines() as lines:
        outcome = train(folder, config, batches=batches, evaluate=evaluate)

    assert traces == [(8, 6), (8, 8)]  # one trace per shape
    assert [hasattr(metrics, "loss") for metrics, _ in fetched] == [True] * 5  # each step's, once, and nothing else

    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training_rows = [row for row in rows if "loss" in row]
    assert [row["step"] for row in training_rows] == [2, 4, 5]
    assert all({"step", "loss", "learning_rate", "tokens_per_second"} <= row.keys() for row in training_rows)
    assert all(row["tokens_per_second"] > 0 for row in training_rows)
    np.testing.assert_allclose([row["learning_rate"] for row in training_rows], [0.0625, 0.125, 0.1118034], rtol=1e-5)
    validation_rows = [row for row in rows if "loss" not in row]
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


def test_without_figures_a_validation_writes_nothing(whole):
    assert len((whole[0] / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_checkpoint_is_due_after_so_many_seconds(tmp_path):
    train(tmp_path / "run", make_config(num_steps=3, checkpoint_seconds=1e-9))
    assert steps_of(tmp_path / "run") == [1, 2, 3]


def test_given_parameters_are_started_from_and_left_alone(tmp_path):
    optimizer = make_optimizer(make_config().training, MODEL.d_model)
    given = jax.jit(lambda rng: init_state(Transformer(MODEL), optimizer, rng).params)(init_rng(99))
    given = jax.device_put(given, jax.sharding.NamedSharding(one_device_mesh(), jax.sharding.PartitionSpec()))
    copy = jax.tree.map(np.array, given)
    config = make_config(num_steps=1, schedule="constant", peak_learning_rate=1e-12, warmup_steps=1)
    outcome = train(tmp_path / "run", config, initial_params=given)
    assert_trees_close(outcome.state.params, copy)
    assert_trees_identical(given, copy)  # not donated to the first step
    assert outcome.state.opt_state[0].count == 1


def test_an_error_of_the_evaluation_leaves_whole_checkpoints(tmp_path):
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
