"""Train on six sentences until they are memorized: a quick check after a change of the model.

Pre-norm, one vocabulary of words per language, no dropout, no label smoothing, 100 steps. The six sentences are also
the test set.

Command: python train.py configs/toy_pairs.py
Data: toy_pairs.tsv in the same folder.
Hardware: 2 CPU cores (AMD EPYC, Zen 4), shared with other processes.
Time: 31 s, of which 21 s are CPU time.
Score: 100.00 % exact match.
"""

from pathlib import Path

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig


def get_config() -> Config:
    """Return the recipe."""
    return Config(
        model=ModelConfig(
            source_vocab_size=40,
            vocab_size=40,
            d_model=64,
            num_layers=1,
            num_heads=4,
            d_ff=128,
            norm_position="pre",
            final_norm=True,
            residual_dropout=0.0,
            tie_embeddings="none",
        ),
        data=DataConfig(
            source="tsv",
            directory=str(Path(__file__).resolve().parent),
            train="toy_pairs",
            valid="",
            test="toy_pairs",
            max_length=16,
            batch_tokens=96,
            max_shapes=1,
        ),
        tokenizer=TokenizerConfig(kind="word", joint=False),
        training=TrainingConfig(
            num_steps=100,
            schedule="constant",
            peak_learning_rate=3e-3,
            warmup_steps=10,
            label_smoothing=0.0,
            log_every=10,
        ),
        decoding=DecodingConfig(beam_size=1, max_length_offset=5),
    )
