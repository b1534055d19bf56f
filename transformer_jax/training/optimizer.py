"""The learning rate and the optimizer (paper section 5.3)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from transformer_jax.config import TrainingConfig
from transformer_jax.training.step import TrainState
from transformer_jax.types import Params


def noam_schedule(d_model: int, warmup_steps: int = 4000, scale: float = 1.0) -> optax.Schedule:
    """lrate = scale * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5)   (paper eq. 3).

    Returns:
        A function of the updates done so far, as Optax counts: the first update has count 0 and is step 1 here.

    >>> f"{noam_schedule(512)(3999):.3g}"
    '0.000699'
    """

    def schedule(count: ArrayLike) -> Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return scale * d_model**-0.5 * jnp.minimum(step**-0.5, step * warmup_steps**-1.5)

    return schedule


def inverse_sqrt_schedule(peak: float, warmup_steps: int) -> optax.Schedule:
    """peak * min(step / warmup_steps, sqrt(warmup_steps / step)): eq. 3 with its peak said directly (fairseq)."""

    def schedule(count: ArrayLike) -> Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return peak * jnp.minimum(step / warmup_steps, (warmup_steps / step) ** 0.5)

    return schedule


def constant_schedule(peak: float, warmup_steps: int = 1) -> optax.Schedule:
    """peak * min(1, step / warmup_steps)."""

    def schedule(count: ArrayLike) -> Array:
        step = jnp.asarray(count, jnp.float32) + 1
        return peak * jnp.minimum(step / warmup_steps, 1.0)

    return schedule


def make_schedule(config: TrainingConfig, d_model: int) -> optax.Schedule:
    """What `training.schedule` names. It does not depend on num_steps: a run may be shorter than warmup."""
    if config.schedule == "noam":
        return noam_schedule(d_model, config.warmup_steps, config.learning_rate_scale)
    make = inverse_sqrt_schedule if config.schedule == "inverse_sqrt" else constant_schedule
    return make(config.peak_learning_rate, config.warmup_steps)


class WithAverage(NamedTuple):
    """The state of an optimizer that averages the parameters too."""

    inner: optax.OptState
    """Of the optimizer itself."""
    ema: Params
    """The average, in the parameters' dtypes."""


def with_average(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """The same updates, with an exponential moving average of the parameters that they lead to.

    After update t, from 1, average = d * average + (1 - d) * parameters, with d = min(decay, (1 + t) / (10 + t)): so
    the random parameters of the start are soon forgotten.
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
    """How many updates an optimizer of `make_optimizer` has made: what its schedule goes by."""
    chain: Any = state.inner if isinstance(state, WithAverage) else state
    return chain[-1].count


def eval_params(state: TrainState) -> Params:
    """The parameters that a run is judged by: their moving average where it keeps one."""
    return state.opt_state.ema if isinstance(state.opt_state, WithAverage) else state.params


def make_optimizer(config: TrainingConfig, d_model: int) -> optax.GradientTransformation:
    """Adam with beta1 0.9, beta2 0.98, epsilon 1e-9 and the schedule; before it, where asked for, clipping; around it,
    where asked for, the average of the parameters."""
    clipping = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    optimizer = optax.chain(
        *clipping,
        optax.scale_by_adam(b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon),
        optax.scale_by_learning_rate(make_schedule(config, d_model)),
    )
    return with_average(optimizer, config.ema_decay) if config.ema_decay else optimizer
