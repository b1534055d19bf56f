"""What a training run carries from step to step."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array

from transformer_jax.model.transformer import Transformer
from transformer_jax.training.hash_generator import HASH
from transformer_jax.types import Params


@struct.dataclass
class TrainState:
    """Parameters, optimiser state and the step: with the data's seed, all that decides the rest of the run."""

    step: Any  # Int[Array, ""], or as in every pytree what stands for it: its shape, its sharding
    """Updates done, which is also the number of global batches consumed: the position in the data."""
    params: Params
    opt_state: optax.OptState


def init_state(model: Transformer, optimizer: optax.GradientTransformation, init_rng: Array) -> TrainState:
    """A fresh state."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = model.init(init_rng, tokens, tokens)["params"]
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def init_rng(seed: int) -> Array:
    """The key of the initial parameters."""
    return jax.random.fold_in(jax.random.key(seed), 0)


def dropout_rng(seed: int, generator: Literal["hash", "threefry"] = "hash") -> Array:
    """The key from which `train_step` makes each step's; its type decides which generator dropout uses."""
    return jax.random.fold_in(jax.random.key(seed, impl=HASH if generator == "hash" else "threefry2x32"), 1)
