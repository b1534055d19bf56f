"""Train a Transformer.

python train.py                                     generated spelled-out numbers: two minutes on a CPU
python train.py configs/multi30k_en_de.py:bpe10k    a recipe; repeating the command resumes the run
python train.py configs/numbers.py --help           the flags, one for each field of a recipe
"""

import sys

from transformer_jax.cli import train_main

if __name__ == "__main__":
    sys.exit(train_main())
