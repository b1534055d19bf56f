"""Checkpoint averaging against NumPy float64."""

import json
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import MODEL
from interop_cases import random_params

from transformer_jax.checkpoint import averaging
from transformer_jax.checkpoint.averaging import average_checkpoints, average_params, choose_steps
from transformer_jax.checkpoint.checkpoint import Checkpoints, load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError

ABSTRACT = abstract_params(MODEL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run of four checkpoints, whose parameters are initialized with their step as the seed."""
    run = RunDir(tmp_path_factory.mktemp("run"))
    checkpoints = Checkpoints(run)
    for step in (5, 10, 15, 20):
        checkpoints.save(step, {"params": random_params(MODEL, step), "step": jnp.int32(step)})
    checkpoints.close()
    return run


def assert_average(run, steps):
    """Compare the run's averaged parameters with the mean over steps in float64."""

    def check(leaf, *leaves):
        expected = np.mean([part.astype(np.float64) for part in leaves], axis=0).astype(np.float32)
        np.testing.assert_array_equal(leaf, expected)

    averaged = load_params(resolve_checkpoint(run, "average"), ABSTRACT)
    jax.tree.map(check, averaged, *(random_params(MODEL, step) for step in steps))


@pytest.mark.parametrize("last", [3, 1])
def test_an_average_is_the_mean_in_float64(run, last):
    steps = [10, 15, 20][-last:]
    assert average_checkpoints(run, ABSTRACT, choose_steps(run, last=last)) == steps
    assert_average(run, steps)


def test_averages_sum_in_float64_and_keep_each_dtype():
    small = [{"w": np.array([1.0, 2**-24], np.float32)}, *({"w": np.array([2**-24] * 2, np.float32)} for _ in range(3))]
    mean = average_params(small)["w"]
    np.testing.assert_array_equal(mean, np.array([(1 + 3 * 2**-24) / 4, 2**-24], np.float32))
    assert average_params([{"w": jnp.ones(2, jnp.bfloat16)}] * 2)["w"].dtype == jnp.bfloat16


def test_checkpoints_are_loaded_one_at_a_time(run, monkeypatch):
    """20 copies of a big model would not fit on a device next to a training run."""
    loaded: list[weakref.ref] = []
    count = len(jax.tree.leaves(ABSTRACT))

    def load(*args):
        assert sum(leaf() is not None for leaf in loaded) <= count, "more than the previous checkpoint is in memory"
        params = load_params(*args)
        loaded.extend(map(weakref.ref, jax.tree.leaves(params)))
        return params

    monkeypatch.setattr(averaging, "load_params", load)
    assert average_checkpoints(run, ABSTRACT, (5, 10, 15, 20)) == [5, 10, 15, 20]
    assert len(loaded) == 4 * count


@pytest.mark.parametrize("last", [0, 5, -1])
def test_last_out_of_range_raises(run, last):
    with pytest.raises(UserError, match=rf"has 4 checkpoints \[5, 10, 15, 20\]; the last {last} cannot be averaged"):
        choose_steps(run, last=last)


def test_minutes_before_the_last_checkpoint_select_steps(run):
    for step, minutes in {5: 0, 10: 11, 15: 20, 20: 30.5}.items():
        file = run.checkpoints / str(step) / "_CHECKPOINT_METADATA"
        noted = json.loads(file.read_text()) | {"commit_timestamp_nsecs": int((1e6 + minutes) * 60e9)}
        file.write_text(json.dumps(noted))
    chosen = [choose_steps(run, minutes=minutes) for minutes in (0, 11, 20, 99)]
    assert chosen == [[20], [15, 20], [10, 15, 20], [5, 10, 15, 20]]
    with pytest.raises(UserError, match=r"none can be averaged over -1 minutes"):
        choose_steps(run, minutes=-1)
    file.write_text("{}")
    with pytest.raises(UserError, match="does not state when"):
        choose_steps(run, minutes=5)


def test_given_steps_are_averaged(run):
    assert average_checkpoints(run, ABSTRACT, (20, 5, 20)) == [5, 20]
    assert_average(run, [5, 20])
    with pytest.raises(UserError, match="no checkpoint '6'"):
        average_checkpoints(run, ABSTRACT, (5, 6))
