"""The 20 rows of the paper's Table 3: variations of the base model, WMT14 English to German, scored on newstest2013.

A row is the base recipe with the change that `ROWS` names and nothing else. newstest2013 is the validation split; the
test split is newstest2014. There is no checkpoint averaging here, and perplexities are per token of the vocabulary, so
they compare only with those of the same one.

command   python train.py configs/table3.py:B1
text      the dataset wmt14, subset de-en, downloaded by the library `datasets`
hardware  a GPU; the paper had 8 NVIDIA P100
time      not yet run; the paper: 12 hours a row (0.4 s a step), big 3.5 days (1.0 s a step)
score     not yet run
"""

import dataclasses
from typing import Any, NamedTuple

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig, UserError

VOCAB_SIZE = 37_000  # section 5.1: "about"

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


def get_config(name: str = "base") -> Config:
    """The recipe of one row."""
    if name not in ROWS:
        raise UserError(f"configs/table3.py has no recipe {name!r}; legal: {', '.join(ROWS)}")
    config = Config(
        model=ModelConfig.base(VOCAB_SIZE),
        data=DataConfig(
            source="huggingface", name="wmt14", subset="de-en", valid="validation", test="test", batch_tokens=25_000
        ),
        training=TrainingConfig(num_steps=100_000),
        decoding=DecodingConfig(beam_size=4, alpha=0.6, max_extra=50),
    )
    for field, value in ROWS[name].items():
        section, _, key = field.partition(".")
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: changed})
    return config
