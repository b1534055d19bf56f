"""Helpers for tests of pictures: a small model with byte pairs, and random attention weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import Config, DecodingConfig, ModelConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer
from transformer_jax.visualization.attention import Attention, Maps

HOSTILE = ["</script>", "<img src=x onerror=\"window.broken='yes'\">", "<!--", "&lt;{{data}}", "\u2028\\u003c'\"`${1}"]
SENTENCE = "Ein Hund l\u00e4uft."


@functools.cache
def small_translator() -> Translator:
    """Return a model with 2 encoder layers of 2 heads, 1 decoder layer of 4 heads, and random parameters."""
    config = Config(
        model=ModelConfig(
            vocab_size=300, d_model=16, num_layers=2, num_heads=2, d_ff=32, decoder_num_layers=1, decoder_num_heads=4
        ),
        decoding=DecodingConfig(beam_size=2, max_length_offset=2),
    )
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Transformer(config.model).init(jax.random.key(0), tokens, tokens)["params"]
    texts = [SENTENCE, "A dog runs."] * 3
    return Translator(
        config, jax.tree.map(lambda leaf: leaf * 3, params), train_tokenizers(config, Pairs(texts, texts, "texts"))
    )


def made_up(source, target, *, layers=2, heads=3, seed=0) -> Attention:
    """Return random weights between these tokens; decoder self-attention is causal."""
    rng = np.random.default_rng(seed)

    def weights(queries, keys, is_causal=False):
        found = rng.exponential(size=(layers, heads, len(queries), len(keys))) ** 3
        found = np.tril(found) if is_causal else found
        return (found / found.sum(-1, keepdims=True)).astype(np.float32)

    source, read, written = tuple(source), ("<s>", *target[:-1]), tuple(target)
    return Attention(
        run="runs/made up",
        source="".join(source),
        target="".join(target),
        is_given=False,
        maps={
            "encoder": Maps(source, source, weights(source, source)),
            "decoder": Maps(read, read, weights(read, read, is_causal=True)),
            "cross": Maps(written, source, weights(written, source)),
        },
    )
