"""A packed batch gives the loss and the update of its pairs one a row."""

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest
from tiny_training import MODEL

from transformer_jax.config import TrainingConfig
from transformer_jax.data.batching import Rows, Shape, make_batch
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.model.transformer import Transformer
from transformer_jax.testing import assert_trees_close
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.sharding import batch_sharding, make_mesh, put_batch
from transformer_jax.training.step import dropout_rng, eval_step, init_rng, init_state, train_step

QUIET = Transformer(dataclasses.replace(MODEL, residual_dropout=0.0))
OPTIMIZER = make_optimizer(TrainingConfig(warmup_steps=4), MODEL.d_model)


def pairs():
    """Fourteen pairs of random ids."""
    rng = np.random.default_rng(0)
    sides = []
    for _ in range(2):
        offsets = np.cumsum([0, *rng.integers(1, 6, 14)])
        sides += [rng.integers(4, MODEL.vocab_size, offsets[-1]).astype(np.uint16), offsets]
    return EncodedPairs(*sides, source_eos=True)


ALONE = make_batch(pairs(), Rows(Shape(14, 6, 6), np.arange(14)), MODEL)
# Eight rows, the last of which is empty.
PACKED = make_batch(pairs(), Rows(Shape(8, 18, 18), np.arange(14), np.array([2, 1, 2, 2, 3, 2, 2])), MODEL)


@pytest.fixture(scope="module")
def alone():
    state = init_state(QUIET, OPTIMIZER, init_rng(0))
    return state, *jax.jit(partial(train_step, model=QUIET, optimizer=OPTIMIZER))(state, ALONE, dropout_rng(0))


@pytest.mark.parametrize(("accumulate", "devices"), [(1, 1), (2, 4)])
def test_the_update_is_that_of_the_pairs_one_a_row(alone, accumulate, devices):
    state, expected_state, expected = alone
    mesh = make_mesh(devices, 1, 8 // devices) if devices > 1 else None
    batch = put_batch(PACKED, mesh) if mesh else PACKED
    step = partial(train_step, model=QUIET, optimizer=OPTIMIZER, accumulate=accumulate)
    shardings = {"in_shardings": (None, batch_sharding(mesh), None)} if mesh else {}
    new_state, metrics = jax.jit(step, **shardings)(state, batch, dropout_rng(0))
    assert metrics.num_tokens == expected.num_tokens == np.sum(pairs().target_lengths)
    assert_trees_close(metrics, expected)
    assert_trees_close(new_state.opt_state, expected_state.opt_state, rtol=1e-4)


def test_evaluation_is_too(alone):
    step = jax.jit(partial(eval_step, model=QUIET))
    one, other = (step(alone[0].params, batch) for batch in (ALONE, PACKED))
    assert one.num_tokens == other.num_tokens
    assert_trees_close(one, other)


def test_rows_hold_what_is_meant():
    assert list(itertools.chain(PACKED.src.shape, PACKED.tgt_in.shape)) == [8, 18, 8, 18]
    assert PACKED.src_segments.max(axis=1).tolist() == [2, 1, 2, 2, 3, 2, 2, 0]
