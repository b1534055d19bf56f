"""What the machine can do at most, measured: operations of a matrix product and bytes of memory a second."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.experiments.cost import matrix_entries, training_flops


def matrix_rate(dtype: str, size: int = 0) -> float:
    """Operations a second of a product of square matrices; 0: of so many rows as suit the machine."""
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
    """Bytes read a second from memory; 0: of more than caches hold."""
    numbers = jnp.ones((megabytes or (256 if jax.default_backend() == "cpu" else 2048)) * 2**18, jnp.float32)
    add = jax.jit(jnp.sum)
    return numbers.nbytes / _best_seconds(lambda: add(numbers))


def step_flops(config: ModelConfig, tokens: list[int], rows: int) -> float:
    """Operations of a training step that the model asks for: 6N for each token that is no padding, plus attention.

    Args:
        config: of the model.
        tokens: source and target tokens of the batch.
        rows: sentence pairs of the batch.
    """
    per_token = training_flops(config, *(round(count / rows) for count in tokens))
    return float(sum(count * flops for count, flops in zip(tokens, per_token, strict=True)))


def decoding_work(config: ModelConfig, length: int, beam: int, batch: int, weight_bytes: int) -> tuple[float, float]:
    """Operations, and bytes of weights, that translating needs at least. The cache's bytes are left out.

    Args:
        config: of the model.
        length: tokens of each source and each output.
        beam, batch: hypotheses a sentence, sentences.
        weight_bytes: bytes of one number of a matrix.
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
