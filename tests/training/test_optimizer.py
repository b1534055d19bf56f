"""The schedules and the Optax chain against equation 3 and Adam in NumPy float64."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

from transformer_jax.config import TrainingConfig
from transformer_jax.training.optimizer import (
    inverse_sqrt_schedule,
    make_optimizer,
    make_schedule,
    noam_schedule,
    warmup_constant_schedule,
)

SCHEDULES = ("noam", "inverse_sqrt", "constant")


@pytest.mark.parametrize(("d_model", "warmup_steps", "scale"), [(512, 4000, 1.0), (64, 10, 2.0), (8, 1, 0.5)])
def test_noam_equals_equation_3_and_peaks_at_the_end_of_warmup(d_model, warmup_steps, scale):
    steps = np.arange(1, 3 * warmup_steps + 2)
    rates = np.asarray(noam_schedule(d_model, warmup_steps, scale)(steps - 1))
    expected = [reference.noam_rate(float(step), d_model, warmup_steps, scale) for step in steps]
    np.testing.assert_allclose(rates, expected, rtol=3e-6)
    assert steps[np.argmax(rates)] == warmup_steps
    np.testing.assert_allclose(rates.max(), scale * (d_model * warmup_steps) ** -0.5, rtol=3e-6)


def test_noam_has_the_papers_defaults():
    np.testing.assert_allclose(noam_schedule(512)(3999), 6.9877e-4, rtol=1e-4)
    assert make_schedule(TrainingConfig(), 512)(3999) == noam_schedule(512)(3999)


def test_inverse_sqrt_warms_up_then_decays_with_the_root_of_the_step():
    schedule = inverse_sqrt_schedule(0.5, warmup_steps=4)
    rates = [schedule(step - 1) for step in (1, 2, 4, 16, 400)]
    np.testing.assert_allclose(rates, [0.125, 0.25, 0.5, 0.25, 0.05], rtol=1e-6)


def test_constant_warms_up_then_stays():
    schedule = warmup_constant_schedule(0.5, warmup_steps=4)
    np.testing.assert_allclose([schedule(step - 1) for step in (1, 2, 4, 5, 4000)], [0.125, 0.25, 0.5, 0.5, 0.5])
    assert warmup_constant_schedule(0.5)(0) == 0.5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_number_of_steps_changes_no_schedule_and_may_be_less_than_warmup(schedule):
    short, long = (
        make_schedule(TrainingConfig(num_steps=num_steps, schedule=schedule, warmup_steps=50), d_model=64)
        for num_steps in (5, 1000)
    )
    np.testing.assert_array_equal(short(np.arange(100)), long(np.arange(100)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_config_chooses_the_schedule(schedule):
    config = TrainingConfig(schedule=schedule, warmup_steps=7, learning_rate_scale=3.0, peak_learning_rate=0.25)
    expected = {
        "noam": noam_schedule(64, 7, 3.0),
        "inverse_sqrt": inverse_sqrt_schedule(0.25, 7),
        "constant": warmup_constant_schedule(0.25, 7),
    }[schedule]
    np.testing.assert_array_equal(make_schedule(config, 64)(np.arange(30)), expected(np.arange(30)))


@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_optimizer_chain_equals_adam_in_float64(clip_norm):
    rng = np.random.default_rng(0)
    config = TrainingConfig(warmup_steps=6, clip_norm=clip_norm)
    optimizer = make_optimizer(config, d_model=16)
    # Of the size of epsilon, of 1, and large.
    sizes = {"tiny": 3e-9, "ordinary": 1.0, "large": 30.0 if clip_norm is None else 1.0}
    params = {name: rng.normal(size=(3, 2)).astype(np.float32) for name in sizes}
    expected = {name: (param.astype(np.float64), np.zeros((3, 2)), np.zeros((3, 2))) for name, param in params.items()}
    params = {name: jnp.asarray(param) for name, param in params.items()}
    state, clipped = optimizer.init(params), 0
    for step in range(1, 21):
        # Norms go up and down, so that about half of them are clipped.
        grads = {n: (size * (step % 3) * rng.normal(size=(3, 2))).astype(np.float32) for n, size in sizes.items()}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum(np.sum(np.square(grad.astype(np.float64))) for grad in grads.values()))
        factor = 1.0
        if clip_norm is not None and norm > clip_norm:
            factor, clipped = clip_norm / norm, clipped + 1
        rate = reference.noam_rate(step, 16, 6)
        for name, (param, m, v) in expected.items():
            expected[name] = reference.adam_step(param, grads[name] * np.float64(factor), m, v, step, rate)
    assert clipped == (0 if clip_norm is None else 14)
    for name, (param, _, _) in expected.items():
        np.testing.assert_allclose(params[name], param, rtol=1e-4, atol=2e-5, err_msg=name)
