"""What the formats share: the imported model, the check that a format can express a model, and vocabulary files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.model.positional import sinusoids
from transformer_jax.runtime.files import to_json
from transformer_jax.types import Params, UserError

# Types of the fields of `ModelConfig` whose value a reader works out.
Tying = Literal["all", "target", "none"]
Start = Literal["bos", "eos", "pad", "zeros"]
Activation = Literal["relu", "gelu", "swish"]

OWN_TOKENIZER = "tokenizer"
"""Subfolder of an exported folder with this package's own tokenizer files. Other programs ignore it."""
SPECIAL = ("pad", "bos", "eos", "unk")


class Imported(NamedTuple):
    """A model that was read from foreign files."""

    config: Config
    params: Params
    """NumPy arrays of the dtype `config.model.param_dtype`."""
    tokenizers: TokenizerPair


def check_expressible(model: ModelConfig, format_name: str, legal: Mapping[str, tuple[Any, ...]]) -> None:
    """Check that each named field of a model has a value that a format can express.

    Args:
        model: Configuration to check.
        format_name: Name of the format, for the error.
        legal: Legal values of each field of `ModelConfig` that the format restricts.

    Raises:
        UserError: Some fields have other values. All of them are listed.

    >>> check_expressible(ModelConfig(), "marian", {"norm_position": ("post",)})
    """
    problems = [
        f"model.{name}={getattr(model, name)!r}, {format_name} has only {' or '.join(map(repr, values))}"
        for name, values in legal.items()
        if getattr(model, name) not in values
    ]
    if problems:
        raise UserError(f"{format_name} cannot express this model: {'; '.join(problems)}")


def check_plain_heads(model: ModelConfig, format_name: str) -> None:
    """Check that d_k = d_v = d_model / heads in both stacks, which most programs assume.

    Raises:
        UserError: A stack has other widths.
    """
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if not stack.d_k * stack.num_heads == stack.d_v * stack.num_heads == model.d_model:
            raise UserError(
                f"{format_name} cannot express this model: the {name} has {stack.num_heads} heads with "
                f"d_k={stack.d_k} and d_v={stack.d_v}, but {format_name} requires d_k = d_v = d_model / heads with "
                f"model.d_model={model.d_model} (fields d_k, d_v, decoder_d_k, decoder_d_v)"
            )


class Positions(NamedTuple):
    """Fields of `ModelConfig` that describe a table of sinusoids."""

    positions: str
    position_exponent: str
    position_offset: int


def identify_positions(table: np.ndarray) -> Positions | None:
    """Return the conventions of the sinusoids in a table, or None for a learned table or other sinusoids.

    The tolerance grows with the position, because other programs compute the angles in float32.
    """
    rows, d_model = table.shape
    if not rows:
        return None
    tolerance = 1e-6 + 2e-7 * np.arange(rows)[:, None]
    for layout in ("interleaved", "halves"):
        for exponent in ("paper", "tensor2tensor"):
            for offset in range(4):
                if d_model % 2 or (exponent == "tensor2tensor" and d_model < 4):
                    continue
                first = min(rows, 8)
                expected: Any = sinusoids(first, d_model, layout, exponent, offset)
                if np.all(np.abs(table[:first] - expected) <= tolerance[:first]):
                    expected = sinusoids(rows, d_model, layout, exponent, offset)
                    if np.all(np.abs(table - expected) <= tolerance):
                        return Positions(layout, exponent, offset)
    return None


def write_json(path: Path, tree: Any) -> None:
    """Write a tree of dicts, lists and scalars as indented JSON."""
    path.write_text(to_json(tree, indent=2) + "\n", encoding="utf-8")


def unique_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the token of each id, with a special token renamed if a word of the vocabulary is spelled like it.

    Formats that look tokens up by name need every name to be unique.
    """
    words = tokenizer.tokens(range(tokenizer.vocab_size))
    for name in SPECIAL:
        i = getattr(tokenizer, f"{name}_id")
        while i is not None and i < len(words) and words.count(words[i]) > 1:
            words[i] = f"{words[i][:-1]}_>"
    return words
