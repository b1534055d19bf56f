"""`fit` on one device with a model that compiles in a second or two; shared by the tests of training."""

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from transformer_jax.checkpoint.checkpoint import checkpoint_steps, load_params
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig, TrainingConfig
from transformer_jax.data.loader import TrainingData
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.files import read_json_lines
from transformer_jax.testing import one_device_mesh, random_batch
from transformer_jax.training.loop import Outcome, fit
from transformer_jax.training.metrics import Evaluation
from transformer_jax.types import Batch

MODEL = ModelConfig(vocab_size=16, d_model=16, num_layers=1, num_heads=8, d_ff=32)  # every axis divides by 8


def make_config(**training) -> Config:
    """Return a configuration of four steps, each of them logged, with dropout."""
    defaults = {"num_steps": 4, "warmup_steps": 4, "log_every": 1, "validate_every": 100, "checkpoint_every": 100}
    return Config(model=MODEL, training=TrainingConfig(**(defaults | training)))


def batches_from(position: int) -> Iterator[Batch]:
    """Yield batches without end; each is a function of its position."""
    while True:
        yield random_batch(position)
        position += 1


def train(
    folder,
    config,
    *,
    mesh=None,
    batches=batches_from,
    warmup_batches=(),
    describe=lambda index: [],
    evaluate=lambda params, step: Evaluation(),
    **options,
) -> Outcome:
    """Call `fit` with a run directory that is created if necessary, on the batches of a function of the position."""
    folder.mkdir(exist_ok=True)
    data = object.__new__(TrainingData)
    replaced = {
        "padding_batches": lambda: list(warmup_batches),
        "describe": describe,
        "iterator": lambda start, stop: batches(start),
    }
    vars(data).update(replaced)
    return fit(config, RunDir(folder), mesh or one_device_mesh(), data, evaluate, **options)


def changed(config: Config, **sections) -> Config:
    """Replace fields of a configuration: `changed(config, training={"num_steps": 6})`."""
    new = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(config, **new)


def rows_of(folder, key="loss") -> list[dict]:
    """Return the rows of `metrics.jsonl` that have a key."""
    return [row for row in read_json_lines(folder / "metrics.jsonl") if key in row]


def lessons(folder, key="loss") -> list[dict]:
    """Return the rows that have a key without the speed, which differs between runs."""
    return [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in rows_of(folder, key)]


def losses(folder) -> list[float]:
    """Return the loss of each step, each of which must be logged once and in order."""
    assert [row["step"] for row in rows_of(folder)] == list(range(1, len(rows_of(folder)) + 1))
    return [row["loss"] for row in rows_of(folder)]


def steps_of(folder) -> list[int]:
    """Return the steps of the run's complete checkpoints."""
    return checkpoint_steps(RunDir(folder))


def params_at(folder, step):
    """Return the parameters of a checkpoint."""
    return load_params(folder / "checkpoints" / str(step), abstract_params(MODEL))


@contextmanager
def python_interrupt_handler():
    """Give SIGINT Python's own handler, which a job that a shell started in the background does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
