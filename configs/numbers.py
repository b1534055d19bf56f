"""Train on spelled-out numbers, English to German: twenty-one becomes einundzwanzig. This is the default recipe.

No files and no network are needed.

Command: python train.py
Data: generated.
Hardware: 2 CPU cores (AMD EPYC, Zen 4).
Time: 2 min 2 s for data, tokenizer, compilation, 430 steps, 2 validations and the test; 1 min 16 s when the
    compilation cache is filled.
Score: 99.85 % exact match on 2,000 numbers that are not in the training set.
"""

from transformer_jax.config import Config
from transformer_jax.presets import numbers_config


def get_config() -> Config:
    """Return the built-in default recipe."""
    return numbers_config()
