"""Bytes and traffic per device computed from the config, compared with XLA's program for eight devices."""

import dataclasses
import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.scaling import bytes_per_device, traffic_per_step
from transformer_jax.config import Config, ModelConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.sharding import batch_sharding, gather_over_fsdp, make_mesh, tree_shardings
from transformer_jax.training.step import dropout_rng, init_rng, init_state, train_step
from transformer_jax.types import Batch, UserError

MODEL = ModelConfig(
    vocab_size=64, d_model=32, num_layers=2, decoder_num_layers=1, num_heads=8, d_ff=64, residual_dropout=0.0
)
CONFIG = Config(model=MODEL)
ROWS, LENGTH = 16, 12
OPERATION = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def compile_step(*sizes):
    """Return the compiled training step for a mesh, without running it."""
    mesh, model = make_mesh(*sizes), Transformer(MODEL)
    optimizer = make_optimizer(CONFIG.training, MODEL.d_model)
    state = jax.eval_shape(lambda: init_state(model, optimizer, init_rng(0)))
    shardings, whole = tree_shardings(state, mesh), NamedSharding(mesh, PartitionSpec())

    def step(state, batch, rng):
        gather = partial(gather_over_fsdp, mesh=mesh)
        return train_step(state, batch, rng, model=model, optimizer=optimizer, gather_params=gather)

    step = jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh), whole),
        out_shardings=(shardings, whole),
    )
    batch = Batch(*(jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for _ in range(3)))
    return step.lower(state, batch, jax.eval_shape(lambda: dropout_rng(0))).compile()


def array_bytes(text):
    return sum(
        4 * int(np.prod([int(n) for n in shape.split(",") if n])) for shape in re.findall(r"[fsu]32\[([\d,]*)\]", text)
    )


def collectives(compiled):
    """Return {operation: bytes of its outputs on a device}."""
    found = Counter()
    for line in compiled.as_text().splitlines():
        match = OPERATION.search(line)
        if match:
            found[match[2]] += array_bytes(match[1])
    return found


def test_bytes_and_traffic_equal_the_compiled_step():
    sizes = (2, 2, 2)  # every axis is used
    compiled = compile_step(*sizes)
    held = bytes_per_device(CONFIG, *sizes)
    rows = ROWS // (sizes[0] * sizes[1])
    assert compiled.memory_analysis().argument_size_in_bytes == sum(held) - held.gradients + 4 + 3 * rows * LENGTH * 4
    expected, found = traffic_per_step(CONFIG, ROWS, LENGTH, LENGTH, *sizes), collectives(compiled)
    assert set(found) <= {"all-reduce", "all-gather"}  # every collective is covered by the formula
    assert found["all-gather"] == expected.fsdp_all_gather
    # On CPUs a reduce-scatter is an all-reduce and a slice, over both axes if both are used.
    gradients = expected.fsdp_reduce_scatter or expected.data_all_reduce
    assert found["all-reduce"] == pytest.approx(gradients + expected.tensor_all_reduce, rel=0.01)


def test_state_is_split_by_axes_and_gradients_are_float32():
    config = Config(model=dataclasses.replace(MODEL, param_dtype="bfloat16"))
    one, split = bytes_per_device(config), bytes_per_device(config, fsdp=8)
    assert one.gradients == 2 * one.parameters  # summed up in float32
    assert 6 < one.parameters / split.parameters < 8  # LayerNorm and biases are replicated
    assert bytes_per_device(config, data=8) == one
    assert split.optimizer == pytest.approx(one.optimizer * split.parameters / one.parameters, rel=0.01)


def test_ring_traffic_per_axis():
    traffic = traffic_per_step(CONFIG, ROWS, LENGTH, LENGTH, 4, 2, 1)
    sent = traffic.sent(4, 2, 1)
    assert sent["data"] == 2 * 3 / 4 * traffic.data_all_reduce
    assert sent["fsdp"] == (traffic.fsdp_all_gather + traffic.fsdp_reduce_scatter) / 2
    assert sent["tensor"] == 0


def test_axis_that_does_not_divide_a_dimension_is_rejected():
    with pytest.raises(UserError, match=r"training.mesh_tensor=3 does not divide axis \d of params/"):
        bytes_per_device(CONFIG, tensor=3)
