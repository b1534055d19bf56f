"""The learning rate and the optimizer (paper section 5.3)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from transformer_jax.config import TrainingConfig
from transformer_jax.training.step import TrainState
from transformer_jax.types import Params

# The formulas of optax.warmup_constant_schedule and of an inverse square root that is scaled to its peak round
# differently in float32, and would change the bits of every run.


def noam_schedule(d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> optax.Schedule:
    """Return lrate = scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (paper eq. 3).

    Args:
        d_model: The model's width.
        warmup_steps: The step at which the rate peaks.
        scale: A factor, 1 in the paper.

    Returns:
        A function of the number of updates done, as Optax counts: the first update has count 0 and is step 1 here.

    >>> f"{noam_schedule(512)(3999):.3g}"
    '0.000699'
    """
    return _from_step_one(lambda step: scale * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5))


def inverse_sqrt_schedule(peak: float, warmup_steps: int) -> optax.Schedule:
    """Return peak * min(step / warmup_steps, sqrt(warmup_steps / step)): eq. 3, given by its peak (fairseq)."""
    return _from_step_one(lambda step: peak * jnp.minimum(step / warmup_steps, (warmup_steps / step) ** 0.5))


def warmup_constant_schedule(peak: float, warmup_steps: int = 1) -> optax.Schedule:
    """Return peak * min(1, step / warmup_steps)."""
    return _from_step_one(lambda step: peak * jnp.minimum(step / warmup_steps, 1.0))


def _from_step_one(rate: Callable[[Array], Array]) -> optax.Schedule:
    """Turn a function of the step, from 1, into one of the number of updates done, from 0."""
    return lambda count: rate(jnp.asarray(count, jnp.float32) + 1)


def make_schedule(config: TrainingConfig, d_model: int) -> optax.Schedule:
    """Return the schedule `training.schedule`. It does not depend on `num_steps`, so runs can be extended."""
    if config.schedule == "noam":
        return noam_schedule(d_model, config.warmup_steps, config.learning_rate_scale)
    make = inverse_sqrt_schedule if config.schedule == "inverse_sqrt" else warmup_constant_schedule
    return make(config.peak_learning_rate, config.warmup_steps)


class WithAverage(NamedTuple):
    """The state of an optimizer that also averages the parameters."""

    inner: optax.OptState
    ema: Params  # in the parameters' dtypes


def with_average(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Keep an exponential moving average of the parameters next to an optimizer, whose updates do not change.

    After update t, from 1, average = d * average + (1 - d) * parameters with d = min(decay, (1 + t) / (10 + t)), so
    that the random initial parameters are soon forgotten. `optax.incremental_update` rounds d differently.
    """

    def init(params: Params) -> WithAverage:
        return WithAverage(optimizer.init(params), jax.tree.map(jnp.copy, params))

    def update(updates: Params, state: WithAverage, params: Params) -> tuple[Params, WithAverage]:
        updates, inner = optimizer.update(updates, state.inner, params)
        done = jnp.asarray(update_count(inner), jnp.float32)
        d = jnp.minimum(decay, (1 + done) / (10 + done))
        new = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: (d * e + (1 - d) * p).astype(e.dtype), state.ema, new)
        return updates, WithAverage(inner, ema)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # the state is this function's own


def update_count(state: optax.OptState) -> Array:
    """Return the number of updates done, from which the schedule of `make_optimizer` computes the learning rate."""
    chain: Any = state.inner if isinstance(state, WithAverage) else state
    return chain[-1].count


def eval_params(state: TrainState) -> Params:
    """Return the parameters to evaluate: their moving average if the run keeps one."""
    return state.opt_state.ema if isinstance(state.opt_state, WithAverage) else state.params


def make_optimizer(config: TrainingConfig, d_model: int) -> optax.GradientTransformation:
    """Return Adam with the schedule (paper section 5.3), with clipping and a moving average if they are configured.

    The paper's beta1, beta2 and epsilon are 0.9, 0.98 and 1e-9, and its schedule depends on `d_model`.
    """
    optimizer = optax.chain(
        *([] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]),
        optax.scale_by_adam(b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon),
        optax.scale_by_learning_rate(make_schedule(config, d_model)),
    )
    return with_average(optimizer, config.ema_decay) if config.ema_decay else optimizer
