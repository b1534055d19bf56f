"""Sampling from the model: temperature, top-k and top-p."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from transformer_jax.config import Sampling
from transformer_jax.decoding.search import (
    ResizeFn,
    SearchResult,
    SearchSpec,
    State,
    StepFn,
    best_hypotheses,
    keep_state,
    search_without_beam,
)
from transformer_jax.decoding.top_k import Constraints, mask_logits


def sample(
    step_fn: StepFn,
    state: State,
    spec: SearchSpec,
    sampling: Sampling,
    keys: Key[Array, "b n"],
    *,
    resize_fn: ResizeFn = keep_state,
) -> SearchResult:
    """Sample n hypotheses per sentence, token by token and independently of each other.

    Args:
        step_fn: As for `greedy_search`. There are b * n rows: row i is sample i % n of sentence i // n.
        state: The initial state, for b * n rows.
        spec: Limits, special tokens and length penalty; the fields of the beam are ignored.
        sampling: Distribution to sample from.
        keys: One random key per sample. A sample depends on its own key and on no other sample.
        resize_fn: Resizes the state to the next of `spec.cache_sizes`.

    Returns:
        The samples, highest score first. Scores and log-probabilities are those of the model itself, at temperature 1
        and without truncation.
    """
    b, n = keys.shape
    row_keys = keys.reshape(b * n)
    spec = dataclasses.replace(
        spec,
        max_lengths=jnp.repeat(spec.max_lengths, n, total_repeat_length=b * n),
        prefix=None if spec.prefix is None else jnp.repeat(spec.prefix, n, axis=0, total_repeat_length=b * n),
    )

    def choose(logits: Array, step: Array) -> tuple[Array, Array]:
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, step)
        return sample_tokens(logits, step_keys, sampling, spec.constraints(step, logits.shape[1]))

    samples = search_without_beam(step_fn, state, spec, choose, resize_fn)
    return best_hypotheses(jax.tree.map(lambda leaf: leaf.reshape(b, n, *leaf.shape[2:]), samples), n)


def sample_keys(seed: int, lines: Sequence[int], num_rows: int, n: int) -> Key[Array, "{num_rows} {n}"]:
    """Return a key for each of n samples of each row, a function of seed, line and sample; last rows may be padding."""
    padded = np.zeros(num_rows, np.uint32)
    padded[: len(lines)] = lines
    fold_in = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(fold_in, (0, None))(fold_in(jax.random.key(seed), padded), np.arange(n, dtype=np.uint32))


def sample_tokens(
    logits: Float[Array, "rows v"], keys: Key[Array, " rows"], sampling: Sampling, constraints: Constraints
) -> tuple[Float[Array, " rows"], Int[Array, " rows"]]:
    """Sample one token per row; return its log P under the model itself, -inf if none may be generated, and its id."""
    masked, normalizer = mask_logits(logits, constraints)
    ids, values = None, masked / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        values, ids = jax.lax.top_k(values, min(sampling.top_k or values.shape[1], values.shape[1]))
    if sampling.top_p < 1:
        probs = jax.nn.softmax(values)
        values = jnp.where(jnp.cumsum(probs, axis=1) - probs < sampling.top_p, values, -jnp.inf)
    index = jax.vmap(jax.random.categorical)(keys, values)[:, None]
    tokens = index if ids is None else jnp.take_along_axis(ids, index, axis=1)
    token_logits = jnp.take_along_axis(masked, tokens, axis=1)
    return jnp.where(token_logits == -jnp.inf, -jnp.inf, token_logits - normalizer)[:, 0], tokens[:, 0]
