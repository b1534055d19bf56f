"""Operations, bytes and memory of the compiled training step, counted by XLA and so equal on every machine."""

from functools import partial

import jax
import jax.numpy as jnp

from transformer_jax.accelerators.cost import training_flops
from transformer_jax.config import ModelConfig, TrainingConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import dropout_rng, init_rng, init_state, train_step
from transformer_jax.types import Batch

MODEL = ModelConfig(vocab_size=500, d_model=256, d_ff=1024, num_heads=4, num_layers=1, residual_dropout=0.1)
ROWS, LENGTH = 64, 32


def tree_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compile_step(**options):
    """Return the abstract state of a training step, and the step compiled for it."""
    model, optimizer = Transformer(MODEL), make_optimizer(TrainingConfig(), MODEL.d_model)
    state = jax.eval_shape(partial(init_state, model, optimizer), init_rng(0))
    batch = Batch(*[jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)] * 3)
    step = jax.jit(partial(train_step, model=model, optimizer=optimizer, **options), donate_argnums=0)
    return state, step.lower(state, batch, dropout_rng(0)).compile()


def test_accumulation_needs_memory_for_one_microbatch_and_one_extra_gradient():
    state, whole = compile_step()
    _, parts = compile_step(accumulate=4)
    weights, needed = tree_bytes(state.params), whole.memory_analysis().temp_size_in_bytes
    assert parts.memory_analysis().temp_size_in_bytes <= 1.1 * (needed / 4 + 2 * weights)
    assert parts.memory_analysis().temp_size_in_bytes < 0.5 * needed


def test_compiled_step_stays_within_operations_bytes_and_memory():
    state, compiled = compile_step()
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    weights, tokens = tree_bytes(state.params), ROWS * LENGTH
    logits, activations = tokens * MODEL.vocab_size * 4, tokens * MODEL.d_model * 4
    layers = MODEL.num_layers * 2  # of the encoder and of the decoder

    # Matrix products dominate: norms, softmax, dropout and Adam may add 6 %, but a repeated product may not.
    counted = sum(training_flops(MODEL, LENGTH, LENGTH)) * tokens
    assert 1.0 <= cost["flops"] / counted <= 1.06

    # Fitted to three models of other sizes: 20 passes over the weights, 12 over the logits, and for each layer as
    # many as 323 over its activations. 15 % more means an additional pass.
    assert cost["bytes accessed"] <= 1.15 * (20 * weights + 12 * logits + 323 * layers * activations)

    # The state is updated in place. Temporary memory holds gradients, logits, and for each layer what its backward pass
    # needs: 32 times its activations at the time of writing.
    assert memory.alias_size_in_bytes >= tree_bytes(state)
    assert memory.temp_size_in_bytes <= 1.1 * (weights + 4 * logits + 32 * layers * activations)
