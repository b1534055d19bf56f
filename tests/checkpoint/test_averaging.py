"""Checkpoint averaging against NumPy float64."""

import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.checkpoint import averaging
from transformer_jax.checkpoint.averaging import average_checkpoints, average_params, choose_steps
from transformer_jax.checkpoint.checkpoint import Checkpoints, load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError

CONFIG = ModelConfig(vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=16)


def random_params(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), abstract_params(CONFIG))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four checkpoints, whose parameters are those of the seed of their step."""
    run = RunDir(tmp_path_factory.mktemp("run"))
    checkpoints = Checkpoints(run)
    for step in (5, 10, 15, 20):
        checkpoints.save(step, {"params": random_params(step), "step": jnp.int32(step)})
    checkpoints.close()
    return run


@pytest.mark.parametrize("last", [3, 1])
def test_an_average_is_the_mean_in_float64(run, last):
    steps = [10, 15, 20][-last:]
    assert average_checkpoints(run, abstract_params(CONFIG), choose_steps(run, last=last)) == steps
    trees = [random_params(step) for step in steps]
    averaged = load_params(resolve_checkpoint(run, "average"), abstract_params(CONFIG))

    def check(leaf, *leaves):
        expected = np.mean([part.astype(np.float64) for part in leaves], axis=0).astype(np.float32)
        np.testing.assert_array_equal(leaf, expected)

    jax.tree.map(check, averaged, *trees)


def test_sums_are_in_float64_and_results_in_the_own_type():
    small = [{"w": np.array([1.0, 2**-24], np.float32)}, *({"w": np.array([2**-24] * 2, np.float32)} for _ in range(3))]
    mean = average_params(small)["w"]
    np.testing.assert_array_equal(mean, np.array([(1 + 3 * 2**-24) / 4, 2**-24], np.float32))
    assert average_params([{"w": jnp.ones(2, jnp.bfloat16)}] * 2)["w"].dtype == jnp.bfloat16


def test_checkpoints_are_loaded_one_by_one(run, monkeypatch):
    """20 of a big model are more than a device has room for, beside a training."""
    loaded: list[weakref.ref] = []

    def load(*args):
        assert sum(leaf() is not None for leaf in loaded) <= count, "of the one before, and no other"
        params = load_params(*args)
        loaded.extend(map(weakref.ref, jax.tree.leaves(params)))
        return params

    count = len(jax.tree.leaves(random_params(5)))
    monkeypatch.setattr(averaging, "load_params", load)
    assert average_checkpoints(run, abstract_params(CONFIG), (5, 10, 15, 20)) == [5, 10, 15, 20]
    assert len(loaded) == 4 * count


@pytest.mark.parametrize("last", [0, 5, -1])
def test_too_many_or_none_cannot_be_averaged(run, last):
    with pytest.raises(UserError, match=rf"has 4 checkpoints \[5, 10, 15, 20\]; the last {last} cannot be averaged"):
        choose_steps(run, last=last)


def test_a_time_before_the_last_checkpoint(run):
    for step, minutes in {5: 0, 10: 11, 15: 20, 20: 30.5}.items():
        file = run.checkpoints / str(step) / "_CHECKPOINT_METADATA"
        noted = json.loads(file.read_text()) | {"commit_timestamp_nsecs": int((1e6 + minutes) * 60e9)}
        file.write_text(json.dumps(noted))
    assert [choose_steps(run, minutes=minutes) for minutes in (0, 11, 20, 99)] == [
        [20],
        [15, 20],
        [10, 15, 20],
        [5, 10, 15, 20],
    ]
    with pytest.raises(UserError, match=r"none can be averaged over -1 minutes"):
        choose_steps(run, minutes=-1)
    file.write_text("{}")
    with pytest.raises(UserError, match="does not state when"):
        choose_steps(run, minutes=5)


def test_named_steps(run):
    assert average_checkpoints(run, abstract_params(CONFIG), (20, 5, 20)) == [5, 20]
    expected = average_params([random_params(5), random_params(20)])
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(resolve_checkpoint(run, "average"), abstract_params(CONFIG)),
        expected,
    )
    with pytest.raises(UserError, match="no checkpoint '6'"):
        average_checkpoints(run, abstract_params(CONFIG), (5, 6))
