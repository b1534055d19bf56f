"""Table 3 of the paper: its rows as configurations at any size, and the published figures."""

from collections.abc import Mapping
from typing import NamedTuple

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, StackSize, TrainingConfig
from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError

# The sizes of the paper's base model, which a row changes in proportion.
SIZES = {"model.d_model": 512, "model.d_ff": 2048, "model.num_layers": 6, "model.num_heads": 8, "model.d_k": 64}


class Published(NamedTuple):
    """What the paper's Table 3 says of a row."""

    perplexity: float
    bleu: float
    millions: int | None
    """Parameters; the paper gives them only where they differ from base."""


Change = dict[str, float | str]

# What each row changes in the base recipe, and the paper's figures. Where d_k and d_v stay None, h * d_k = d_model, as
# in rows A and in the rows C that change d_model.
_TABLE: dict[str, tuple[Change, Published]] = {
    "base": ({}, Published(4.92, 25.8, 65)),
    "A1": ({"model.num_heads": 1}, Published(5.29, 24.9, None)),
    "A2": ({"model.num_heads": 4}, Published(5.00, 25.5, None)),
    "A3": ({"model.num_heads": 16}, Published(4.91, 25.8, None)),
    "A4": ({"model.num_heads": 32}, Published(5.01, 25.4, None)),
    "B1": ({"model.d_k": 16}, Published(5.16, 25.1, 58)),
    "B2": ({"model.d_k": 32}, Published(5.01, 25.4, 60)),
    "C1": ({"model.num_layers": 2}, Published(6.11, 23.7, 36)),
    "C2": ({"model.num_layers": 4}, Published(5.19, 25.3, 50)),
    "C3": ({"model.num_layers": 8}, Published(4.88, 25.5, 80)),
    "C4": ({"model.d_model": 256}, Published(5.75, 24.5, 28)),
    "C5": ({"model.d_model": 1024}, Published(4.66, 26.0, 168)),
    "C6": ({"model.d_ff": 1024}, Published(5.12, 25.4, 53)),
    "C7": ({"model.d_ff": 4096}, Published(4.75, 26.2, 90)),
    "D1": ({"model.residual_dropout": 0.0}, Published(5.77, 24.6, None)),
    "D2": ({"model.residual_dropout": 0.2}, Published(4.95, 25.5, None)),
    "D3": ({"training.label_smoothing": 0.0}, Published(4.67, 25.3, None)),
    "D4": ({"training.label_smoothing": 0.2}, Published(5.47, 25.7, None)),
    "E": ({"model.positions": "learned"}, Published(4.92, 25.7, None)),
    "big": (
        {
            "model.d_model": 1024,
            "model.d_ff": 4096,
            "model.num_heads": 16,
            "model.residual_dropout": 0.3,
            "training.num_steps": 300_000,
        },
        Published(4.33, 26.4, 213),
    ),
}
ROWS = {name: changes for name, (changes, _) in _TABLE.items()}
PAPER = {name: published for name, (_, published) in _TABLE.items()}


def perplexity_of(result: Mapping[str, float | None]) -> float:
    """Return the perplexity of a trained row. JSON has null for infinity."""
    return float("inf") if result["perplexity"] is None else float(result["perplexity"])


def table3_config(row: str = "base", base: Config | None = None) -> Config:
    """Return the recipe of one row around a base recipe, by default the paper's.

    Every row has the number of steps of another base recipe, also big, which the paper trains three times as long.

    >>> table3_config("C4", scaled(table3_config(), 4)).model.d_model
    64
    """
    require(row in ROWS, f"table3 has no recipe {row!r}; legal: {', '.join(ROWS)}")
    config = base or _BASE
    try:
        for field, value in ROWS[row].items():
            if base is not None and field == "training.num_steps":
                continue
            section, _, key = field.partition(".")
            new = _in_proportion(config, field, int(value)) if field in SIZES else value
            config = config.with_changes(**{section: {key: new}})
    except UserError as error:
        raise UserError(f"row {row} of Table 3: {error}; another base, or a smaller --scale") from error
    return config


def scaled(base: Config, scale: int) -> Config:
    """Return the recipe with d_model and d_ff, and thereby the widths of the heads, divided by `scale`."""
    model = base.model
    for name in ("d_k", "d_v", *(f"decoder_{size}" for size in StackSize._fields)):
        value = getattr(model, name)
        require(value is None, f"model.{name} is {value}; the rows of Table 3 need None there")
    if scale < 1 or model.d_model % scale or model.d_ff % scale:
        raise UserError(
            f"scale is {scale}; it must be a whole number that divides model.d_model {model.d_model} and model.d_ff "
            f"{model.d_ff}"
        )
    return base.with_changes(model={"d_model": model.d_model // scale, "d_ff": model.d_ff // scale})


_BASE = Config(
    model=ModelConfig.base(37_000),  # section 5.1: "about"
    data=DataConfig(
        source="huggingface", name="wmt14", subset="de-en", valid="validation", test="test", batch_tokens=25_000
    ),
    training=TrainingConfig(num_steps=100_000),
    decoding=DecodingConfig(beam_size=4, alpha=0.6, max_length_offset=50),
)


def _in_proportion(config: Config, field: str, value: int) -> int:
    """Return the size that has the proportion to the base's size that `value` has to the paper's base size."""
    own = config.model.encoder.d_k if field == "model.d_k" else config.flat()[field]
    size, rest = divmod(own * value, SIZES[field])
    require(not rest, f"{field} would be {own} x {value} / {SIZES[field]}, which is not a whole number")
    return size
