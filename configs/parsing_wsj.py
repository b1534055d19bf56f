"""Constituency parsing of the Wall Street Journal (paper section 6.3, Table 4): a sentence in, its tree as tokens out.

paper     4 layers, d_model 1024, a vocabulary of 16,000 words, at most 300 tokens more than the input, beam 21,
          alpha 0.3; all else as the base model. The paper chose dropout and learning rate and does not say them: 0.2
          here, on attention too, half of equation 3 and 16,000 warmup steps, as in its released code
small     2 layers, d_model 128, for the sample that comes with NLTK and 2 CPU cores

The target has brackets with their labels, and tags for the words: (S (NP DT NN )NP (VP VBZ )VP )S. Words that are there
once are unknown.

command   transformer-jax parsing prepare --train wsj-02-21.mrg --valid wsj-22.mrg --test wsj-23.mrg --output data/wsj
          python train.py configs/parsing_wsj.py
          transformer-jax parsing score runs/parsing_wsj --split test
hardware  a GPU
time      not yet run
score     not yet run; Table 4: F1 91.3 (sections 2-21 for training, 23 for the test)
text      the Penn Treebank 3 of the LDC, sections 2-21, 22 and 23 of WSJ

small, on the sample that comes with NLTK (nltk.download("treebank"), the files in order, the last of them held out), a
tenth of the WSJ and not these sections: its figure and the paper's are of different tasks.

command   transformer-jax parsing prepare --train train.mrg --valid dev.mrg --output data/wsj
          python train.py configs/parsing_wsj.py:small
          transformer-jax parsing score runs/parsing_wsj-small --split valid --beam-size 4
hardware  2 CPU cores (AMD EPYC, Zen 4), shared with others
time      4 min 49 s for 289 of its 2,000 steps
score     after 289 steps on 3,395 trees: F1 12.09 on 273 others (beam 4; 12.05 greedy; one S over every sentence:
          9.56): it writes brackets, not yet those of its sentence; 2,000 steps: not yet run
"""

import dataclasses

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig, UserError

# Labels with their brackets, and tags: about 100.
MODEL = ModelConfig(source_vocab_size=16_000, vocab_size=256, num_layers=4, tie_embeddings="none")

RECIPES = {
    "paper": (
        dataclasses.replace(MODEL, d_model=1024, residual_dropout=0.2, attention_dropout=0.2),
        TrainingConfig(warmup_steps=16_000, learning_rate_scale=0.5, valid_sentences=0),
        {"batch_tokens": 25_000},
    ),
    "small": (
        dataclasses.replace(MODEL, num_layers=2, d_model=128, num_heads=4, d_ff=512),
        TrainingConfig(
            num_steps=2_000,
            schedule="inverse_sqrt",
            warmup_steps=200,
            peak_learning_rate=2e-3,
            validate_every=250,
            valid_sentences=0,
            checkpoint_every=250,
        ),
        {"batch_tokens": 4_096, "max_shapes": 4},
    ),
}


def get_config(name: str = "paper") -> Config:
    """The recipe at one size."""
    if name not in RECIPES:
        raise UserError(f"configs/parsing_wsj.py has no recipe {name!r}; legal: {', '.join(RECIPES)}")
    model, training, batches = RECIPES[name]
    return Config(
        model=model,
        data=DataConfig(
            source="text",
            directory="data/wsj",
            source_language="words",
            target_language="tree",
            test="",  # scored by `parsing score`
            max_length=512,
            max_length_ratio=20.0,  # a tree has several times the tokens of its words
            **batches,
        ),
        tokenizer=TokenizerConfig(kind="word", joint=False, min_frequency=2),
        training=training,
        decoding=DecodingConfig(beam_size=21, alpha=0.3, max_length_offset=300),
    )
