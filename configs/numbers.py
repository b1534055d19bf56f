"""Spelled-out numbers, English to German: twenty-one -> einundzwanzig. The default: needs no file and no network.

command   python train.py
hardware  2 CPU cores (AMD EPYC, Zen 4)
time      2 min 2 s in all: data, tokenizer, compilation, 430 steps, 2 validations, the test; 1 min 16 s again, with
          what was compiled on disk
score     99.85 % exact match on 2,000 numbers that are not in the training set
"""

from transformer_jax.config import Config
from transformer_jax.presets import numbers_config


def get_config() -> Config:
    """The built-in default recipe."""
    return numbers_config()
