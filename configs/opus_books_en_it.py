"""OPUS Books, English to Italian: 32,332 pairs of sentences from novels, words as tokens: a common teaching setting.

The base sizes with pre-norm, the LayerNorm with the unbiased standard deviation, no table shared, a bias on the logits,
Xavier initialization, dropout 0.1 everywhere, Adam as PyTorch has it with a constant 1e-4, at most 350 tokens, greedy.
The setting's batches have 32 sentences; here they have 1,024 tokens, padding counted: 32 of 32 words. Words are what
stands between spaces, with their punctuation, so there are more of them than where they are cut from it; those that are
there once are unknown, as are those beyond the vocabularies. The set has one split: its first nine tenths are for
training, so that validation and test are of other books than the training, which is harder than a random split.

command   python train.py configs/opus_books_en_it.py
hardware  a GPU
time      not yet run
score     not yet run
text      the dataset Helsinki-NLP/opus_books, subset en-it, downloaded by the library `datasets`
"""

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig


def get_config() -> Config:
    """The recipe."""
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
            num_steps=18_000,  # 20 epochs of 29,000 pairs, 32 a batch
            schedule="constant",
            peak_learning_rate=1e-4,
            warmup_steps=1,
            adam_beta2=0.999,
            label_smoothing_over="all",
        ),
        decoding=DecodingConfig(beam_size=1),
    )
