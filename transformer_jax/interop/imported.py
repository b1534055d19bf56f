"""What every format gives and takes, and the check that a format can say what a model does."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.types import Params, UserError

# What the fields of `ModelConfig` may be; a value that is found out has to say which of them it is.
Tying = Literal["all", "target", "none"]
Start = Literal["bos", "eos", "pad", "zeros"]
Activation = Literal["relu", "gelu", "swish"]


class Imported(NamedTuple):
    """A model as a run has it."""

    config: Config
    params: Params
    """NumPy arrays of the configuration's `param_dtype`."""
    tokenizers: TokenizerPair


def check_expressible(model: ModelConfig, format_name: str, legal: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises UserError unless each named field of the model has one of the values that the format can say.

    >>> check_expressible(ModelConfig(), "marian", {"norm_position": ("post",)})
    """
    problems = [
        f"model.{name} is {getattr(model, name)!r} and {format_name} has only {' or '.join(map(repr, values))}"
        for name, values in legal.items()
        if getattr(model, name) not in values
    ]
    if problems:
        raise UserError(f"{format_name} cannot hold this model: {'; '.join(problems)}")


def check_plain_heads(model: ModelConfig, format_name: str) -> None:
    """Raises UserError unless d_k = d_v = d_model / h in both stacks: what most software takes for granted."""
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if not stack.d_k * stack.num_heads == stack.d_v * stack.num_heads == model.d_model:
            raise UserError(
                f"{format_name} cannot hold this model: the {name} has d_k {stack.d_k}, d_v {stack.d_v} and "
                f"{stack.num_heads} heads; {format_name} has only d_k = d_v = d_model / heads, and model.d_model is "
                f"{model.d_model} (fields d_k, d_v, decoder_d_k, decoder_d_v)"
            )
