"""Spelled-out numbers, English to German: twenty-one -> einundzwanzig. The default: needs no file and no network.

command   python train.py
hardware  2 CPU cores (AMD EPYC, Zen 4)
time      1 min 43 s in all: data, tokenizer, compilation, 390 steps, 2 validations, the test
score     99.85 % exact match on 2,000 numbers that are not in the training set
"""

from transformer_jax.config import Config
from transformer_jax.recipes import numbers_config


def get_config() -> Config:
    """The built-in default recipe."""
    return numbers_config()
