"""Checkpoint averaging against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import abstract_params
from transformer_jax.run.averaging import average_checkpoints, average_params
from transformer_jax.run.checkpoint import Checkpoints, load_params, resolve_checkpoint
from transformer_jax.run.folder import RunFolder

CONFIG = ModelConfig(vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=16)


def random_params(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract_params(CONFIG))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four checkpoints, whose parameters are those of the seed of their step."""
    run = RunFolder(tmp_path_factory.mktemp("run"))
    checkpoints = Checkpoints(run)
    for step in (5, 10, 15, 20):
        checkpoints.save(step, {"params": random_params(step), "step": jnp.int32(step)})
    checkpoints.close()
    return run


@pytest.mark.parametrize("last", [3, 1])
def test_an_average_is_the_mean_in_float64(run, last):
    steps = [10, 15, 20][-last:]
    assert average_checkpoints(run, CONFIG, last) == steps
    trees = [random_params(step) for step in steps]
    averaged = load_params(resolve_checkpoint(run, "average"), CONFIG)

    def check(leaf, *leaves):
        expected = np.mean([part.astype(np.float64) for part in leaves], axis=0).astype(np.float32)
        np.testing.assert_array_equal(leaf, expected)

    jax.tree.map(check, averaged, *trees)


def test_sums_are_in_float64_and_results_in_the_own_type():
    small = [{"w": np.array([1.0, 2**-24], np.float32)}, *({"w": np.array([2**-24] * 2, np.float32)} for _ in range(3))]
    mean = average_params(small)["w"]
    np.testing.assert_array_equal(mean, np.array([(1 + 3 * 2**-24) / 4, 2**-24], np.float32))
    assert average_params([{"w": jnp.ones(2, jnp.bfloat16)}] * 2)["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("last", [0, 5, -1])
def test_too_many_or_none_cannot_be_averaged(run, last):
    with pytest.raises(UserError, match=rf"has 4 checkpoints \[5, 10, 15, 20\]; the last {last} cannot be averaged"):
        average_checkpoints(run, CONFIG, last)
