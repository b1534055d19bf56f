"""Train English to French on short everyday sentences from Tatoeba: 3 + 3 layers, d_model 256, 8 million parameters.

The vocabulary is 8,000 joint byte pairs, and a batch has 4,096 tokens. The learning rate is constant at 5e-4 after 500
warmup steps.

Command: python train.py configs/en_fr_small.py
Data: download fra-eng.zip from manythings.org/anki. Its pairs are sorted by length, so shuffle them first. Use 2,000
    pairs for dev and 2,000 for test. Put train, dev and test, as *.en and *.fr (plain or .gz, .xz, .zst), into
    data/manythings-fra-eng.
Hardware: 2 CPU cores, or a GPU.
Time: not yet run.
Score: not yet run.
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig


def get_config() -> Config:
    """Return the recipe."""
    return Config(
        model=ModelConfig(vocab_size=8_000, d_model=256, num_layers=3, num_heads=8, d_ff=1_024),
        data=DataConfig(
            source="text",
            directory="data/manythings-fra-eng",
            valid="dev",
            target_language="fr",
            max_length=128,
            batch_tokens=4_096,
        ),
        training=TrainingConfig(
            num_steps=20_000,
            schedule="constant",
            peak_learning_rate=5e-4,
            warmup_steps=500,
            keep_checkpoints=5,
            average_last=5,
        ),
        decoding=DecodingConfig(checkpoint="average"),
    )
