"""`fit` on one device with a model that compiles in a second or two; shared by the tests of training."""

from collections.abc import Iterator

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig, TrainingConfig
from transformer_jax.data.loader import TrainingData
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


class FunctionData(TrainingData):
    """Training data whose batches come from a function, for `fit`."""

    def __init__(self, batches=batches_from, warmup_batches=(), describe=lambda index: []) -> None:
        for name, value in {"batches": batches, "warmup_batches": warmup_batches, "description": describe}.items():
            object.__setattr__(self, name, value)

    def padding_batches(self):
        return list(self.warmup_batches)

    def describe(self, index):
        return self.description(index)

    def iterator(self, start, stop):
        return self.batches(start)


def train(
    folder,
    config,
    *,
    mesh=None,
    batches=batches_from,
    warmup_batches=(),
    describe=lambda index: [],
    evaluate=None,
    initial_params=None,
    **options,
) -> Outcome:
    """Call `fit` with a run directory that is created if necessary."""
    folder.mkdir(exist_ok=True)
    evaluate = evaluate or (lambda params, step: Evaluation())
    data = FunctionData(batches, warmup_batches, describe)
    return fit(config, RunDir(folder), mesh or one_device_mesh(), data, evaluate, initial_params, **options)
