"""Label-smoothed cross-entropy (paper section 5.4), from logits or in chunks from the decoder's output."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.model.embedding import Unembedding, unembed
from transformer_jax.training.accumulation import accumulate, merge, split

Sums = TypeVar("Sums")
Rows = TypeVar("Rows")

LabelSmoothingOver = Literal["non_target", "all", "non_target_non_pad"]


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """The constants of the training loss."""

    label_smoothing: float = 0.1
    """epsilon_ls: the probability that is taken from the target (paper section 5.4)."""
    label_smoothing_over: LabelSmoothingOver = "non_target"
    """The tokens that share epsilon_ls: the V - 1 other tokens (released code, fairseq); all V tokens (PyTorch, Optax);
    the V - 2 tokens that are neither the target nor padding (annotated-transformer, joeynmt)."""
    pad_id: int = 0
    """The padding token. Only `non_target_non_pad` uses it."""
    max_logits: int | None = None
    """Maximum number of logits to hold at a time, over all devices. None holds all of them."""

    def weights(self, vocab_size: int) -> tuple[float, float]:
        """Return (w, u) of the target distribution q(v) = w [v is the target] + u [v shares epsilon_ls]."""
        sharing = {"non_target": vocab_size - 1, "all": vocab_size, "non_target_non_pad": vocab_size - 2}
        uniform = self.label_smoothing / sharing[self.label_smoothing_over]
        return 1 - self.label_smoothing - (0 if self.label_smoothing_over == "all" else uniform), uniform


PAPER_LOSS = LossSpec()
PLAIN_LOSS = LossSpec(label_smoothing=0.0)


class LossSums(NamedTuple):
    """Sums over tokens, so that microbatches and devices can be added exactly. Divide once, at the end."""

    loss_sum: Float[Array, ""]
    """Label-smoothed cross-entropy, in nats."""
    nll_sum: Float[Array, ""]
    """Negative log-likelihood of the target tokens, in nats. The exponential of its mean is the perplexity."""
    num_tokens: Int[Array, ""]
    """Number of target tokens that are not padding."""


def cross_entropy(
    logits: Float[Array, "*positions v"],
    targets: Int[Array, "*positions"],
    weights: Bool[Array, "*positions"],
    spec: LossSpec = PLAIN_LOSS,
) -> LossSums:
    """Compute -sum_v q(v) log softmax(logits)(v), where q is the smoothed target distribution (paper section 5.4).

    The entropy of q is not subtracted. The released code subtracts it, which moves the value but not the gradient.

    Args:
        logits: At least float32.
        targets: The target tokens.
        weights: Which positions count.
        spec: Label smoothing. `max_logits` has no effect, because the logits exist already.

    Returns:
        Sums over the positions that count.
    """
    size = logits.shape[-1]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = log_normalizer - target_logits
    loss = nll
    if spec.label_smoothing:
        # One of the two terms of q is constant over the tokens that share, so sums of logits suffice.
        on_target, uniform = spec.weights(size)
        if spec.label_smoothing_over == "non_target_non_pad":
            sum_of_logits, count = jnp.sum(logits, axis=-1) - logits[..., spec.pad_id], size - 1
        else:
            sum_of_logits, count = jnp.sum(logits, axis=-1), size
        loss = on_target * nll + uniform * (count * log_normalizer - sum_of_logits)
    counts = weights.astype(logits.dtype)
    return LossSums(jnp.sum(loss * counts), jnp.sum(nll * counts), jnp.sum(weights, dtype=jnp.int32))


def fused_linear_cross_entropy(
    x: Float[Array, "b t d_model"],
    output: Unembedding,
    targets: Int[Array, "b t"],
    weights: Bool[Array, "b t"],
    spec: LossSpec = PLAIN_LOSS,
) -> LossSums:
    """Compute `cross_entropy(unembed(x, output), targets, weights, spec)`, one chunk of positions at a time.

    The gradient with respect to the logits is softmax - q, which is known as soon as the logits are. It is therefore
    multiplied on to `x` and the table at once, and no logits are kept or computed twice. Only `loss_sum` has a
    gradient: `nll_sum` is a constant to differentiation.

    Args:
        x: The decoder's output.
        output: The weights that turn it into logits.
        targets: The target tokens.
        weights: Which positions count.
        spec: Label smoothing, and the maximum number of logits to hold.
    """
    flat = targets.reshape(-1), weights.reshape(-1)
    loss_sum, nll_sum = _loss(x.reshape(-1, x.shape[-1]), output, flat, spec)
    return LossSums(loss_sum, nll_sum, jnp.sum(weights, dtype=jnp.int32))


_Sums = tuple[Array, Array]  # the loss and the negative log-likelihood
_X = Float[Array, "n d_model"]
_Targets = tuple[Int[Array, " n"], Bool[Array, " n"]]  # targets, weights
_Positions = tuple[_X, Int[Array, " n"], Bool[Array, " n"]]  # x, targets, weights


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss(x: _X, output: Unembedding, targets: _Targets, spec: LossSpec) -> _Sums:
    def chunk_sums(positions: _Positions) -> tuple[_Sums, None]:
        return _sums_and_logits_grad(positions, output, spec)[0], None

    return _map_chunks(chunk_sums, (x, *targets), output, spec)[0]


def _loss_forward(
    x: _X, output: Unembedding, targets: _Targets, spec: LossSpec
) -> tuple[_Sums, tuple[Array, Unembedding]]:
    """Return the sums, and the gradients of the loss with respect to x and the output layer as residuals."""
    rounded_output = output._replace(table=output.table.astype(x.dtype))  # once, not for each chunk

    def chunk_sums_and_grads(positions: _Positions) -> tuple[tuple[_Sums, Unembedding], Array]:
        sums, logits_grad = _sums_and_logits_grad(positions, rounded_output, spec)
        rounded = logits_grad.astype(x.dtype)
        x_grad = rounded @ rounded_output.table
        table_grad = jnp.einsum("nv,nd->vd", rounded, positions[0], preferred_element_type=logits_grad.dtype)
        bias_grad = None if output.bias is None else jnp.sum(logits_grad, axis=0)
        return (sums, Unembedding(table_grad, bias_grad)), x_grad

    (sums, output_grad), x_grad = _map_chunks(chunk_sums_and_grads, (x, *targets), output, spec)
    return sums, (x_grad, jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), output_grad, output))


def _loss_backward(
    spec: LossSpec, grads: tuple[Array, Unembedding], cotangents: _Sums
) -> tuple[Array, Unembedding, None]:
    return (*jax.tree.map(lambda grad: (grad * cotangents[0]).astype(grad.dtype), grads), None)


_loss.defvjp(_loss_forward, _loss_backward)


def _sums_and_logits_grad(
    positions: _Positions, output: Unembedding, spec: LossSpec
) -> tuple[_Sums, Float[Array, "n v"]]:
    """Return the sums over some positions, and the gradient of their loss by their logits: softmax - q."""
    x, targets, weights = positions
    logits = unembed(x, output)
    sums = cross_entropy(logits, targets, weights, spec)
    size = logits.shape[-1]
    on_target, uniform = spec.weights(size)
    ids = np.arange(size)[None]
    sharing = ids != spec.pad_id if spec.label_smoothing_over == "non_target_non_pad" else np.ones((1, size), bool)
    q = uniform * sharing.astype(logits.dtype) + on_target * (ids == targets[:, None])
    grad = jnp.where(weights[:, None], jax.nn.softmax(logits) - q, 0)
    return (sums.loss_sum, sums.nll_sum), grad


def _map_chunks(
    function: Callable[[_Positions], tuple[Sums, Rows]], positions: _Positions, output: Unembedding, spec: LossSpec
) -> tuple[Sums, Rows]:
    """Call `function` on chunks of positions in turn. Sum its first result and concatenate its second."""
    num_positions = len(positions[0])
    num_logits = num_positions * output.table.shape[0]
    num_chunks = 1 if spec.max_logits is None else min(num_positions, -(-num_logits // spec.max_logits))
    if num_chunks == 1:
        return function(positions)

    def pad(array: Array) -> Array:  # to a multiple of the number of chunks, with positions of weight 0
        return jnp.pad(array, [(0, -num_positions % num_chunks)] + [(0, 0)] * (array.ndim - 1))

    total, results = accumulate(function, split(jax.tree.map(pad, positions), num_chunks))
    return total, jax.tree.map(lambda result: result[:num_positions], merge(results))
