"""A model that compiles in a second or two, batches for it, and `fit` on one device."""

from collections.abc import Iterator

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig, TrainingConfig
from transformer_jax.training.loop import Evaluation, Outcome, fit
from transformer_jax.training.sharding import AXES
from transformer_jax.types import BOS_ID, EOS_ID, PAD_ID, Batch

VOCAB_SIZE = 16
MODEL = ModelConfig(vocab_size=VOCAB_SIZE, d_model=16, num_layers=1, num_heads=8, d_ff=32)  # each axis splits in 8


def make_config(**training) -> Config:
    """Four steps, each of them logged, with dropout."""
    defaults = {"num_steps": 4, "warmup_steps": 4, "log_every": 1, "validate_every": 100, "checkpoint_every": 100}
    return Config(model=MODEL, training=TrainingConfig(**(defaults | training)))


def make_batch(seed: int, rows: int = 8, length: int = 6) -> Batch:
    """Random sentence pairs of random lengths."""
    rng = np.random.default_rng(seed)
    src, tgt = np.full((2, rows, length), PAD_ID, np.int32)
    for side in (src, tgt):
        for row in side:
            end = rng.integers(1, length)
            row[:end] = rng.integers(4, VOCAB_SIZE, end)
            row[end] = EOS_ID
    start = np.full((rows, 1), BOS_ID, np.int32)
    return Batch(src, np.concatenate([start, np.where(tgt == EOS_ID, PAD_ID, tgt)[:, :-1]], axis=1), tgt)


def batches_from(position: int) -> Iterator[Batch]:
    """Batches without end; each is a function of its position."""
    while True:
        yield make_batch(position)
        position += 1


def one_device() -> Mesh:
    """A mesh of the first device alone."""
    return jax.make_mesh((1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])


def train(folder, config, *, mesh=None, batches=batches_from, evaluate=None, initial_params=None, **options) -> Outcome:
    """`fit` in a folder."""
    folder.mkdir(exist_ok=True)
    evaluate = evaluate or (lambda params, step: Evaluation())
    return fit(config, RunDir(folder), mesh or one_device(), batches, evaluate, initial_params, **options)


def assert_same_bits(one, other) -> None:
    """Two trees of arrays are equal bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert np.array(a).tobytes() == np.array(b).tobytes()


def assert_close(one, other, rtol=1e-5, atol=1e-6) -> None:
    """Two trees of arrays are equal to float tolerance."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.array(a), np.array(b), rtol, atol), one, other)
