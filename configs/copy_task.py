"""The copy task of The Annotated Transformer: ten symbols in, the same ten out. Needs no file and no network.

small       2 + 2 layers, d_model 64, of the paper's kind
annotated   the model and the training of that article: 2 + 2 layers of d_model 512, pre-norm with its LayerNorm, biases
            everywhere, noam times 0.5 with 400 warmup steps, 400 batches of 80 rows

command   python train.py configs/copy_task.py
hardware  2 CPU cores (AMD EPYC, Zen 4), shared with others
time      1 min 16 s in all, of which it had 50 s of CPU time
score     small: 100.00 % exact match on 200 rows that are not in the training set; annotated: not yet run
"""

import dataclasses

from transformer_jax import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig, UserError

VOCAB_SIZE = 14  # ten symbols and the four special tokens
ROWS = 80  # in a batch, of ten symbols and EOS

RECIPES = {
    "small": (
        ModelConfig(vocab_size=VOCAB_SIZE, d_model=64, num_layers=2, num_heads=4, d_ff=256),
        TrainingConfig(num_steps=400, schedule="inverse_sqrt", warmup_steps=100, peak_learning_rate=3e-3),
    ),
    "annotated": (
        ModelConfig(
            vocab_size=VOCAB_SIZE,
            num_layers=2,
            norm_position="pre",
            final_norm=True,
            norm_variant="unbiased_std",
            attention_bias=True,
            logits_bias=True,
            attention_dropout=0.1,
            activation_dropout=0.1,
            tie_embeddings="none",
            initialization="xavier_uniform",
        ),
        TrainingConfig(num_steps=400, warmup_steps=400, learning_rate_scale=0.5),
    ),
}


def get_config(name: str = "small") -> Config:
    """The recipe at one size."""
    if name not in RECIPES:
        raise UserError(f"configs/copy_task.py has no recipe {name!r}; legal: {', '.join(RECIPES)}")
    model, training = RECIPES[name]
    return Config(
        model=model,
        data=DataConfig(
            source="copy",
            synthetic_train_size=32_000,
            synthetic_valid_size=200,
            synthetic_test_size=200,
            max_length=11,
            batch_tokens=ROWS * 11,
            max_shapes=1,
        ),
        tokenizer=TokenizerConfig(kind="word"),
        training=dataclasses.replace(training, label_smoothing=0.0, validate_every=200, valid_sentences=200),
        decoding=DecodingConfig(beam_size=1, max_length_offset=5),
    )
