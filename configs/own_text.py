"""Your own parallel text, English to German unless flags say otherwise: 3 + 3 layers, d_model 128, for 2 CPU cores.

A model of half an hour: 2 million parameters, joint byte pairs of 4,000, 4,096 tokens a batch. Other languages, another
folder, a larger vocabulary: --data.source-language, --data.target-language, --data.directory, --model.vocab-size.

command   python train.py configs/own_text.py
hardware  2 CPU cores
time      30 minutes of one core for 2,000 updates
score     Tatoeba, English to German, after 2,000 of the 3,000 updates: 27.06 BLEU on 2,000 sentences; Debian's
          technical text, vocabulary 8,000, after 1,500: 7.87 on 1,000 (docs/results.md)
text      put train, valid and test, as *.en and *.de (plain or packed as .gz, .xz or .zst; line N of one is the
          translation of line N of the other), into data/own_text
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=ModelConfig(vocab_size=4_000, d_model=128, num_layers=3, num_heads=4, d_ff=512),
        data=DataConfig(source="text", directory="data/own_text", batch_tokens=4_096, max_shapes=6),
        training=TrainingConfig(
            num_steps=3_000,
            schedule="inverse_sqrt",
            warmup_steps=400,
            peak_learning_rate=2e-3,
            validate_every=500,
            checkpoint_every=100,
            keep_checkpoints=5,
            average_last=5,
        ),
        decoding=DecodingConfig(checkpoint="average"),
    )
