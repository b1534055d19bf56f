"""Label-smoothed cross-entropy (paper section 5.4)."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

SmoothingMass = Literal["others", "all", "others_without_pad"]


class LossSums(NamedTuple):
    """Sums over tokens, so that parts of a batch can be added up exactly; divide once, at the end."""

    loss_sum: Float[Array, ""]
    """Label-smoothed cross-entropy, in nats."""
    nll_sum: Float[Array, ""]
    """Negative log-likelihood of the right tokens, in nats: its mean's exponential is the perplexity."""
    num_tokens: Int[Array, ""]
    """Target tokens that count: those that are not padding."""


def smoothing_weights(size: int, smoothing: float, mass: SmoothingMass) -> tuple[float, float]:
    """(w, u) of q(v) = w [v is the target] + u [v shares the mass], for `size` tokens; the target shares."""
    on_others = smoothing / {"others": size - 1, "all": size, "others_without_pad": size - 2}[mass]
    return 1 - smoothing - (0 if mass == "all" else on_others), on_others


def cross_entropy(
    logits: Float[Array, "*positions v"],
    targets: Int[Array, "*positions"],
    weights: Bool[Array, "*positions"],
    *,
    smoothing: float = 0.0,
    mass: SmoothingMass = "others",
    pad_id: int = 0,
) -> LossSums:
    """-sum_v q(v) log softmax(logits)(v), where q gives the target 1 - smoothing and spreads the rest.

    `mass` says over what: `others`, the V - 1 other tokens (released code, fairseq); `all`, all V tokens, the target
    among them (PyTorch, optax); `others_without_pad`, the V - 2 that are neither the target nor padding
    (annotated-transformer, joeynmt). The entropy of q is not subtracted: the released code does, which moves the value
    and not the gradient.

    Args:
        logits: at least float32.
        targets: the right tokens.
        weights: which positions count.
        smoothing: epsilon_ls.
        mass: where it goes.
        pad_id: only looked at by `others_without_pad`.
    """
    size = logits.shape[-1]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = log_normalizer - target_logits
    loss = nll
    if smoothing:
        # Of q's two terms the one is a multiple of the other tokens' sum: sums of logits suffice.
        on_target, on_others = smoothing_weights(size, smoothing, mass)
        if mass == "others_without_pad":
            sum_of_logits, count = jnp.sum(logits, axis=-1) - logits[..., pad_id], size - 1
        else:
            sum_of_logits, count = jnp.sum(logits, axis=-1), size
        loss = on_target * nll + on_others * (count * log_normalizer - sum_of_logits)
    counts = weights.astype(logits.dtype)
    return LossSums(jnp.sum(loss * counts), jnp.sum(nll * counts), jnp.sum(weights, dtype=jnp.int32))
