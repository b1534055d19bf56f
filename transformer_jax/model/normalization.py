"""Layer normalization (paper section 3.1, after Ba et al. 2016)."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

NormVariant = Literal["standard", "unbiased_std"]


def layer_norm(
    x: Float[Array, "*b d_model"],
    scale: Float[Array, " d_model"],
    bias: Float[Array, " d_model"],
    epsilon: float = 1e-6,
    variant: NormVariant = "standard",
) -> Float[Array, "*b d_model"]:
    """Normalize the last axis (Ba et al. 2016), in at least float32. The result has the dtype of x.

    standard        scale (x - mean) / sqrt(variance + epsilon) + bias, with the variance divided by n
    unbiased_std    scale (x - mean) / (std + epsilon) + bias, with the std divided by n - 1 (annotated-transformer)
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    centered = x.astype(dtype) - jnp.mean(x, axis=-1, keepdims=True, dtype=dtype)
    if variant == "standard":
        variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
        normed = centered * jax.lax.rsqrt(variance + jnp.asarray(epsilon, dtype))
    else:
        sum_of_squares = jnp.sum(jnp.square(centered), axis=-1, keepdims=True)
        # sqrt has an infinite slope at 0: a constant row would turn the gradient into NaN.
        safe = jnp.where(sum_of_squares > 0, sum_of_squares, 1)
        std = jnp.where(sum_of_squares > 0, jnp.sqrt(safe / (x.shape[-1] - 1)), 0)
        normed = centered / (std + jnp.asarray(epsilon, dtype))
    shape = (1,) * (x.ndim - 1) + (-1,)
    return (normed * scale.reshape(shape).astype(dtype) + bias.reshape(shape).astype(dtype)).astype(x.dtype)


class LayerNorm(nn.Module):
    """Apply `layer_norm` with the parameters `scale` [d_model] and `bias` [d_model]."""

    epsilon: float = 1e-6
    variant: NormVariant = "standard"
    param_dtype: str = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "*b d_model"]) -> Float[Array, "*b d_model"]:
        """Normalize the last axis."""
        shape, dtype = (x.shape[-1],), jnp.dtype(self.param_dtype)
        scale = self.param("scale", nn.initializers.ones, shape, dtype)
        bias = self.param("bias", nn.initializers.zeros, shape, dtype)
        normalize: Callable[..., Array] = partial(layer_norm, epsilon=self.epsilon, variant=self.variant)
        if x.dtype != jnp.promote_types(x.dtype, jnp.float32):
            # The backward pass stores `x` instead of its float32 intermediates, which are twice as large.
            normalize = jax.checkpoint(normalize)
        return normalize(x, scale, bias)
