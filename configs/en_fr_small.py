"""English to French, short everyday sentences of Tatoeba: 3 + 3 layers, d_model 256, a learning rate of 5e-4.

A model for one evening: 8 million parameters, joint byte pairs of 8,000, 4,096 tokens a batch; the rate is constant
after 500 steps of warmup.

command   python train.py configs/en_fr_small.py
hardware  2 CPU cores, or a GPU
time      not yet run
score     not yet run
text      manythings.org/anki has the pairs as fra-eng.zip, sorted by length: shuffle them, keep 2,000 for dev and 2,000
          for test, and put train, dev and test, as *.en and *.fr (plain or packed as .gz, .xz or .zst), into
          data/manythings-fra-eng
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TrainingConfig


def get_config() -> Config:
    """The recipe."""
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
