"""Spelled-out numbers, English to German: twenty-one -> einundzwanzig. The default: needs no file and no network.

command   python train.py
"""

from transformer_jax.config import Config
from transformer_jax.recipes import numbers_config


def get_config() -> Config:
    """The built-in default recipe."""
    return numbers_config()
