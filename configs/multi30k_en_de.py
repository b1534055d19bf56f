"""Train Multi30k, English to German: 29,000 image captions (Elliott et al. 2016), tested on test2016.

4 + 4 layers, d_model 128, d_ff 256, 4 heads, dropout 0.3, 8,192 tokens per batch, 8,000 updates, average of the last 10
checkpoints, beam 5.

Variants:
    bpe10k: lower-cased, tokenized text with 10,000 subword-nmt merges, scored without detokenization. This is the
        setting of the published 41.02 BLEU (Wu et al. 2021, text only).
    raw: the original text with a joint byte-pair vocabulary trained here, scored with sacreBLEU 13a.

Command: python train.py configs/multi30k_en_de.py:bpe10k --training.num-steps 2500
Data: bpe10k: put train, valid and test.2016, as *.en and *.de, from data/multi30k-en-de of
    github.com/LividWo/Revisit-MMT into data/multi30k/bpe10k-en-de.
    raw: put train, val and test_2016_flickr, as *.en and *.de (plain or .gz, .xz, .zst), from data/task1/raw of
    github.com/multi30k/dataset into data/multi30k/raw.
Hardware: 2 CPU cores (AMD EPYC, Zen 4).
Time: about 1 hour, calculated from 1.35 s per step, because the run shared its CPU.
Score: bpe10k after 2,500 updates: 38.04 BLEU on test2016 (tokenized, lower-cased). raw after 1,500 updates: 26.52 BLEU
    (sacreBLEU 13a). All 8,000 updates: not yet run.
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
    """Return the recipe for one form of the text."""
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
            checkpoint_every=50,  # slightly less than an epoch
            keep_checkpoints=10,
            average_last=10,
        ),
        decoding=DecodingConfig(beam_size=5, length_penalty="power", alpha=1.0, checkpoint="average"),
    )
