"""Measure this project's training step."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.child import peak_memory
from benchmarks.limits import matrix_rate, step_flops
from benchmarks.sizes import SIZES, random_batch
from transformer_jax.config import ModelConfig, TrainingConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import dropout_rng, init_rng, init_state, loss_spec, train_step
from transformer_jax.types import Batch

Answer = dict[str, Any]


def ours(spec: Mapping[str, Any]) -> tuple[Answer, Callable[[Answer], Answer]]:
    """`train_step`, compiled, with dropout.

    Args:
        spec: `size`, and where they differ from it `rows` and `length`; `choices`: fields of ModelConfig and of
            TrainingConfig.
    """
    size = SIZES[spec["size"]]
    rows, length = spec.get("rows") or size.rows, spec.get("length") or size.length
    choices = spec.get("choices", {})
    of_model = {item.name for item in dataclasses.fields(ModelConfig)} & set(choices)
    config = ModelConfig(**size.model(**{name: choices[name] for name in of_model}))
    training = TrainingConfig(**{name: choices[name] for name in set(choices) - of_model})
    model = Transformer(config)
    optimizer = make_optimizer(training, config.d_model)
    state = jax.jit(partial(init_state, model, optimizer))(init_rng(0))
    batch = Batch(*map(jnp.asarray, random_batch(config.vocab_size, rows, length)))
    step = partial(
        train_step,
        model=model,
        optimizer=optimizer,
        loss=loss_spec(training),
    )
    rng = dropout_rng(0, training.dropout_generator)

    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch, rng).compile()
    compile_seconds = time.perf_counter() - started
    state, metrics = compiled(state, batch, rng)

    def turn(command: Answer) -> Answer:
        nonlocal state
        if command.get("measure") == "matrix_rate":
            return {"flops": matrix_rate(config.dtype, 128 if spec["size"] == "nano" else 0)}
        if command.get("measure") == "memory":
            return {"peak_bytes": _peak_bytes()}
        start = time.perf_counter()
        for _ in range(command["units"]):
            state, last = compiled(state, batch, rng)
        jax.block_until_ready((state, last))
        return {"seconds": (time.perf_counter() - start) / command["units"]}

    tokens = [int(np.sum(np.asarray(side) != config.pad_id)) for side in (batch.src, batch.tgt_out)]
    memory = compiled.memory_analysis()
    info = {
        "first_loss": float(metrics.loss),
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "compile_seconds": round(compile_seconds, 2),
        "tokens": sum(tokens),
        "model_flops": step_flops(config, tokens, rows),
        "temporary_bytes": getattr(memory, "temp_size_in_bytes", None),
        "device_kind": jax.devices()[0].device_kind,
        "shape": [rows, length],
    }
    return info, turn


def _peak_bytes() -> int:
    """Return the peak memory of the device if it reports one, else of the process."""
    stats = jax.devices()[0].memory_stats() or {}
    return int(stats.get("peak_bytes_in_use") or peak_memory())
