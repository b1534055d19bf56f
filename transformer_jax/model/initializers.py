"""Initializers. The paper names no scheme; the defaults are those of its released code (tensor2tensor).

| `initialization`  | embedding tables    | projections                                              |
|-------------------|---------------------|----------------------------------------------------------|
| `tensor2tensor`   | N(0, 1 / d_model)   | Xavier uniform, each matrix for itself                   |
| `xavier_uniform`  | Xavier uniform      | Xavier uniform, each matrix for itself                   |
| `torch_fused`     | N(0, 1 / d_model)   | Xavier uniform; query, key and value count as one matrix |

Biases are zero, LayerNorm's scales one. Xavier uniform is that of Glorot and Bengio (2010).
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.nn.initializers import Initializer, normal
from jaxtyping import Array

Initialization = Literal["tensor2tensor", "xavier_uniform", "torch_fused"]


def xavier_uniform(fan_in: int, fan_out: int) -> Initializer:
    """Return U(-a, a) with a = sqrt(6 / (fan_in + fan_out)); attention kernels have more axes than these two fans."""
    bound = math.sqrt(6 / (fan_in + fan_out))

    def init(key: Array, shape: Any, dtype: Any = jnp.float32, out_sharding: Any = None) -> Array:
        return jax.random.uniform(key, shape, dtype, minval=-bound, maxval=bound)

    return init


def embedding_initializer(initialization: Initialization, rows: int, d_model: int) -> Initializer:
    """Return the initializer of a table of `rows` vectors."""
    if initialization == "xavier_uniform":
        return xavier_uniform(rows, d_model)
    return normal(stddev=d_model**-0.5)


def attention_initializer(initialization: Initialization, d_model: int, width: int, fused_width: int) -> Initializer:
    """Return the initializer of one of an attention's projections, which have `fused_width` outputs in total."""
    return xavier_uniform(d_model, fused_width if initialization == "torch_fused" else width)
