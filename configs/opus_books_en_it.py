"""Train OPUS Books, English to Italian, with words as tokens: a common setting of courses and tutorials.

The data set has 32,332 sentence pairs from novels. The model has the base sizes with pre-norm, the LayerNorm with the
unbiased standard deviation, untied embeddings, a bias on the logits, Xavier initialization and dropout 0.1 everywhere.
Adam has PyTorch's defaults and a constant learning rate of 1e-4. Decoding is greedy, and sentences have at most 350
tokens.

Three things differ from the usual setting:
    - A batch has 1,024 tokens including padding, which is 32 sentences of 32 words, instead of 32 sentences.
    - Words are split at spaces and keep their punctuation, so there are more distinct words. Words that occur once, and
      words beyond the vocabulary size, are unknown.
    - The data set has a single split. Training uses its first nine tenths, so validation and test are from other books,
      which is harder than a random split.

Command: python train.py configs/opus_books_en_it.py
Data: the data set Helsinki-NLP/opus_books, subset en-it, which the library `datasets` downloads.
Hardware: a GPU.
Time: not yet run.
Score: not yet run.
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig


def get_config() -> Config:
    """Return the recipe."""
    return Config(
        model=ModelConfig(
            source_vocab_size=20_000,
            vocab_size=25_000,
            norm_position="pre",
            final_norm=True,
            norm_variant="unbiased_std",
            logits_bias=True,
            attention_dropout=0.1,
            activation_dropout=0.1,
            tie_embeddings="none",
            initialization="xavier_uniform",
        ),
        data=DataConfig(
            source="huggingface",
            name="Helsinki-NLP/opus_books",
            subset="en-it",
            train="train[:90%]",
            valid="train[90%:95%]",
            test="train[95%:]",
            target_language="it",
            max_length=350,
            batch_tokens=1_024,
        ),
        tokenizer=TokenizerConfig(kind="word", joint=False, min_frequency=2),
        training=TrainingConfig(
            num_steps=18_000,  # 20 epochs of 29,000 pairs, 32 per batch
            schedule="constant",
            peak_learning_rate=1e-4,
            warmup_steps=1,
            adam_beta2=0.999,
            label_smoothing_over="all",
        ),
        decoding=DecodingConfig(beam_size=1),
    )
