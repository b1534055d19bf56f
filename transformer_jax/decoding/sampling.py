"""Sampling of the next token: temperature, top-k and top-p."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from transformer_jax.config import Sampling
from transformer_jax.decoding.top_k import forced_log_probs, possible_tokens


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
