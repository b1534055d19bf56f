"""A run written by an earlier version goes on to load: bit for bit, and with the translations it had."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer_jax.checkpoint.checkpoint import Checkpoints, load_params
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import init_rng, init_state

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture(params=["format 1", "format 0"])
def run(request, tmp_path):
    run = RunDir(tmp_path / "run")
    shutil.copytree(GOLDEN / "run", run.path)
    if request.param == "format 0":  # as they were before there were manifests
        run.format_file.unlink()
        (run.checkpoints / "2" / "manifest.json").unlink()
    return run


def sha256(tree) -> str:
    """Of all leaves with their paths."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def test_the_state_is_what_it_was(run):
    config = run.load_config()
    assert recover(run, strict=True) == [2]
    assert sha256(load_params(run.checkpoints / "2", config.model)) == EXPECTED["params"]
    model, optimizer = Transformer(config.model), make_optimizer(config.training, config.model.d_model)
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = jax.eval_shape(lambda rng: init_state(model, optimizer, rng), init_rng(0))
    target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state)
    checkpoints = Checkpoints(run)
    restored = checkpoints.restore(2, target)
    checkpoints.close()
    assert sha256(restored) == EXPECTED["state"]
    assert int(restored.step) == 2


def test_it_translates_as_it_did(run):
    assert Translator.load(run.path).translate(EXPECTED["sources"]) == EXPECTED["translations"]
