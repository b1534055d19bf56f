"""Trains a Transformer.

python train.py                                     spelled-out numbers, made here: two minutes on a CPU
python train.py configs/multi30k_en_de.py:bpe10k    a recipe; the same command again goes on with the run
python train.py configs/numbers.py --help           every field of a recipe, each of which is a flag
"""

import sys

from transformer_jax.cli import train_main

if __name__ == "__main__":
    sys.exit(train_main())
