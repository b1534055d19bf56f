"""WMT14 English to French, the paper's base model: 36 million pairs in the paper, 41 here, 100,000 steps.

huggingface   the dataset wmt14 of the library `datasets`, subset fr-en (the default)
tfds          the dataset wmt14_translate/fr-en of TensorFlow Datasets

Both call newstest2013 `validation` and newstest2014 `test`. Joint byte pairs, 32,000 in all. A batch has 25,000 tokens
on each side on any number of devices; where memory is short, `--training.accumulate 2` computes it in two parts. The
paper wrote a checkpoint every 10 minutes, which were 1,500 steps of 0.4 s: here it is so many steps on any hardware
that takes less than 2.4 s for one, so that the average of the last 5 is of the same ones. The paper's BLEU is of
tokenized text, and its vocabulary of word pieces.

command   python train.py configs/wmt14_en_fr_base.py
hardware  a GPU; the paper had 8 NVIDIA P100
time      not yet run; the paper: 12 hours
score     not yet run; the paper: 38.1 on newstest2014
"""

import dataclasses

from transformer_jax import Config, UserError, preset

LIBRARIES = {
    "huggingface": {"source": "huggingface", "name": "wmt14", "subset": "fr-en"},
    "tfds": {"source": "tfds", "name": "wmt14_translate/fr-en"},
}


def get_config(name: str = "huggingface") -> Config:
    """The recipe, with the text from one library or the other."""
    if name not in LIBRARIES:
        raise UserError(f"configs/wmt14_en_fr_base.py has no recipe {name!r}; legal: {', '.join(LIBRARIES)}")
    paper = preset("paper_base", vocab_size=32_000)
    return dataclasses.replace(
        paper,
        data=dataclasses.replace(paper.data, **LIBRARIES[name], valid="validation", test="test", target_language="fr"),
        training=dataclasses.replace(
            paper.training,
            checkpoint_every=1_500,
            checkpoint_seconds=3_600.0,  # beside those, only where a step takes more than 2.4 s
            validate_every=3_000,
        ),
    )
