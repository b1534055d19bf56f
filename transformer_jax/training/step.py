"""THE training step: a pure function, the same on one CPU and on many devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from transformer_jax.model.transformer import Transformer
from transformer_jax.training.loss import LossSums, SmoothingMass
from transformer_jax.training.parts import split, sum_dtype, sum_over
from transformer_jax.training.projected_loss import projected_cross_entropy
from transformer_jax.training.state import TrainState
from transformer_jax.types import Batch, Params


class Metrics(NamedTuple):
    """What one training step reports."""

    loss: Float[Array, ""]
    """Label-smoothed cross-entropy, the mean over the batch's target tokens, in nats."""
    num_tokens: Int[Array, ""]
    """Target tokens in the batch, padding not counted."""
    grad_norm: Float[Array, ""]
    """Global norm of the gradient of `loss`, before clipping."""


def train_step(
    state: TrainState,
    batch: Batch,
    dropout_rng: Array,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    smoothing: float = 0.1,
    mass: SmoothingMass = "others",
    accumulate: int = 1,
    max_logits: int | None = None,
    before_use: Callable[[Params], Params] = lambda params: params,
) -> tuple[TrainState, Metrics]:
    """One update: forward, loss, backward, Adam.

    Sums are taken over the whole batch and divided once by its number of target tokens, so the update does not depend
    on how the batch is split over devices or, but for the dropout bits of the parts, over time with `accumulate`. Under
    `jit` with sharded arguments XLA adds the sums of the devices; nothing here knows of them.

    Args:
        state: parameters, optimiser state, step.
        batch: the global batch.
        dropout_rng: the run's key; this step's is `fold_in(dropout_rng, state.step)`.
        model, optimizer, smoothing, mass, accumulate: constants of the compiled step.
        max_logits: the most logits to hold at a time, over all devices; None: all.
        before_use: changes where the parameters lie, not what they are, before the model uses them.
    """
    rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params: Params, part: Batch, part_rng: Array) -> tuple[Array, LossSums]:
        rngs = {"dropout": part_rng}
        sums = _loss_sums(model, before_use(params), part, smoothing, mass, max_logits, deterministic=False, rngs=rngs)
        return sums.loss_sum, sums

    grad_fn = jax.grad(loss_fn, has_aux=True)
    if accumulate == 1:
        grads, sums = grad_fn(state.params, batch, rng)
    else:
        parts = split(batch, accumulate), jax.random.split(rng, accumulate)
        (grads, sums), _ = sum_over(lambda part: (grad_fn(state.params, *part), None), parts)
    count = jnp.maximum(sums.num_tokens, 1).astype(sums.loss_sum.dtype)
    grads = jax.tree.map(lambda g: g.astype(sum_dtype(g)) / count, grads)
    grad_norm = optax.tree.norm(grads)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = Metrics(sums.loss_sum / count, sums.num_tokens, grad_norm)
    return TrainState(state.step + 1, params, opt_state), metrics


def eval_step(params: Params, batch: Batch, *, model: Transformer, max_logits: int | None = None) -> LossSums:
    """Sums of the cross-entropy without dropout and without smoothing."""
    return _loss_sums(model, params, batch, 0.0, "others", max_logits, deterministic=True)


def _loss_sums(
    model: Transformer,
    params: Params,
    batch: Batch,
    smoothing: float,
    mass: SmoothingMass,
    max_logits: int | None,
    **options: Any,
) -> LossSums:
    x, output = model.apply(
        {"params": params},
        batch.src,
        batch.tgt_in,
        src_segments=batch.src_segments,
        tgt_segments=batch.tgt_segments,
        method="before_logits",
        **options,
    )
    targets, pad_id = jnp.asarray(batch.tgt_out), model.config.pad_id
    return projected_cross_entropy(
        x, output, targets, targets != pad_id, smoothing=smoothing, mass=mass, pad_id=pad_id, max_logits=max_logits
    )
