"""What tokens are drawn from. No jax here: the command line knows these settings before jax is configured."""

from dataclasses import dataclass

from transformer_jax.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """What tokens are drawn from: softmax(logits / temperature), cut to the top k, and that to the nucleus of top p.

    Raises:
        UserError: a value that is not legal.
    """

    temperature: float = 1.0
    """Below 1: closer to the most probable token. 1: the model's own probabilities."""
    top_k: int = 0
    """Only the k most probable tokens (Fan et al. 2018); 0: all."""
    top_p: float = 1.0
    """Only the fewest most probable tokens whose probabilities reach p together (Holtzman et al. 2020); 1: all."""

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature < float("inf"):
            raise UserError(
                f"temperature is {self.temperature}; it must be at least 1e-6 (for 0: beam_size 1, no sampling)"
            )
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}; it must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
