"""Positional encoding (paper section 3.5)."""

from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.nn.initializers import normal
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from transformer_jax.config import ModelConfig
from transformer_jax.types import UserError


def sinusoids(
    length: int,
    d_model: int,
    layout: Literal["interleaved", "halves"] = "interleaved",
    exponent: Literal["paper", "tensor2tensor"] = "paper",
    offset: int = 0,
) -> Float[np.ndarray, "{length} {d_model}"]:
    """Return PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) = cos(pos / 10000^(2i / d_model)).

    Args:
        length: Number of positions.
        d_model: Width of the table; even.
        layout: `interleaved` alternates sines and cosines, as in the paper. `halves` puts all sines before all cosines
            (tensor2tensor, fairseq, Marian).
        exponent: `tensor2tensor` replaces 2i / d_model by i / (d_model / 2 - 1) (tensor2tensor, fairseq).
        offset: Position of the first row.

    Returns:
        The table in float64, computed by NumPy: it is a constant of the compiled program.

    Raises:
        ValueError: `d_model` is odd.

    >>> sinusoids(2, 4).round(3).tolist()
    [[0.0, 1.0, 0.0, 1.0], [0.841, 0.54, 0.01, 1.0]]
    """
    if d_model % 2:
        raise ValueError(f"d_model={d_model} is odd; sinusoids come in pairs of sine and cosine. Use an even d_model.")
    i = np.arange(d_model // 2)
    powers = 2 * i / d_model if exponent == "paper" else i / (d_model // 2 - 1)
    angles = np.arange(offset, offset + length)[:, None] / 10000.0 ** powers[None, :]
    pairs = np.stack([np.sin(angles), np.cos(angles)], axis=2 if layout == "interleaved" else 1)
    return pairs.reshape(length, d_model)


def segment_positions(segments: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return the position of each token in its own sentence of a packed row, from 0; 0 for padding.

    >>> segment_positions(jnp.array([[1, 1, 2, 2, 2, 0, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0, 0]]
    """
    index = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
    is_start = jnp.concatenate([jnp.ones_like(segments[:, :1]), jnp.diff(segments, axis=1)], axis=1) != 0
    start = jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
    return jnp.where(segments == 0, 0, index - start)


class LearnedPositions(nn.Module):
    """A learned vector for each position (paper Table 3, row E).

    Parameters: `table` [max_length, d_model].
    """

    max_length: int
    d_model: int
    offset: int = 0
    param_dtype: DTypeLike = "float32"

    def setup(self) -> None:
        """Create the table."""
        init, shape = normal(self.d_model**-0.5), (self.max_length, self.d_model)
        self.table = self.param("table", init, shape, jnp.dtype(self.param_dtype))

    def __call__(self, length: int) -> Float[Array, "t d_model"]:
        """Return the vectors of the first `length` positions."""
        if length + self.offset > self.max_length:
            raise UserError(
                f"a sequence of {length} tokens (plus position_offset {self.offset}) is longer than the learned "
                f"position table of model.max_length {self.max_length} rows. Shorten the sequence, or train with a "
                "larger model.max_length."
            )
        return self.table[self.offset : self.offset + length]

    def at(self, positions: Int[Array, "b t"]) -> Float[Array, "b t d_model"]:
        """Return the vectors of traced positions: NaN beyond the table, so batches are checked where they are made."""
        return jnp.take(self.table, positions + self.offset, axis=0, mode="fill")


def max_sequence_length(config: ModelConfig) -> int:
    """Return the maximum number of tokens that a learned position table allows. Sinusoids have no practical limit."""
    return config.max_length - config.position_offset if config.positions == "learned" else 1 << 30
