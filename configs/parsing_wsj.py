"""Train constituency parsing on the Wall Street Journal (paper section 6.3, Table 4): sentences to trees as tokens.

A target has labeled brackets and a tag for each word: (S (NP DT NN )NP (VP VBZ )VP )S. Words that occur once are
unknown.

Variants:
    paper: 4 layers, d_model 1024, a vocabulary of 16,000 words, output at most 300 tokens longer than the input, beam
        21, alpha 0.3, everything else as in the base model. The paper tuned dropout and learning rate and does not
        report them. As in its released code, dropout is 0.2 (also on attention), and the learning rate is half of
        equation 3 with 16,000 warmup steps.
    small: 2 layers, d_model 128, for the sample in NLTK and 2 CPU cores.

paper:
    Command:
        transformer-jax parsing prepare --train wsj-02-21.mrg --valid wsj-22.mrg --test wsj-23.mrg --output data/wsj
        python train.py configs/parsing_wsj.py
        transformer-jax parsing score runs/parsing_wsj --split test
    Data: WSJ sections 2-21, 22 and 23 of the Penn Treebank 3 (LDC).
    Hardware: a GPU.
    Time: not yet run.
    Score: not yet run. The paper reports F1 91.3 in Table 4 (trained on sections 2-21, tested on 23).

small:
    Command:
        transformer-jax parsing prepare --train train.mrg --valid dev.mrg --output data/wsj
        python train.py configs/parsing_wsj.py:small
        transformer-jax parsing score runs/parsing_wsj-small --split valid --beam-size 4
    Data: nltk.download("treebank"), a tenth of the WSJ and not the sections above, with the last files held out. The
        score cannot be compared with the paper's.
    Hardware: 2 CPU cores (AMD EPYC, Zen 4), shared with other processes.
    Time: 4 min 49 s for 289 of 2,000 steps.
    Score: after 289 steps on 3,395 trees, F1 12.09 on 273 other trees (beam 4; greedy 12.05; a single S over each
        sentence 9.56). The output has brackets, but not yet those of its sentence. 2,000 steps: not yet run.
"""

import dataclasses

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig, UserError

# The target vocabulary has about 100 entries: labels with their brackets, and tags.
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
    """Return the recipe at one size."""
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
            test="",  # `parsing score` computes the test score
            max_length=512,
            max_length_ratio=20.0,  # a tree has several times as many tokens as its sentence
            **batches,
        ),
        tokenizer=TokenizerConfig(kind="word", joint=False, min_frequency=2),
        training=training,
        decoding=DecodingConfig(beam_size=21, alpha=0.3, max_length_offset=300),
    )
