"""Multi30k, English to German: 29,000 captions of pictures (Elliott et al. 2016), test2016 as test.

raw       the original text with a joint BPE of our own, scored by sacreBLEU 13a
bpe10k    lower-cased, tokenized text with subword-nmt's 10,000 merges already in it, scored as it is: the form of the
          published 41.02 (Wu et al. 2021, text only), whose shape and recipe this is: 4 + 4 layers, d_model 128,
          d_ff 256, 4 heads, dropout 0.3, 8,192 tokens a batch, 8,000 updates, the last 10 checkpoints averaged, beam 5

command   python train.py configs/multi30k_en_de.py:bpe10k --training.num-steps 2500
hardware  2 CPU cores (AMD EPYC, Zen 4)
time      about 1 hour, counted from 1.35 s a step: the run itself shared its CPU
score     on test2016, bpe10k: 38.04 BLEU (tokenized, lower-cased); raw after 1,500 updates: 26.52 (sacreBLEU 13a);
          all 8,000 updates: not yet run
text      raw: github.com/multi30k/dataset, data/task1/raw: put train, val and test_2016_flickr, as *.en and *.de (plain
          or packed as .gz, .xz or .zst), into data/multi30k/raw
          bpe10k: github.com/LividWo/Revisit-MMT, data/multi30k-en-de: put train, valid and test.2016, as *.en and *.de,
          into data/multi30k/bpe10k-en-de
"""

import dataclasses

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig, UserError

FORMS = {
    "raw": (
        DataConfig(source="text", directory="data/multi30k/raw", valid="val", test="test_2016_flickr"),
        TokenizerConfig(kind="bpe"),
        8_000,
    ),
    "bpe10k": (
        DataConfig(source="text", directory="data/multi30k/bpe10k-en-de", test="test.2016"),
        TokenizerConfig(kind="pretokenized"),
        9_712,
    ),
}


def get_config(name: str = "bpe10k") -> Config:
    """The recipe for one form of the text."""
    if name not in FORMS:
        raise UserError(f"configs/multi30k_en_de.py has no recipe {name!r}; legal: {', '.join(FORMS)}")
    data, tokenizer, vocab_size = FORMS[name]
    return Config(
        model=ModelConfig(
            vocab_size=vocab_size,
            d_model=128,
            num_layers=4,
            num_heads=4,
            d_ff=256,
            norm_epsilon=1e-5,
            residual_dropout=0.3,
        ),
        data=dataclasses.replace(data, batch_tokens=8_192),
        tokenizer=tokenizer,
        training=TrainingConfig(
            num_steps=8_000,
            schedule="inverse_sqrt",
            warmup_steps=2_000,
            peak_learning_rate=5e-3,
            validate_every=500,
            checkpoint_every=50,  # a little less than an epoch
            keep_checkpoints=10,
            average_last=10,
        ),
        decoding=DecodingConfig(beam_size=5, length_penalty="power", alpha=1.0, checkpoint="average"),
    )
