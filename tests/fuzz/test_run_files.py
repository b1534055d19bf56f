"""Damage the files of a run one at a time: the result is a `UserError`, or unchanged if the file is not needed."""

import gc
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.checkpoint.checkpoint import (
    load_params,
    resolve_checkpoint,
    save_params,
    write_checkpoint_manifest,
)
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.types import UserError

MODEL = ModelConfig(vocab_size=20, d_model=16, num_layers=1, num_heads=2, d_ff=32)

# A failed restore of Orbax leaves coroutines that are never awaited.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

HARMS = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file: file.write_bytes(b""),
    "removed": lambda file: file.unlink(),
    "garbage": lambda file: file.write_bytes(np.random.default_rng(0).bytes(max(64, file.stat().st_size))),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint of parameters, and the parameters."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(Transformer(MODEL).init)(jax.random.key(0), tokens, tokens)["params"]
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_params(folder, params)
    yield folder, params
    for _ in range(3):  # raise warnings about leftovers of failed restores here, not in another test
        load_params(folder, abstract_params(MODEL))
        gc.collect()


@pytest.mark.parametrize("harm", HARMS)
def test_damaged_checkpoint_file_is_rejected_or_harmless(saved, tmp_path, harm):
    run, params = saved
    rejected = 0
    for number, file in enumerate(sorted(file for file in run.rglob("*") if file.is_file())):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        HARMS[harm](copy / file.relative_to(run))
        try:
            jax.tree.map(np.testing.assert_array_equal, load_params(copy, abstract_params(MODEL)), params)
        except UserError as error:
            rejected += str(copy) in str(error)
    assert rejected > 0


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"valid_loss": "low"}', '{"valid_loss": null}', "\x80"])
def test_damaged_metrics_of_a_checkpoint_are_rejected(tmp_path, text):
    run = RunDir(tmp_path)
    (run.checkpoints / "3" / "metrics").mkdir(parents=True)
    (run.checkpoints / "3" / "metrics" / "metrics").write_bytes(text.encode("latin-1"))
    write_checkpoint_manifest(run.checkpoints / "3")
    message = "has no best checkpoint" if "null}" in text else "3/metrics/metrics: "
    with pytest.raises(UserError, match=message):
        resolve_checkpoint(run, "best")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', "9" * 5000, "[" * 100_000, "\x80"])
def test_damaged_result_is_empty(tmp_path, text):
    (tmp_path / "result.json").write_bytes(text.encode("latin-1"))
    assert RunDir(tmp_path).read_result() in ({}, {"a": 1})


def test_paths_in_files_are_rejected(tmp_path):
    """Check that the name of a checkpoint is a step, and never a path."""
    run = RunDir(tmp_path / "run")
    (tmp_path / "5" / "state").mkdir(parents=True)
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "4").mkdir()
    for which in ("../5", "../../5", str(tmp_path / "5"), "4/../../../5", "5"):
        with pytest.raises(UserError, match="has no checkpoint"):
            resolve_checkpoint(run, which)
    config = json.dumps({"decoding": {"checkpoint": "../../5"}})
    run.config_file.write_text(config)
    with pytest.raises(UserError, match=r"decoding\.checkpoint='\.\./\.\./5'"):
        run.load_config()
