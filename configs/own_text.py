"""Train on your own parallel text with 2 CPU cores: 3 + 3 layers, d_model 128, 2 million parameters.

The vocabulary is 4,000 joint byte pairs, and a batch has 4,096 tokens. The languages are English and German by default.
Change languages, folder and vocabulary with --data.source-language, --data.target-language, --data.directory and
--model.vocab-size.

Command: python train.py configs/own_text.py
Data: put train, valid and test, as *.en and *.de (plain or .gz, .xz, .zst), into data/own_text. Line N of one file is
    the translation of line N of the other.
Hardware: 2 CPU cores.
Time: 30 minutes on one core for 2,000 updates.
Score: Tatoeba English to German, after 2,000 of 3,000 updates: 27.06 BLEU on 2,000 sentences. Debian's technical text
    with a vocabulary of 8,000, after 1,500 updates: 7.87 BLEU on 1,000 sentences (docs/results.md).
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig


def get_config() -> Config:
    """Return the recipe."""
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
