"""Train Multi30k, English to French: 29,000 image captions (Elliott et al. 2017), tested on test2016.

The model and the training are those of multi30k_en_de.py.

Variants:
    bpe10k: lower-cased, tokenized text with 10,000 subword-nmt merges, scored without detokenization.
    raw: the original text with a joint byte-pair vocabulary trained here, scored with sacreBLEU 13a.

Command: python train.py configs/multi30k_en_fr.py:bpe10k
Data: bpe10k: put train, valid and test.2016, as *.en and *.fr, from data/multi30k-en-fr of
    github.com/LividWo/Revisit-MMT into data/multi30k/bpe10k-en-fr.
    raw: put train, val and test_2016_flickr, as *.en and *.fr (plain or .gz, .xz, .zst), from data/task1/raw of
    github.com/multi30k/dataset into data/multi30k/raw.
Hardware: 2 CPU cores, or a GPU.
Time: bpe10k: 27 minutes for 952 of 8,000 steps on 2 CPU cores (AMD EPYC, Zen 4), shared for some of the time.
Score: bpe10k after 952 steps: 15.53 BLEU on test2016, while the learning rate is still increasing (docs/results.md).
    raw: not yet run.
"""

import dataclasses
from pathlib import Path

from transformer_jax import Config
from transformer_jax.presets import load_recipe

VOCAB_SIZES = {"raw": 8_000, "bpe10k": 9_537}


def get_config(name: str = "bpe10k") -> Config:
    """Return the recipe for one form of the text."""
    german = load_recipe(f"{Path(__file__).with_name('multi30k_en_de.py')}:{name}")
    return dataclasses.replace(
        german,
        model=dataclasses.replace(german.model, vocab_size=VOCAB_SIZES[name]),
        data=dataclasses.replace(
            german.data, target_language="fr", directory=german.data.directory.replace("en-de", "en-fr")
        ),
    )
