"""IWSLT14 German to English: 160,239 sentences of talks, fairseq's recipe for them.

6 + 6 layers, d_model 512, d_ff 1024, 4 heads, dropout 0.3, 4,096 tokens a batch, inverse square root schedule to 5e-4,
the last 10 checkpoints averaged, beam 5. Unlike there all embeddings are one table, and there is no weight decay (1e-4
there).

command   python train.py configs/iwslt14_de_en.py
hardware  a GPU
time      not yet run
score     not yet run; fairseq: about 34.6 BLEU (tokenized, lower-cased)
text      tokenized, lower-cased, cut by subword-nmt's 10,000 merges: github.com/facebookresearch/fairseq,
          examples/translation/prepare-iwslt14.sh makes it and needs git, perl and a network: put train, valid and test,
          as *.de and *.en, from its iwslt14.tokenized.de-en/ into data/iwslt14.tokenized.de-en. The library `datasets`
          does not get it: the sets of IWSLT there are loading scripts, which it runs no more
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig


def get_config() -> Config:
    """The recipe."""
    return Config(
        model=ModelConfig(
            vocab_size=10_240,  # at most: as many pieces as the text has
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
