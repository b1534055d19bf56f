"""Length penalties: what the log-probability of a hypothesis is divided by to rank it (paper section 6.1)."""

from typing import Literal

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

LengthPenalty = Literal["gnmt", "power", "none"]


def length_penalty(kind: LengthPenalty, length: ArrayLike, alpha: float) -> Float[Array, "..."]:
    """What log P(y | x) is divided by, so that longer hypotheses are not at a disadvantage.

        gnmt    ((5 + length) / 6)^alpha    Wu et al. 2016, equation 14, without its coverage term; the paper's
        power   length^alpha                fairseq, Hugging Face, CTranslate2: their 0.6 is another 0.6
        none    1

    Args:
        kind: which of the three.
        length: tokens of the hypothesis, its EOS counted and its start token not; any shape.
        alpha: the exponent; 0 makes every kind `none`.

    Returns:
        The penalty, of the shape of `length`, in JAX's default float type.

    >>> [round(float(length_penalty("gnmt", n, 0.6)), 4) for n in (1, 7)]
    [1.0, 1.5157]
    """
    length = jnp.asarray(length, float)
    match kind:
        case "gnmt":
            return ((5 + length) / 6) ** alpha
        case "power":
            return length**alpha
        case "none":
            return jnp.ones_like(length)
    raise ValueError(f"length_penalty is {kind!r}; it must be 'gnmt', 'power' or 'none'")
