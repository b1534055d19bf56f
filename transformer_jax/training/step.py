"""THE training step: a pure function of state, batch and key, the same on one CPU and on many devices."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.transformer import Transformer
from transformer_jax.training.accumulation import split, sum_dtype, sum_over
from transformer_jax.training.dropout_rng import HASH
from transformer_jax.training.loss import LabelSmoothingOver, LossSums, fused_linear_cross_entropy
from transformer_jax.types import Batch, Params


@struct.dataclass
class TrainState:
    """Parameters, optimizer state and the step: with the data's seed, all that decides the rest of the run."""

    step: Any  # Int[Array, ""], or as in every pytree what stands for it: its shape, its sharding
    """Updates done, which is also the number of global batches consumed: the position in the data."""
    params: Params
    opt_state: optax.OptState


def init_state(model: Transformer, optimizer: optax.GradientTransformation, init_rng: Array) -> TrainState:
    """A fresh state."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = model.init(init_rng, tokens, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def init_rng(seed: int) -> Array:
    """The key of the initial parameters."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def dropout_rng(seed: int, generator: Literal["hash", "threefry"] = "hash") -> Array:
    """The key from which `train_step` makes each step's; its type decides which generator dropout uses."""
    return jax.random.fold_in(jax.random.key(seed, impl=HASH if generator == "hash" else "threefry2x32"), 1)


class Metrics(NamedTuple):
    """What one training step reports."""

    loss: Float[Array, ""]
    """Label-smoothed cross-entropy, the mean over the batch's target tokens, in nats."""
    num_tokens: Int[Array, ""]
    """Target tokens in the batch, padding not counted."""
    grad_norm: Float[Array, ""]
    """Global norm of the gradient of `loss`, before clipping."""
    param_norm: Float[Array, ""]
    """Global norm of the parameters that the loss was computed with."""
    updated: Bool[Array, ""]
    """Whether the step changed the parameters: its loss and its gradient are finite, and `proceed` was true."""


def train_step(
    state: TrainState,
    batch: Batch,
    dropout_rng: Array,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    smoothing: float = 0.1,
    mass: LabelSmoothingOver = "non_target",
    accumulate: int = 1,
    max_logits: int | None = None,
    proceed: Bool[Array, ""] | bool = True,
    gather_params: Callable[[Params], Params] = lambda params: params,
) -> tuple[TrainState, Metrics]:
    """One update: forward, loss, backward, Adam.

    A step whose loss or gradient is not finite changes nothing but `state.step`, the position in the data.

    Sums are taken over the whole batch and divided once by its number of target tokens, so the update does not depend
    on how the batch is split over devices or, but for the dropout bits of the parts, over time with `accumulate`. Under
    `jit` with sharded arguments XLA adds the sums of the devices; nothing here knows of them.

    Args:
        state: parameters, optimizer state, step.
        batch: the global batch.
        dropout_rng: the run's key; this step's is `fold_in(dropout_rng, state.step)`.
        model, optimizer, smoothing, mass, accumulate: constants of the compiled step.
        max_logits: the most logits to hold at a time, over all devices; None: all.
        proceed: False: change nothing, as if this step were not finite.
        gather_params: changes where the parameters lie, not what they are, before the model uses them.
    """
    rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params: Params, part: Batch, part_rng: Array) -> tuple[Array, LossSums]:
        rngs = {"dropout": part_rng}
        sums, _ = loss_sums(
            model, gather_params(params), part, smoothing, mass, max_logits, deterministic=False, rngs=rngs
        )
        return sums.loss_sum, sums

    grad_fn = jax.grad(loss_fn, has_aux=True)
    if accumulate == 1:
        grads, sums = grad_fn(state.params, batch, rng)
    else:
        parts = split(batch, accumulate), jax.random.split(rng, accumulate)
        (grads, sums), _ = sum_over(lambda part: (grad_fn(state.params, *part), None), parts)
    count = jnp.maximum(sums.num_tokens, 1).astype(sums.loss_sum.dtype)
    grads = jax.tree.map(lambda g: g.astype(sum_dtype(g)) / count, grads)
    grad_norm, loss = optax.tree.norm(grads), sums.loss_sum / count
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updated = proceed & jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def update() -> tuple[Params, optax.OptState]:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    params, opt_state = jax.lax.cond(updated, update, lambda: (state.params, state.opt_state))
    param_norm = optax.tree.norm(jax.tree.map(lambda p: p.astype(sum_dtype(p)), state.params))
    metrics = Metrics(loss, sums.num_tokens, grad_norm, param_norm, updated)
    return TrainState(state.step + 1, params, opt_state), metrics


def eval_step(params: Params, batch: Batch, *, model: Transformer, max_logits: int | None = None) -> LossSums:
    """Sums of the cross-entropy without dropout and without smoothing."""
    return loss_sums(model, params, batch, 0.0, "non_target", max_logits, deterministic=True)[0]


def loss_sums(
    model: Transformer,
    params: Params,
    batch: Batch,
    smoothing: float,
    mass: LabelSmoothingOver,
    max_logits: int | None,
    *,
    mutable: Sequence[str] = (),
    **options: Any,
) -> tuple[LossSums, Any]:
    """Sums of the loss over a batch, and the collections of the model's that were asked for.

    Args:
        model, params, batch, smoothing, mass, max_logits: as for `train_step`.
        mutable: names of collections.
        options: for `model.apply`.
    """
    (x, output), collections = model.apply(
        {"params": params},
        batch.src,
        batch.tgt_in,
        src_segments=batch.src_segments,
        tgt_segments=batch.tgt_segments,
        method="hidden_states",
        mutable=list(mutable),
        **options,
    )
    targets, pad_id = jnp.asarray(batch.tgt_out), model.config.pad_id
    sums = fused_linear_cross_entropy(
        x, output, targets, targets != pad_id, smoothing=smoothing, mass=mass, pad_id=pad_id, max_logits=max_logits
    )
    return sums, collections
