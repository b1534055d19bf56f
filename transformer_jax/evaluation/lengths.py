"""What fits an evaluation, which leaves nothing out."""

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.errors import UserError
from transformer_jax.model.positional import longest_sequence

MAX_TOKENS = 8192  # of a pair's side, and of a batch: attention needs memory with the square of a length


def check_lengths(encoded: EncodedPairs, pairs: Pairs, model: ModelConfig) -> None:
    """Nothing is left out of an evaluation, so every pair must fit the model.

    Raises:
        UserError: one does not.
    """
    room = longest_sequence(model)
    longest = np.maximum(encoded.source_lengths, encoded.target_lengths)
    if longest.max() > MAX_TOKENS:
        raise UserError(
            f"{pairs.origin}, pair {longest.argmax() + 1}: {longest.max()} tokens; an evaluation leaves nothing out, "
            f"at most {MAX_TOKENS} fit: take the pair out"
        )
    if longest.max() > room:
        raise UserError(
            f"{pairs.origin}, pair {longest.argmax() + 1}: {longest.max()} tokens, and the learned position table of "
            f"model.max_length {model.max_length} has room for {room}; take the pair out"
        )
