"""Table 3 of the paper: its rows as configurations, at any size, trained and compared with the published figures."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, StackSize, TrainingConfig
from transformer_jax.types import UserError

SIZES = {"model.d_model": 512, "model.d_ff": 2048, "model.num_layers": 6, "model.num_heads": 8, "model.d_k": 64}
"""The sizes of the paper's base model, which a row changes in proportion."""

# What each row changes in the base recipe. Where d_k and d_v stay None, h * d_k = d_model, as in rows A and in the
# rows C that change d_model.
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "A1": {"model.num_heads": 1},
    "A2": {"model.num_heads": 4},
    "A3": {"model.num_heads": 16},
    "A4": {"model.num_heads": 32},
    "B1": {"model.d_k": 16},
    "B2": {"model.d_k": 32},
    "C1": {"model.num_layers": 2},
    "C2": {"model.num_layers": 4},
    "C3": {"model.num_layers": 8},
    "C4": {"model.d_model": 256},
    "C5": {"model.d_model": 1024},
    "C6": {"model.d_ff": 1024},
    "C7": {"model.d_ff": 4096},
    "D1": {"model.residual_dropout": 0.0},
    "D2": {"model.residual_dropout": 0.2},
    "D3": {"training.label_smoothing": 0.0},
    "D4": {"training.label_smoothing": 0.2},
    "E": {"model.positions": "learned"},
    "big": {
        "model.d_model": 1024,
        "model.d_ff": 4096,
        "model.num_heads": 16,
        "model.residual_dropout": 0.3,
        "training.num_steps": 300_000,
    },
}


class Published(NamedTuple):
    """What the paper's Table 3 says of a row."""

    perplexity: float
    bleu: float
    millions: int | None
    """Parameters; the paper gives them only where they differ from base."""


PAPER = {
    "base": Published(4.92, 25.8, 65),
    "A1": Published(5.29, 24.9, None),
    "A2": Published(5.00, 25.5, None),
    "A3": Published(4.91, 25.8, None),
    "A4": Published(5.01, 25.4, None),
    "B1": Published(5.16, 25.1, 58),
    "B2": Published(5.01, 25.4, 60),
    "C1": Published(6.11, 23.7, 36),
    "C2": Published(5.19, 25.3, 50),
    "C3": Published(4.88, 25.5, 80),
    "C4": Published(5.75, 24.5, 28),
    "C5": Published(4.66, 26.0, 168),
    "C6": Published(5.12, 25.4, 53),
    "C7": Published(4.75, 26.2, 90),
    "D1": Published(5.77, 24.6, None),
    "D2": Published(4.95, 25.5, None),
    "D3": Published(4.67, 25.3, None),
    "D4": Published(5.47, 25.7, None),
    "E": Published(4.92, 25.7, None),
    "big": Published(4.33, 26.4, 213),
}


def perplexity_of(result: Mapping[str, Any]) -> float:
    """Of a row that was trained. JSON has null for what is not finite."""
    return float("inf") if result["perplexity"] is None else float(result["perplexity"])


def table3_config(row: str = "base", base: Config | None = None) -> Config:
    """The recipe of one row.

    Args:
        row: one of `ROWS`.
        base: another base recipe than the paper's. Each row has the number of steps of this one: the paper's big, which
            has three times the steps of the others, has not here.

    Raises:
        UserError: no such row; a base of which the row's change makes no model.

    >>> table3_config("C4", scaled(table3_config(), 4)).model.d_model
    64
    """
    if row not in ROWS:
        raise UserError(f"table3 has no recipe {row!r}; legal: {', '.join(ROWS)}")
    config = base or _BASE
    try:
        for field, value in ROWS[row].items():
            if base is not None and field == "training.num_steps":
                continue
            section, _, key = field.partition(".")
            new = _in_proportion(config, field, value) if field in SIZES else value
            config = dataclasses.replace(
                config, **{section: dataclasses.replace(getattr(config, section), **{key: new})}
            )
    except UserError as error:
        raise UserError(f"row {row} of Table 3: {error}; another base, or a smaller --scale") from error
    return config


def scaled(base: Config, scale: int) -> Config:
    """The recipe with d_model and d_ff divided by `scale`.

    Layers and heads stay, so the widths of the heads (d_model / h) are divided too, and h * d_k = d_model. The 32 heads
    of row A4 stay 32, each 16 / scale wide.

    Raises:
        UserError: one of them is not divisible, or the base gives the widths of its heads or sizes of its decoder.
    """
    model = base.model
    for name in ("d_k", "d_v", *(f"decoder_{size}" for size in StackSize._fields)):
        if getattr(model, name) is not None:
            raise UserError(f"model.{name} is {getattr(model, name)}; the rows of Table 3 need None there")
    if scale < 1 or model.d_model % scale or model.d_ff % scale:
        raise UserError(
            f"scale is {scale}; it must be a whole number that divides model.d_model {model.d_model} and model.d_ff "
            f"{model.d_ff}"
        )
    smaller = dataclasses.replace(model, d_model=model.d_model // scale, d_ff=model.d_ff // scale)
    return dataclasses.replace(base, model=smaller)


_BASE = Config(
    model=ModelConfig.base(37_000),  # section 5.1: "about"
    data=DataConfig(
        source="huggingface", name="wmt14", subset="de-en", valid="validation", test="test", batch_tokens=25_000
    ),
    training=TrainingConfig(num_steps=100_000),
    decoding=DecodingConfig(beam_size=4, alpha=0.6, max_length_offset=50),
)


def _in_proportion(config: Config, field: str, value: int) -> int:
    """What this size becomes if it changes as that of the paper's base model changes to `value`."""
    own = config.model.encoder.d_k if field == "model.d_k" else config.flat()[field]
    size, rest = divmod(own * value, SIZES[field])
    if rest:
        raise UserError(f"{field} would be {own} x {value} / {SIZES[field]}, which is not a whole number")
    return size
