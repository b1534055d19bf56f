"""Train a row of the paper's Table 3: 20 variations of the base model on WMT14 English to German.

A row is the base recipe with the change that `ROWS` lists. newstest2013 is the validation split, which Table 3 reports,
and newstest2014 is the test split. Checkpoints are not averaged. Perplexities are per token, so only those of the same
vocabulary can be compared. `transformer-jax table3` trains several rows, smaller models, and other corpora.

Command: python train.py configs/table3.py:B1
Data: the data set wmt14, subset de-en, which the library `datasets` downloads.
Hardware: a GPU. The paper used 8 NVIDIA P100.
Time: not yet run. The paper: 12 hours per row (0.4 s per step), 3.5 days for big (1.0 s per step).
Score: not yet run at this size. docs/results.md has all rows at an eighth of the width on 2 CPU cores.
"""

from transformer_jax.config import Config
from transformer_jax.experiments.table3 import PAPER as PAPER
from transformer_jax.experiments.table3 import ROWS as ROWS
from transformer_jax.experiments.table3 import table3_config


def get_config(name: str = "base") -> Config:
    """Return the recipe of one row."""
    return table3_config(name)
