"""`fit` on one device with a model that compiles in a second or two; shared by the tests of training."""

from collections.abc import Iterator

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig, TrainingConfig
from transformer_jax.testing import one_device_mesh, random_batch
from transformer_jax.training.loop import Evaluation, Outcome, fit
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


def train(folder, config, *, mesh=None, batches=batches_from, evaluate=None, initial_params=None, **options) -> Outcome:
    """Call `fit` with a run directory that is created if necessary."""
    folder.mkdir(exist_ok=True)
    evaluate = evaluate or (lambda params, step: Evaluation())
    return fit(config, RunDir(folder), mesh or one_device_mesh(), batches, evaluate, initial_params, **options)
