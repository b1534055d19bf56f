"""Sampling of the next token: temperature, top-k and top-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from transformer_jax.decoding.top_k import forced_log_probs, possible_tokens
from transformer_jax.types import UserError


@dataclass(frozen=True)
class Sampling:
    """What tokens are drawn from: softmax(logits / temperature), cut to the top k, and that to the nucleus of top p.

    Raises:
        UserError: a value that is not legal.
    """

    temperature: float = 1.0
    """Below 1: closer to the most probable token. 1: the model's own probabilities."""
    top_k: int = 0
    """Only the k most probable tokens (Fan et al. 2018); 0: all."""
    top_p: float = 1.0
    """Only the fewest most probable tokens whose probabilities reach p together (Holtzman et al. 2020); 1: all."""

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}; it must be at least 1e-6 (for 0: beam_size 1, no sampling)"
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


def draw_tokens(
    logits: Float[Array, "rows v"],
    keys: Key[Array, " rows"],
    sampling: Sampling,
    pad_id: int,
    forbidden_ids: Sequence[int] = (),
    *,
    renormalize_logits: bool = False,
    forced: Int[Array, " rows"] | None = None,
) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """A token for each row, drawn with its key, and log P of it by the model, at temperature 1 and nothing cut.

    If nothing may be generated, log P is -inf. The other arguments are those of `best_tokens.best_tokens`.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    possible, normalizer = possible_tokens(logits, pad_id, forbidden_ids, renormalize_logits=renormalize_logits)
    ids, values = None, possible / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        values, ids = jax.lax.top_k(values, min(sampling.top_k or values.shape[1], values.shape[1]))
    if sampling.top_p < 1:
        probs = jax.nn.softmax(values)
        values = jnp.where(jnp.cumsum(probs, axis=1) - probs < sampling.top_p, values, -jnp.inf)
    drawn = jax.vmap(jax.random.categorical)(keys, values)[:, None]
    drawn = drawn if ids is None else jnp.take_along_axis(ids, drawn, axis=1)
    own = jnp.take_along_axis(possible, drawn, axis=1)
    log_probs = jnp.where(own == -jnp.inf, -jnp.inf, own - normalizer)[:, 0]
    if forced is None:
        return log_probs, drawn[:, 0]
    is_forced = forced >= 0
    return jnp.where(is_forced, forced_log_probs(logits, forced), log_probs), jnp.where(is_forced, forced, drawn[:, 0])
