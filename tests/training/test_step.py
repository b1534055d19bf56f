"""THE training step."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from tiny_training import MODEL

from transformer_jax.config import TrainingConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.testing import assert_trees_close, assert_trees_identical, random_batch
from transformer_jax.training.loss import LossSpec
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import dropout_rng, eval_step, init_rng, init_state, train_step
from transformer_jax.types import PAD_ID

RNG = dropout_rng(0)


def make_model(dropout):
    return Transformer(dataclasses.replace(MODEL, residual_dropout=dropout))


@cache
def compiled(dropout=0.0, accumulate=1, smoothing=0.1, rate=None):
    training = (
        TrainingConfig(warmup_steps=4)
        if rate is None
        else TrainingConfig(schedule="constant", peak_learning_rate=rate, warmup_steps=1)
    )
    optimizer = make_optimizer(training, MODEL.d_model)
    step = partial(
        train_step, model=make_model(dropout), optimizer=optimizer, loss=LossSpec(smoothing), accumulate=accumulate
    )
    return init_state(make_model(dropout), optimizer, init_rng(0)), jax.jit(step)


def inputs(batch):
    return jnp.asarray(batch.src), jnp.asarray(batch.tgt_in)


def with_empty_rows(batch, count):
    return jax.tree.map(
        lambda rows: np.concatenate([rows, np.full((count, rows.shape[1]), PAD_ID, np.int32)]),
        batch,
    )


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulation_changes_nothing(accumulate):
    # Parts of very different numbers of tokens: the mean of their means would be something else.
    batch = random_batch(0, rows=4)
    batch = jax.tree.map(lambda *parts: np.concatenate(parts), batch, random_batch(1, rows=4))
    batch.tgt_out[::4, 1:] = PAD_ID
    state, step = compiled()
    expected_state, expected = step(state, batch, RNG)
    new_state, metrics = compiled(accumulate=accumulate)[1](state, batch, RNG)
    assert metrics.num_tokens == expected.num_tokens == np.sum(batch.tgt_out != PAD_ID)
    assert_trees_close(metrics, expected)
    assert_trees_close(new_state.opt_state, expected_state.opt_state, rtol=1e-4)


def test_loss_and_gradient_are_means_over_the_tokens_of_the_whole_batch():
    batch = random_batch(0)
    state, step = compiled()
    _, metrics = step(state, batch, RNG)
    logits = Transformer(MODEL).apply({"params": state.params}, *inputs(batch), deterministic=True)
    loss_sum, num_tokens = reference.label_smoothed_loss(np.asarray(logits), batch.tgt_out, PAD_ID)
    assert metrics.num_tokens == num_tokens
    np.testing.assert_allclose(metrics.loss, loss_sum / num_tokens, rtol=1e-5)
    twice = jax.tree.map(lambda rows: np.concatenate([rows, rows]), batch)
    np.testing.assert_allclose(step(state, twice, RNG)[1].grad_norm, metrics.grad_norm, rtol=1e-5)


def test_empty_rows_change_nothing():
    state, step = compiled()
    batch = random_batch(0)
    expected_state, expected = step(state, batch, RNG)
    new_state, metrics = step(state, with_empty_rows(batch, 3), RNG)
    assert metrics.num_tokens == expected.num_tokens
    assert_trees_close(metrics, expected)
    assert_trees_close(new_state.opt_state, expected_state.opt_state, rtol=1e-4)


def test_a_batch_of_empty_rows_gives_no_nan():
    state, step = compiled()
    new_state, metrics = step(state, with_empty_rows(jax.tree.map(lambda rows: rows[:0], random_batch(0)), 8), RNG)
    assert metrics.num_tokens == metrics.loss == metrics.grad_norm == 0
    assert_trees_identical(new_state.params, state.params)


def test_the_same_state_and_batch_give_the_same_result_bit_for_bit():
    state, step = compiled(dropout=0.3)
    batch = random_batch(0)
    assert_trees_identical(step(state, batch, RNG), step(state, batch, RNG))


def test_randomness_is_fold_in_of_the_step_and_nothing_else():
    state, step = compiled(dropout=0.3)
    batch = random_batch(0)
    for number in (0, 5):
        _, metrics = step(state.replace(step=jnp.int32(number)), batch, RNG)
        logits = make_model(0.3).apply(
            {"params": state.params},
            *inputs(batch),
            deterministic=False,
            rngs={"dropout": jax.random.fold_in(RNG, number)},
        )
        loss_sum, num_tokens = reference.label_smoothed_loss(np.asarray(logits), batch.tgt_out, PAD_ID)
        np.testing.assert_allclose(metrics.loss, loss_sum / num_tokens, rtol=1e-5)
    other = step(state, batch, dropout_rng(1))[1].loss
    assert (
        len({float(other), *(float(step(state.replace(step=jnp.int32(n)), batch, RNG)[1].loss) for n in (0, 5))}) == 3
    )


def test_keys_of_a_run_differ_by_seed_and_purpose():
    keys = [jax.random.key_data(make(seed)).tolist() for make in (init_rng, dropout_rng) for seed in (0, 1)]
    assert len(set(map(tuple, keys))) == 4


def test_one_update_moves_step_and_optimizer_along():
    state, step = compiled()
    new_state, _ = step(state, random_batch(0), RNG)
    assert (state.step, new_state.step) == (0, 1)
    assert optax.tree.get(new_state.opt_state, "mu") is not None
    changed = jax.tree.map(lambda old, new: bool(np.any(old != new)), state.params, new_state.params)
    assert all(jax.tree.leaves(changed))


def test_a_tiny_batch_is_learned_by_heart():
    state, step = compiled(smoothing=0.0, rate=0.01)
    batch = random_batch(0, rows=4)
    losses = []
    for _ in range(80):
        state, metrics = step(state, batch, RNG)
        losses.append(float(metrics.loss))
    assert losses[0] > 2
    assert losses[-1] < 0.1


def test_evaluation_has_neither_dropout_nor_smoothing():
    batch = with_empty_rows(random_batch(0), 1)
    state, _ = compiled()
    model = make_model(0.5)
    sums = jax.jit(partial(eval_step, model=model))(state.params, jax.tree.map(jnp.asarray, batch))
    logits = model.apply({"params": state.params}, *inputs(batch), deterministic=True)
    loss_sum, num_tokens = reference.label_smoothed_loss(np.asarray(logits), batch.tgt_out, PAD_ID, smoothing=0.0)
    assert sums.num_tokens == num_tokens
    np.testing.assert_allclose([sums.loss_sum, sums.nll_sum], [loss_sum, loss_sum], rtol=1e-5)
