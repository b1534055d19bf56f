"""Runs written by earlier versions load and resume bit for bit, and translate as they did."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import transformer_jax
from transformer_jax.checkpoint.checkpoint import Checkpoints, load_params
from transformer_jax.checkpoint.manifest import verify
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import FORMAT, RunDir
from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import init_rng, init_state

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture(params=[1, 2], ids=lambda number: f"format {number}")
def run(request, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(GOLDEN / ("run_format_2" if request.param == 2 else "run"), run.path)
    assert run.format() == request.param
    return run


def sha256(tree) -> str:
    """Return the SHA-256 of all leaves with their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def restore(run, step):
    config = run.load_config()
    model, optimizer = Transformer(config.model), make_optimizer(config.training, config.model.d_model)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.eval_shape(lambda rng: init_state(model, optimizer, rng), init_rng(0))
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)
    checkpoints = Checkpoints(run)
    restored = checkpoints.restore(step, target)
    checkpoints.close()
    return restored


def test_state_is_restored_bit_for_bit_and_format_is_upgraded(run):
    config = run.load_config()
    assert recover(run, strict=True) == [2]
    params = load_params(run.checkpoints / "2", abstract_params(config.model))
    assert sha256(params) == EXPECTED["params"]
    state = restore(run, 2)
    assert sha256(state) == EXPECTED["state"]
    assert int(state.step) == 2
    assert run.format() == FORMAT
    verify(run.path, ["config.json", "format", "tokenizer/joint.json"])
    assert run.load_config() == config


def test_translations_are_unchanged(run):
    assert Translator.load(run.path).translate(EXPECTED["sources"]) == EXPECTED["translations"]


def test_resumed_training_does_not_depend_on_the_checkpoint_format(run, tmp_path):
    """The step after the checkpoint equals that of an uninterrupted run for every version of the checkpoint."""
    config = run.load_config().with_changes(data={"test": ""}, training={"num_steps": 3})
    outcome = transformer_jax.train(config, run.path)
    assert outcome.step == 3
    other = RunDir(tmp_path / "other")
    shutil.copytree(GOLDEN / "run_format_2", other.path)
    transformer_jax.train(config, other.path)
    assert sha256(restore(run, 3)) == sha256(restore(other, 3))


def test_golden_runs_contain_no_path_of_the_machine_that_made_them():
    messages = list(GOLDEN.rglob("commit_success.txt"))
    assert len(messages) > 4
    for file in messages:
        assert "successful to run/checkpoints/" in file.read_text(), file
