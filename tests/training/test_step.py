"""The training and evaluation steps."""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from tiny_training import MODEL

from transformer_jax.config import ModelConfig, TrainingConfig
from transformer_jax.data.batching import Rows, Shape, make_batch
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.testing import assert_trees_close, assert_trees_identical, random_batch
from transformer_jax.training.loss import LossSpec
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.sharding import batch_sharding, make_mesh, put_batch
from transformer_jax.training.step import dropout_rng, eval_step, init_rng, init_state, norm_of_stacks, train_step
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
def test_accumulation_does_not_change_the_update(accumulate):
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


def test_loss_and_gradient_are_means_over_all_tokens_of_the_batch():
    batch = random_batch(0)
    state, step = compiled()
    _, metrics = step(state, batch, RNG)
    logits = Transformer(MODEL).apply({"params": state.params}, *inputs(batch), deterministic=True)
    loss_sum, num_tokens = reference.label_smoothed_loss(np.asarray(logits), batch.tgt_out, PAD_ID)
    assert metrics.num_tokens == num_tokens
    np.testing.assert_allclose(metrics.loss, loss_sum / num_tokens, rtol=1e-5)
    twice = jax.tree.map(lambda rows: np.concatenate([rows, rows]), batch)
    np.testing.assert_allclose(step(state, twice, RNG)[1].grad_norm, metrics.grad_norm, rtol=1e-5)


def test_padding_rows_do_not_change_the_update():
    state, step = compiled()
    batch = random_batch(0)
    expected_state, expected = step(state, batch, RNG)
    new_state, metrics = step(state, with_empty_rows(batch, 3), RNG)
    assert metrics.num_tokens == expected.num_tokens
    assert_trees_close(metrics, expected)
    assert_trees_close(new_state.opt_state, expected_state.opt_state, rtol=1e-4)


def test_batch_of_padding_rows_changes_no_parameter():
    state, step = compiled()
    new_state, metrics = step(state, with_empty_rows(jax.tree.map(lambda rows: rows[:0], random_batch(0)), 8), RNG)
    assert metrics.num_tokens == metrics.loss == metrics.grad_norm == 0
    assert_trees_identical(new_state.params, state.params)


def test_step_is_deterministic():
    state, step = compiled(dropout=0.3)
    batch = random_batch(0)
    assert_trees_identical(step(state, batch, RNG), step(state, batch, RNG))


def test_dropout_key_is_fold_in_of_the_step():
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


def test_keys_differ_by_seed_and_purpose():
    keys = [jax.random.key_data(make(seed)).tolist() for make in (init_rng, dropout_rng) for seed in (0, 1)]
    assert len(set(map(tuple, keys))) == 4


def test_update_changes_step_optimizer_and_parameters():
    state, step = compiled()
    new_state, _ = step(state, random_batch(0), RNG)
    assert (state.step, new_state.step) == (0, 1)
    assert optax.tree.get(new_state.opt_state, "mu") is not None
    changed = jax.tree.map(lambda old, new: bool(np.any(old != new)), state.params, new_state.params)
    assert all(jax.tree.leaves(changed))


def test_model_overfits_one_batch():
    state, step = compiled(smoothing=0.0, rate=0.01)
    batch = random_batch(0, rows=4)
    losses = []
    for _ in range(80):
        state, metrics = step(state, batch, RNG)
        losses.append(float(metrics.loss))
    assert losses[0] > 2
    assert losses[-1] < 0.1


def test_evaluation_uses_neither_dropout_nor_smoothing():
    batch = with_empty_rows(random_batch(0), 1)
    state, _ = compiled()
    model = make_model(0.5)
    sums = jax.jit(partial(eval_step, model=model))(state.params, jax.tree.map(jnp.asarray, batch))
    logits = model.apply({"params": state.params}, *inputs(batch), deterministic=True)
    loss_sum, num_tokens = reference.label_smoothed_loss(np.asarray(logits), batch.tgt_out, PAD_ID, smoothing=0.0)
    assert sums.num_tokens == num_tokens
    np.testing.assert_allclose([sums.loss_sum, sums.nll_sum], [loss_sum, loss_sum], rtol=1e-5)


def packed_and_unpacked():
    """Return the batches of fourteen pairs of random ids in seven rows and an empty one, and one pair a row."""
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        offsets = np.cumsum([0, *rng.integers(1, 6, 14)])
        sides += [rng.integers(4, MODEL.vocab_size, offsets[-1]).astype(np.uint16), offsets]
    pairs = EncodedPairs(*sides, source_eos=True)
    packed = make_batch(pairs, Rows(Shape(8, 18, 18), np.arange(14), np.array([2, 1, 2, 2, 3, 2, 2])), MODEL)
    assert packed.src.shape == packed.tgt_in.shape == (8, 18)
    assert packed.src_segments.max(axis=1).tolist() == [2, 1, 2, 2, 3, 2, 2, 0]
    return packed, make_batch(pairs, Rows(Shape(14, 6, 6), np.arange(14)), MODEL)


@pytest.mark.parametrize(("accumulate", "devices"), [(2, 4), (1, 1)])
def test_packed_batch_gives_the_update_of_its_pairs(accumulate, devices):
    state, step = compiled()
    packed, unpacked = packed_and_unpacked()
    expected_state, expected = step(state, unpacked, RNG)
    step = compiled(accumulate=accumulate)[1]
    if devices > 1:
        mesh = make_mesh(devices, 1, 8 // devices)
        packed, step = put_batch(packed, mesh), jax.jit(step, in_shardings=(None, batch_sharding(mesh), None))
    new_state, metrics = step(state, packed, RNG)
    assert metrics.num_tokens == expected.num_tokens == np.sum(unpacked.tgt_out != PAD_ID)
    assert_trees_close(metrics, expected)
    assert_trees_close(new_state.opt_state, expected_state.opt_state, rtol=1e-4)


def test_packed_batch_gives_the_evaluation_of_its_pairs():
    step = jax.jit(partial(eval_step, model=make_model(0.0)))
    one, other = (step(compiled()[0].params, batch) for batch in packed_and_unpacked())
    assert one.num_tokens == other.num_tokens
    assert_trees_close(one, other)


def test_norm_of_stacks_equals_the_norm_of_the_arrays():
    config = ModelConfig(vocab_size=11, d_model=16, num_heads=2, d_ff=16, num_layers=2, norm_position="pre")
    leaves, tree = jax.tree.flatten(abstract_params(config))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = tree.unflatten([jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)])
    np.testing.assert_allclose(norm_of_stacks(params), optax.tree.norm(params), rtol=1e-6)
    # d_ff equals d_model, but the sharding of the two matrices differs.
    stacks = jax.make_jaxpr(norm_of_stacks)(params).jaxpr.eqns
    assert sum(eqn.primitive.name == "concatenate" for eqn in stacks) < len(leaves) / 2


def test_update_is_selected_without_a_conditional_on_accelerators():
    """A conditional makes the host wait for its predicate there, and copies every array of its branches."""
    state, step = compiled()
    traced = step.trace(state, random_batch(0), RNG)
    on_predicate = r'\(tensor<i1>\) -> tensor<i32>\s+%\w+(:\d+)? = "stablehlo.case"'
    for platform, has_conditional in (("cpu", True), ("tpu", False), ("cuda", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert bool(re.search(on_predicate, text)) == has_conditional
