"""The copy task: rows of symbols whose translation is themselves. No file, no network.

The warm-up of *The Annotated Transformer*: what a model must learn is to look at one place after the other.
"""

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.numbers import share_out
from transformer_jax.data.pairs import Pairs, Split

SYMBOLS, LENGTH = 10, 10
"""Each row has LENGTH symbols, each of them one of SYMBOLS."""

_DRAW_SEED = 2017  # not the training seed, so scores compare


def copy_corpus(config: DataConfig) -> dict[Split, Pairs]:
    """Rows of ten symbols, "1" to "10", drawn evenly; no row twice. Sizes are `numbers_train`, `_valid` and `_test`.

    >>> corpus = copy_corpus(DataConfig(numbers_train=2, numbers_valid=0, numbers_test=1))
    >>> corpus["test"].source == corpus["test"].target, len(corpus["train"]), corpus["train"].source[0].count(" ")
    (True, 2, 9)
    """
    wanted = config.numbers_train + config.numbers_valid + config.numbers_test
    # A row is a number of ten digits. The few that are drawn twice are left out: of a million about 50.
    drawn = np.random.default_rng(_DRAW_SEED).integers(0, SYMBOLS**LENGTH, wanted + 1_000).tolist()
    corpus: dict[Split, Pairs] = {}
    for split, values in share_out(list(dict.fromkeys(drawn)), config).items():
        rows = [" ".join(str(int(digit) + 1) for digit in f"{value:0{LENGTH}d}") for value in values]
        corpus[split] = Pairs(rows, rows, f"copy task ({split})")
    return corpus
