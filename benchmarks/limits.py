"""Measure the limits of the machine: matrix-product operations and bytes of memory per second."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer_jax.accelerators.cost import matrix_entries, training_flops
from transformer_jax.config import ModelConfig


def matrix_rate(dtype: str, size: int = 0) -> float:
    """Return the operations per second of a product of square matrices. 0 chooses the number of rows by the machine."""
    on_cpu = jax.default_backend() == "cpu"
    size, products = size or (1536 if on_cpu else 8192), 2 if on_cpu else 16

    @jax.jit
    def multiply(x: jax.Array, matrix: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, products, lambda _, y: y @ matrix, x)

    # Scaled so that products stay of one size: zeros or infinities would be faster or slower than numbers.
    x, matrix = (jax.random.normal(jax.random.key(i), (size, size)).astype(dtype) for i in range(2))
    matrix = matrix / size**0.5
    return 2 * size**3 * products / _best_seconds(lambda: multiply(x, matrix))


def bandwidth(megabytes: int = 0) -> float:
    """Return the bytes read per second from memory. 0 chooses a size larger than the caches."""
    numbers = jnp.ones((megabytes or (256 if jax.default_backend() == "cpu" else 2048)) * 2**18, jnp.float32)
    add = jax.jit(jnp.sum)
    return numbers.nbytes / _best_seconds(lambda: add(numbers))


def step_flops(config: ModelConfig, tokens: list[int], rows: int) -> float:
    """Return the operations of a training step: 6N for each non-padding token, plus attention.

    Args:
        config: Configuration of the model.
        tokens: Number of source and target tokens of the batch.
        rows: Number of sentence pairs of the batch.
    """
    per_token = training_flops(config, *(round(count / rows) for count in tokens))
    return float(sum(count * flops for count, flops in zip(tokens, per_token, strict=True)))


def decoding_work(config: ModelConfig, length: int, beam: int, batch: int, weight_bytes: int) -> tuple[float, float]:
    """Return the minimum operations and bytes of weights of a translation, without the bytes of the cache.

    Args:
        config: Configuration of the model.
        length: Number of tokens of each source and each output.
        beam: Number of hypotheses per sentence.
        batch: Number of sentences.
        weight_bytes: Bytes of one element of a matrix.
    """
    entries = matrix_entries(config)
    flops = 2.0 * batch * length * (entries.source + beam * entries.target)
    return flops, float(weight_bytes * (entries.source + length * entries.target))


def _best_seconds(work: Callable[[], jax.Array], tries: int = 5) -> float:
    jax.block_until_ready(work())
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        jax.block_until_ready(work())
        best = min(best, time.perf_counter() - start)
    return best
