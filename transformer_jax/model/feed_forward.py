"""The position-wise feed-forward network (paper section 3.3)."""

from functools import partial
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformer_jax.model.initializers import xavier_uniform
from transformer_jax.model.linear import Linear

Activation = Literal["relu", "gelu", "swish"]


@jax.custom_jvp
def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return max(0, x). Its derivative is computed from the result, so the backward pass need not store x too."""
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y = jax.lax.optimization_barrier(relu(*primals))
    return y, jnp.where(y > 0, tangents[0], 0)


def activate(x: Float[Array, "..."], activation: Activation) -> Float[Array, "..."]:
    """Apply max(0, x) (paper equation 2), gelu x Phi(x) (exact, not its tanh approximation) or swish x sigmoid(x)."""
    if activation == "gelu":
        return jax.nn.gelu(x, approximate=False)
    return relu(x) if activation == "relu" else jax.nn.swish(x)


class FeedForward(nn.Module):
    """max(0, x W_1 + b_1) W_2 + b_2 (paper equation 2).

    Parameters: W_1 and b_1 are `inner`, W_2 and b_2 are `outer`.
    """

    d_model: int
    d_ff: int
    activation: Activation = "relu"
    dropout_rate: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"

    def setup(self) -> None:
        """Create the two linear maps."""
        init = xavier_uniform(self.d_model, self.d_ff)  # equal for both kernels, whose fans are swapped
        linear = partial(Linear, kernel_init=init, dtype=self.dtype, param_dtype=self.param_dtype)
        self.inner, self.outer = linear((self.d_ff,)), linear((self.d_model,))
        self.dropout = nn.Dropout(self.dropout_rate)

    def __call__(self, x: Float[Array, "b t d_model"], *, deterministic: bool = True) -> Float[Array, "b t d_model"]:
        """Apply the network to each position. `deterministic` turns dropout of the hidden activations off."""
        hidden = activate(self.inner(x), self.activation)
        return self.outer(self.dropout(hidden, deterministic=deterministic))
