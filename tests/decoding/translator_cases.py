"""A translator of ten words with random parameters, shared by the tests of decoding."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def make(*, decoding=None, max_length=100, **model) -> Translator:
    """Return a translator with random parameters, large enough that translations differ, and ids 4 to 13 for WORDS."""
    config = Config(
        model=ModelConfig(**{"vocab_size": 14, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32} | model),
        data=DataConfig(max_length=max_length),
        tokenizer=TokenizerConfig(kind="word"),
        decoding=DecodingConfig(**{"beam_size": 1, "max_length_offset": 2} | (decoding or {})),
    )
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Transformer(config.model).init(jax.random.key(0), tokens, tokens)["params"]
    params = jax.tree.map(lambda leaf: leaf * 2, params)
    return Translator(config, params, train_tokenizers(config, Pairs(WORDS, WORDS, "words")))


def sentences(*lengths):
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, length)) for length in lengths]
