"""THE training step: a pure function of state, batch and key, the same on one CPU and on many devices."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.config import TrainingConfig
from transformer_jax.model.embedding import Unembedding
from transformer_jax.model.masks import right_padded_masks
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.accumulation import accumulate as accumulate_sums
from transformer_jax.training.accumulation import split, sum_dtype
from transformer_jax.training.dropout_rng import HASH
from transformer_jax.training.loss import PAPER_LOSS, LossSpec, LossSums, fused_linear_cross_entropy
from transformer_jax.training.sharding import partition_spec, row_multiple
from transformer_jax.types import Batch, Params


@struct.dataclass
class TrainState:
    """Everything that decides the rest of a run, together with the seed of the data."""

    step: Any  # Int[Array, ""], or what stands for it in a tree of shapes or shardings
    """Number of steps done, which is also the number of global batches consumed: the position in the data."""
    params: Params
    opt_state: optax.OptState


def init_state(model: Transformer, optimizer: optax.GradientTransformation, init_rng: Array) -> TrainState:
    """Return the state before the first step."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = model.init(init_rng, tokens, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def init_rng(seed: int) -> Array:
    """Return the key of the initial parameters."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def dropout_rng(seed: int, generator: Literal["hash", "threefry"] = "hash") -> Array:
    """Return the key that `train_step` derives the key of each step from. Its type selects dropout's generator."""
    return jax.random.fold_in(jax.random.key(seed, impl=HASH if generator == "hash" else "threefry2x32"), 1)


def loss_spec(training: TrainingConfig, mesh: Mesh | None = None) -> LossSpec:
    """Return the settings of the loss. `training.loss_chunk_mb` limits the float32 logits on each device of a mesh."""
    max_logits = training.loss_chunk_mb * 10**6 // 4 * (row_multiple(mesh) if mesh else 1)
    return LossSpec(training.label_smoothing, training.label_smoothing_over, max_logits=max_logits)


class Metrics(NamedTuple):
    """Metrics of one training step."""

    loss: Float[Array, ""]
    """Label-smoothed cross-entropy, the mean over the batch's target tokens, in nats."""
    num_tokens: Int[Array, ""]  # target tokens, without padding
    grad_norm: Float[Array, ""]
    """Global norm of the gradient of `loss`, before clipping."""
    param_norm: Float[Array, ""]
    """Global norm of the parameters that the loss was computed with."""
    updated: Bool[Array, ""]
    """Whether the step changed the parameters: loss and gradient are finite, and `update_enabled` was true."""


