"""Label-smoothed cross-entropy (paper section 5.4), from logits or in chunks from the decoder's output."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.embedding import OutputWeights, logits_from
from transformer_jax.training.accumulation import join, split, sum_over

LabelSmoothingOver = Literal["non_target", "all", "non_target_non_pad"]


class LossSums(NamedTuple):
    """Sums over tokens, so that parts of a batch can be added up exactly; divide once, at the end."""

    loss_sum: Float[Array, ""]
    """Label-smoothed cross-entropy, in nats."""
    nll_sum: Float[Array, ""]
    """Negative log-likelihood of the right tokens, in nats: its mean's exponential is the perplexity."""
    num_tokens: Int[Array, ""]
    """Target tokens that count: those that are not padding."""


def smoothing_weights(size: int, smoothing: float, mass: LabelSmoothingOver) -> tuple[float, float]:
    """(w, u) of q(v) = w [v is the target] + u [v shares the mass], for `size` tokens; the target shares."""
    on_others = smoothing / {"non_target": size - 1, "all": size, "non_target_non_pad": size - 2}[mass]
    return 1 - smoothing - (0 if mass == "all" else on_others), on_others


def cross_entropy(
    logits: Float[Array, "*positions v"],
    targets: Int[Array, "*positions"],
    weights: Bool[Array, "*positions"],
    *,
    smoothing: float = 0.0,
    mass: LabelSmoothingOver = "non_target",
    pad_id: int = 0,
) -> LossSums:
    """-sum_v q(v) log softmax(logits)(v), where q gives the target 1 - smoothing and spreads the rest.

    `mass` says over what: `others`, the V - 1 other tokens (released code, fairseq); `all`, all V tokens, the target
    among them (PyTorch, optax); `non_target_non_pad`, the V - 2 that are neither the target nor padding
    (annotated-transformer, joeynmt). The entropy of q is not subtracted: the released code does, which moves the value
    and not the gradient.

    Args:
        logits: at least float32.
        targets: the right tokens.
        weights: which positions count.
        smoothing: epsilon_ls.
        mass: where it goes.
        pad_id: only looked at by `non_target_non_pad`.
    """
    size = logits.shape[-1]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = log_normalizer - target_logits
    loss = nll
    if smoothing:
        # Of q's two terms the one is a multiple of the other tokens' sum: sums of logits suffice.
        on_target, on_others = smoothing_weights(size, smoothing, mass)
        if mass == "non_target_non_pad":
            sum_of_logits, count = jnp.sum(logits, axis=-1) - logits[..., pad_id], size - 1
        else:
            sum_of_logits, count = jnp.sum(logits, axis=-1), size
        loss = on_target * nll + on_others * (count * log_normalizer - sum_of_logits)
    counts = weights.astype(logits.dtype)
    return LossSums(jnp.sum(loss * counts), jnp.sum(nll * counts), jnp.sum(weights, dtype=jnp.int32))


class _Setting(NamedTuple):
    smoothing: float
    mass: LabelSmoothingOver
    pad_id: int
    num_parts: int


def fused_linear_cross_entropy(
    x: Float[Array, "b t d_model"],
    output: OutputWeights,
    targets: Int[Array, "b t"],
    weights: Bool[Array, "b t"],
    *,
    smoothing: float = 0.0,
    mass: LabelSmoothingOver = "non_target",
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
_Positions = tuple[Float[Array, "n d_model"], Int[Array, " n"], Bool[Array, " n"]]  # x, targets, weights


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(
    x: Float[Array, "n d_model"],
    output: OutputWeights,
    targets_and_weights: tuple[Int[Array, " n"], Bool[Array, " n"]],
    setting: _Setting,
) -> _Sums:
    def part_of(positions: _Positions) -> tuple[_Sums, None]:
        return _sums_and_logits_grad(positions, output, setting)[0], None

    return _over_parts(part_of, (x, *targets_and_weights), setting.num_parts)[0]


def _forward(
    x: Float[Array, "n d_model"],
    output: OutputWeights,
    targets_and_weights: tuple[Int[Array, " n"], Bool[Array, " n"]],
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
    shares = ids != setting.pad_id if setting.mass == "non_target_non_pad" else np.ones((1, size), bool)
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
