"""Multi30k, English to French: 29,000 captions of pictures (Elliott et al. 2017), test2016 as test.

raw       the original text with a joint BPE of our own, scored by sacreBLEU 13a
bpe10k    lower-cased, tokenized text with subword-nmt's 10,000 merges already in it, scored as it is

The model and the training are those of multi30k_en_de.py.

command   python train.py configs/multi30k_en_fr.py:bpe10k
hardware  2 CPU cores, or a GPU
time      bpe10k: 27 minutes for 952 of its 8,000 steps on 2 CPU cores (AMD EPYC, Zen 4), shared for a part of it
score     bpe10k, 952 steps: 15.53 BLEU on test2016, while the learning rate still rises (docs/results.md)
          raw: not yet run
text      raw: github.com/multi30k/dataset, data/task1/raw: put train, val and test_2016_flickr, as *.en and *.fr (plain
          or packed as .gz, .xz or .zst), into data/multi30k/raw
          bpe10k: github.com/LividWo/Revisit-MMT, data/multi30k-en-fr: put train, valid and test.2016, as *.en and *.fr,
          into data/multi30k/bpe10k-en-fr
"""

import dataclasses
from pathlib import Path

from transformer_jax import Config
from transformer_jax.presets import load_recipe

VOCAB_SIZES = {"raw": 8_000, "bpe10k": 9_537}


def get_config(name: str = "bpe10k") -> Config:
    """The recipe for one form of the text."""
    german = load_recipe(f"{Path(__file__).with_name('multi30k_en_de.py')}:{name}")
    return dataclasses.replace(
        german,
        model=dataclasses.replace(german.model, vocab_size=VOCAB_SIZES[name]),
        data=dataclasses.replace(
            german.data, target_language="fr", directory=german.data.directory.replace("en-de", "en-fr")
        ),
    )
