"""The 20 rows of the paper's Table 3: variations of the base model, WMT14 English to German, scored on newstest2013.

A row is the base recipe with the change that `ROWS` names and nothing else. newstest2013 is the validation split; the
test split is newstest2014. There is no checkpoint averaging here, and perplexities are per token of the vocabulary, so
they compare only with those of the same one.

command   python train.py configs/table3.py:B1; several rows, smaller ones, another corpus: transformer-jax table3
text      the dataset wmt14, subset de-en, downloaded by the library `datasets`
hardware  a GPU; the paper had 8 NVIDIA P100
time      not yet run; the paper: 12 hours a row (0.4 s a step), big 3.5 days (1.0 s a step)
score     not yet run; at an eighth of the width on 2 CPU cores: docs/results.md
"""

from transformer_jax.config import Config
from transformer_jax.experiments.table3 import PAPER as PAPER
from transformer_jax.experiments.table3 import ROWS as ROWS
from transformer_jax.experiments.table3 import table3_config


def get_config(name: str = "base") -> Config:
    """The recipe of one row."""
    return table3_config(name)
