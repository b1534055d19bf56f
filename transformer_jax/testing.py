"""Small inputs for tests: a corpus, a configuration, a trained run, random batches, and comparisons of array trees.

Everything here runs on a CPU in seconds and needs no network. The project's own tests use it, and so can tests of code
that builds on the package:

    def test_my_metric(tmp_path):
        tiny = train_tiny_run(tmp_path)
        translator = Translator.load(tiny.run)
        assert my_metric(translator.translate(["the red dog"])) >= 0
"""

import dataclasses
import logging
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from transformer_jax import run
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig
from transformer_jax.training.sharding import AXES
from transformer_jax.types import BOS_ID, EOS_ID, PAD_ID, SPECIAL_TOKENS, Batch, Params

ENGLISH = ("a", "the", "red", "blue", "dog", "cat", "house", "tree", "runs", "sees", "two", "three")
GERMAN = ("ein", "der", "rot", "blau", "hund", "katze", "haus", "baum", "rennt", "sieht", "zwei", "drei")


def write_tiny_corpus(folder: Path, train: int = 200, valid: int = 8, test: int = 12) -> None:
    """Write `train.en`, `train.de`, and likewise for `valid` and `test`: short sentences translated word for word."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    for split, count in (("train", train), ("valid", valid), ("test", test)):
        rows = [[rng.randrange(len(ENGLISH)) for _ in range(rng.randrange(2, 7))] for _ in range(count)]
        for language, words in (("en", ENGLISH), ("de", GERMAN)):
            lines = "".join(" ".join(words[i] for i in row) + "\n" for row in rows)
            (folder / f"{split}.{language}").write_text(lines, encoding="utf-8")


def tiny_config(directory: Path, **training: object) -> Config:
    """Return a one-layer model and four steps on a corpus of `write_tiny_corpus`, with changes to `training`."""
    return Config(
        model=ModelConfig(vocab_size=300, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        data=DataConfig(source="text", directory=str(directory), batch_tokens=600, max_length=100, max_shapes=1),
        training=TrainingConfig(
            num_steps=4,
            schedule="constant",
            warmup_steps=1,
            peak_learning_rate=1e-2,
            log_every=1,
            validate_every=4,
            checkpoint_every=2,
            valid_sentences=2,
            num_samples=1,
        ),
        decoding=DecodingConfig(beam_size=1, max_length_offset=3),
    ).with_changes(training=training)


@dataclasses.dataclass(frozen=True)
class TinyRun:
    """A finished training run of four steps, with checkpoints of steps 2 and 4."""

    folder: Path
    """Directory that holds the corpus and the run."""
    corpus: Path
    log: tuple[str, ...] = ()
    """Lines that training logged."""

    @property
    def run(self) -> Path:
        """Directory of the run."""
        return self.folder / "runs" / "tiny"

    @property
    def config(self) -> Config:
        """Configuration of the run."""
        return RunDir(self.run).load_config()

    def copy(self, to: Path) -> Path:
        """Copy the run to a directory where a test may change it."""
        return Path(shutil.copytree(self.run, to))


def train_tiny_run(folder: Path) -> TinyRun:
    """Write a corpus to `corpus/` in a directory, and train a run of four steps in its `runs/tiny/` within seconds."""
    write_tiny_corpus(folder / "corpus")
    with log_lines() as lines:
        run.train(tiny_config(folder / "corpus"), folder / "runs" / "tiny")
    return TinyRun(folder, folder / "corpus", tuple(lines))


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Collect the lines that the package logs inside the context."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # one-method handler
    logger = logging.getLogger("transformer_jax")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def random_batch(seed: int, rows: int = 8, length: int = 6, vocab_size: int = 16) -> Batch:
    """Return random sentence pairs of random lengths, padded to `length` positions, with the default special ids."""
    rng = np.random.default_rng(seed)
    src, tgt = np.full((2, rows, length), PAD_ID, np.int32)
    for side in (src, tgt):
        for row in side:
            end = rng.integers(1, length)
            row[:end] = rng.integers(len(SPECIAL_TOKENS), vocab_size, end)
            row[end] = EOS_ID
    start = np.full((rows, 1), BOS_ID, np.int32)
    return Batch(src, np.concatenate([start, np.where(tgt == EOS_ID, PAD_ID, tgt)[:, :-1]], axis=1), tgt)


def one_device_mesh() -> Mesh:
    """Return a mesh of the first device alone."""
    return jax.make_mesh((1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1])


def assert_trees_identical(actual: Params, expected: Params) -> None:
    """Assert that two pytrees of arrays have the same structure and dtypes and are equal bit for bit."""
    assert repr(jax.tree.structure(actual)) == repr(jax.tree.structure(expected))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.array(a).tobytes() == np.array(b).tobytes()


def assert_trees_close(actual: Params, expected: Params, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Assert that two pytrees of arrays have the same structure and are equal within a tolerance per element."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.array(a), np.array(b), rtol, atol), actual, expected)
