"""The learning rate and the optimiser (paper section 5.3)."""

import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from transformer_jax.config import TrainingConfig


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


def make_optimizer(config: TrainingConfig, d_model: int) -> optax.GradientTransformation:
    """Adam with beta1 0.9, beta2 0.98, epsilon 1e-9 and the schedule; before it, where asked for, clipping."""
    clipping = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    return optax.chain(
        *clipping,
        optax.scale_by_adam(b1=config.adam_beta1, b2=config.adam_beta2, eps=config.adam_epsilon),
        optax.scale_by_learning_rate(make_schedule(config, d_model)),
    )
