"""The loss straight from the decoder's output: the logits, most of a training step's memory, exist in parts only."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.embedding import OutputWeights, logits_from
from transformer_jax.training.loss import LossSums, SmoothingMass, cross_entropy, smoothing_weights
from transformer_jax.training.parts import join, split, sum_over


class _Setting(NamedTuple):
    smoothing: float
    mass: SmoothingMass
    pad_id: int
    num_parts: int


def projected_cross_entropy(
    x: Float[Array, "b t d_model"],
    output: OutputWeights,
    targets: Int[Array, "b t"],
    weights: Bool[Array, "b t"],
    *,
    smoothing: float = 0.0,
    mass: SmoothingMass = "others",
    pad_id: int = 0,
    max_logits: int | None = None,
) -> LossSums:
    """`cross_entropy(logits_from(x, output), targets, weights, ...)`, a part of the positions at a time.

    The gradient with respect to the logits is softmax - q, known as soon as the logits are: so it is multiplied on to
    `x` and the table at once, and no logits are kept or computed twice. There is a gradient of `loss_sum` alone:
    `nll_sum` is a figure to report, a constant to differentiation.

    Args:
        x: the decoder's output.
        output: what makes logits of it.
        targets, weights, smoothing, mass, pad_id: as for `cross_entropy`.
        max_logits: the most logits to hold at a time, over all devices; None: all of them.
    """
    num_tokens, size = targets.size, output.table.shape[0]
    num_parts = 1 if max_logits is None else min(num_tokens, -(-num_tokens * size // max_logits))
    setting = _Setting(smoothing, mass, pad_id, num_parts)
    flat = targets.reshape(-1), weights.reshape(-1)
    loss_sum, nll_sum = _loss(x.reshape(-1, x.shape[-1]), output, flat, setting)
    return LossSums(loss_sum, nll_sum, jnp.sum(weights, dtype=jnp.int32))


_Sums = tuple[Array, Array]  # the loss and the negative log-likelihood
_Positions = tuple[Float[Array, "n d_model"], Int[Array, "n"], Bool[Array, "n"]]  # x, targets, weights


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(
    x: Float[Array, "n d_model"],
    output: OutputWeights,
    targets_and_weights: tuple[Int[Array, "n"], Bool[Array, "n"]],
    setting: _Setting,
) -> _Sums:
    def part_of(positions: _Positions) -> tuple[_Sums, None]:
        return _sums_and_logits_grad(positions, output, setting)[0], None

    return _over_parts(part_of, (x, *targets_and_weights), setting.num_parts)[0]


def _forward(
    x: Float[Array, "n d_model"],
    output: OutputWeights,
    targets_and_weights: tuple[Int[Array, "n"], Bool[Array, "n"]],
    setting: _Setting,
) -> tuple[_Sums, tuple[Array, OutputWeights]]:
    """The sums, and all gradients of the loss."""

    def part_of(positions: _Positions) -> tuple[tuple[_Sums, OutputWeights], Array]:
        sums, logits_grad = _sums_and_logits_grad(positions, output, setting)
        rounded = logits_grad.astype(x.dtype)
        x_grad = rounded @ output.table.astype(x.dtype)
        table_grad = jnp.einsum("nv,nd->vd", rounded, positions[0], preferred_element_type=logits_grad.dtype)
        bias_grad = None if output.bias is None else jnp.sum(logits_grad, axis=0)
        return (sums, OutputWeights(table_grad, bias_grad)), x_grad

    (sums, output_grad), x_grad = _over_parts(part_of, (x, *targets_and_weights), setting.num_parts)
    return sums, (x_grad, jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), output_grad, output))


def _backward(
    setting: _Setting, grads: tuple[Array, OutputWeights], cotangents: _Sums
) -> tuple[Array, OutputWeights, None]:
    return (*jax.tree.map(lambda grad: (grad * cotangents[0]).astype(grad.dtype), grads), None)


_loss.defvjp(_forward, _backward)


def _sums_and_logits_grad(
    positions: _Positions, output: OutputWeights, setting: _Setting
) -> tuple[_Sums, Float[Array, "n v"]]:
    """The sums of some positions, and the gradient of their loss with respect to their logits: softmax - q."""
    x, targets, weights = positions
    logits = logits_from(x, output)
    sums = cross_entropy(
        logits, targets, weights, smoothing=setting.smoothing, mass=setting.mass, pad_id=setting.pad_id
    )
    size = logits.shape[-1]
    on_target, on_others = smoothing_weights(size, setting.smoothing, setting.mass)
    ids = np.arange(size)[None]
    shares = ids != setting.pad_id if setting.mass == "others_without_pad" else np.ones((1, size), bool)
    q = on_others * shares.astype(logits.dtype) + on_target * (ids == targets[:, None])
    grad = jnp.where(weights[:, None], jax.nn.softmax(logits) - q, 0)
    return (sums.loss_sum, sums.nll_sum), grad


def _over_parts(
    part_of: Callable[[_Positions], tuple[Any, Any]], positions: _Positions, num_parts: int
) -> tuple[Any, Any]:
    """`part_of(positions)`, or of a part of them at a time: its first result is added up, its second joined."""
    if num_parts == 1:
        return part_of(positions)
    num_positions = len(positions[0])

    def pad(array: Array) -> Array:
        """Up to a multiple of the parts, with positions of weight 0."""
        return jnp.pad(array, [(0, -num_positions % num_parts)] + [(0, 0)] * (array.ndim - 1))

    total, results = sum_over(part_of, split(jax.tree.map(pad, positions), num_parts))
    return total, jax.tree.map(lambda result: result[:num_positions], join(results))
