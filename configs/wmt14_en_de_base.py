"""Train the paper's base model on WMT14 English to German: 4.5 million pairs, 100,000 steps.

The vocabulary is 37,000 joint byte pairs. A batch has 25,000 tokens on each side, on any number of devices; if memory
is short, --training.accumulate 2 computes it in two parts. The paper wrote a checkpoint every 10 minutes, which is
1,500 steps of 0.4 s. This recipe writes one every 1,500 steps if a step takes less than 2.4 s, so that the average of
the last 5 checkpoints covers the same steps on any hardware. The paper computes BLEU on tokenized text with split
compounds, which is 0.7 to 1.5 higher than sacreBLEU 13a.

Variants:
    huggingface: the data set wmt14, subset de-en, of the library `datasets`.
    tfds: the data set wmt14_translate/de-en of TensorFlow Datasets.

Command: python train.py configs/wmt14_en_de_base.py
Data: downloaded by the library. `validation` is newstest2013 and `test` is newstest2014.
Hardware: a GPU. The paper used 8 NVIDIA P100.
Time: not yet run. The paper: 12 hours.
Score: not yet run. The paper: 27.3 BLEU on newstest2014.
"""

import dataclasses

from transformer_jax import Config, UserError, preset

LIBRARIES = {
    "huggingface": {"source": "huggingface", "name": "wmt14", "subset": "de-en"},
    "tfds": {"source": "tfds", "name": "wmt14_translate/de-en"},
}


def get_config(name: str = "huggingface") -> Config:
    """Return the recipe with the text from one of the two libraries."""
    if name not in LIBRARIES:
        raise UserError(f"configs/wmt14_en_de_base.py has no recipe {name!r}; legal: {', '.join(LIBRARIES)}")
    paper = preset("paper_base", vocab_size=37_000)
    return dataclasses.replace(
        paper,
        data=dataclasses.replace(paper.data, **LIBRARIES[name], valid="validation", test="test"),
        training=dataclasses.replace(
            paper.training,
            checkpoint_every=1_500,
            checkpoint_seconds=3_600.0,  # applies only if a step takes more than 2.4 s
            validate_every=3_000,
        ),
    )
