"""Train IWSLT14 German to English with fairseq's recipe: 160,239 sentences of transcribed talks.

6 + 6 layers, d_model 512, d_ff 1024, 4 heads, dropout 0.3, 4,096 tokens per batch, inverse square root schedule with a
peak of 5e-4, average of the last 10 checkpoints, beam 5. Two settings differ from fairseq: all embeddings share one
table, and there is no weight decay (1e-4 in fairseq).

Command: python train.py configs/iwslt14_de_en.py
Data: tokenized, lower-cased text with 10,000 subword-nmt merges. Run examples/translation/prepare-iwslt14.sh of
    github.com/facebookresearch/fairseq, which needs git, perl and a network. Put train, valid and test, as *.de and
    *.en, from its iwslt14.tokenized.de-en/ into data/iwslt14.tokenized.de-en. The library `datasets` cannot load IWSLT,
    because its data sets are loading scripts, which `datasets` no longer runs.
Hardware: a GPU.
Time: not yet run.
Score: not yet run. fairseq reports about 34.6 BLEU (tokenized, lower-cased).
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig


def get_config() -> Config:
    """Return the recipe."""
    return Config(
        model=ModelConfig(
            vocab_size=10_240,  # an upper bound; the text determines the number of pieces
            d_ff=1_024,
            num_heads=4,
            norm_epsilon=1e-5,
            residual_dropout=0.3,
        ),
        data=DataConfig(
            source="text",
            directory="data/iwslt14.tokenized.de-en",
            source_language="de",
            target_language="en",
            batch_tokens=4_096,
        ),
        tokenizer=TokenizerConfig(kind="pretokenized"),
        training=TrainingConfig(
            num_steps=50_000,
            schedule="inverse_sqrt",
            peak_learning_rate=5e-4,
            adam_epsilon=1e-8,
            validate_every=2_000,
            keep_checkpoints=10,
            average_last=10,
        ),
        decoding=DecodingConfig(beam_size=5, length_penalty="power", alpha=1.0, checkpoint="average"),
    )