def train_step(
    state: TrainState,
    batch: Batch,
    dropout_rng: Array,
    *,
    model: Transformer,
    optimizer: optax.GradientTransformation,
    loss: LossSpec = PAPER_LOSS,
    accumulate: int = 1,
    update_enabled: Bool[Array, ""] | bool = True,
    gather_params: Callable[[Params], Params] = lambda params: params,
) -> tuple[TrainState, Metrics]:
    """Make one update: forward pass, loss, backward pass, Adam.

    Sums are taken over the global batch and divided once by its number of target tokens. The update therefore depends
    neither on how the batch is split over devices nor, apart from the dropout bits, on `accumulate`. Under `jit` with
    sharded arguments XLA adds the sums of the devices; no code here mentions devices.

    A step whose loss or gradient is not finite changes nothing but `state.step`, the position in the data. Unlike
    `optax.apply_if_finite`, this checks the loss too, and never applies the update.

    Args:
        state: Parameters, optimizer state and step.
        batch: The global batch.
        dropout_rng: The run's key. The key of this step is `fold_in(dropout_rng, state.step)`.
        model: The model.
        optimizer: From `make_optimizer`.
        loss: Label smoothing, and the number of logits to hold at a time.
        accumulate: Number of microbatches that the batch is computed in, one after the other.
        update_enabled: False changes nothing, as for a step that is not finite.
        gather_params: Resharding hook applied before the forward pass. It must not change values.

    Returns:
        The state after the step, and what the step reports.
    """
    rng = jax.random.fold_in(dropout_rng, state.step)

    def loss_fn(params: Params, microbatch: Batch, rng: Array) -> tuple[Array, LossSums]:
        rngs = {"dropout": rng}
        sums = loss_sums(model, gather_params(params), microbatch, loss, deterministic=False, rngs=rngs)
        return sums.loss_sum, sums

    grad_fn = jax.grad(loss_fn, has_aux=True)
    if accumulate == 1:
        grads, sums = grad_fn(state.params, batch, rng)
    else:
        microbatches = split(batch, accumulate), jax.random.split(rng, accumulate)
        (grads, sums), _ = accumulate_sums(lambda part: (grad_fn(state.params, *part), None), microbatches)
    count = jnp.maximum(sums.num_tokens, 1).astype(sums.loss_sum.dtype)
    grads = jax.tree.map(lambda g: g.astype(sum_dtype(g)) / count, grads)
    grad_norm, mean_loss = global_norm(grads), sums.loss_sum / count
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
    updated = update_enabled & jnp.isfinite(mean_loss) & jnp.isfinite(grad_norm)

    old = state.params, state.opt_state

    def update() -> tuple[Params, optax.OptState]:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    # An accelerator selects inside the fused update; the branches of a conditional would copy every array there, and
    # the host would wait for the predicate. A CPU saves the update's time and memory.
    params, opt_state = jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(updated, update, lambda: old),
        default=lambda: jax.tree.map(partial(jnp.where, updated), update(), old),
    )
    param_norm = global_norm(jax.tree.map(lambda p: p.astype(sum_dtype(p)), state.params))
    metrics = Metrics(mean_loss, sums.num_tokens, grad_norm, param_norm, updated)
    return TrainState(state.step + 1, params, opt_state), metrics


def global_norm(params: Params) -> Float[Array, ""]:
    """Return the Euclidean norm of all parameters, by `norm_of_stacks` on accelerators."""
    return jax.lax.platform_dependent(params, cpu=optax.tree.norm, default=norm_of_stacks)


def norm_of_stacks(params: Params) -> Float[Array, ""]:
    """Return the norm from stacks of arrays of equal shape and sharding: one kernel per stack, not one per array."""
    stacks: dict[object, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        spec = partition_spec(jax.tree_util.keystr(path, simple=True, separator="/"))
        stacks.setdefault((leaf.shape, leaf.dtype, spec), []).append(leaf)
    return optax.tree.norm([jnp.stack(leaves) for leaves in stacks.values()])


def eval_step(params: Params, batch: Batch, *, model: Transformer, max_logits: int | None = None) -> LossSums:
    """Sum the cross-entropy of a batch without dropout and without label smoothing."""
    return loss_sums(model, params, batch, LossSpec(0.0, max_logits=max_logits), deterministic=True)


def loss_sums(model: Transformer, params: Params, batch: Batch, loss: LossSpec, **options: Any) -> LossSums:
    """Sum the loss over a batch. The padding token is the model's. `options` are for `model.apply`."""
    masks: dict[str, Any] = {"src_segments": batch.src_segments, "tgt_segments": batch.tgt_segments}
    if batch.src_segments is None:
        src_mask, tgt_mask = right_padded_masks(jnp.asarray(batch.src), jnp.asarray(batch.tgt_in), model.config.pad_id)
        masks = {"src_mask": src_mask, "tgt_mask": tgt_mask}
    hidden: tuple[Array, Unembedding] = model.apply(  # type: ignore[assignment]  # more only with mutable collections
        {"params": params}, batch.src, batch.tgt_in, method="hidden_states", **masks, **options
    )
    targets, spec = jnp.asarray(batch.tgt_out), dataclasses.replace(loss, pad_id=model.config.pad_id)
    return fused_linear_cross_entropy(*hidden, targets, targets != spec.pad_id, spec)
