"""Translation by a model whose source starts with BOS, against the model applied to ids written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXTS = ["three one ten", "two two nine four one", "six"]


def random_translator(*, max_source: int = 100, **model: object) -> Translator:
    """Return a greedy translator with random parameters and one token for each of WORDS."""
    config = Config(
        model=ModelConfig(
            vocab_size=14, d_model=16, num_layers=1, num_heads=2, d_ff=32, norm_position="pre", source_bos=True, **model
        ),
        data=DataConfig(max_length=50),
        tokenizer=TokenizerConfig(kind="word"),
        decoding=DecodingConfig(beam_size=1, max_length_offset=2, max_source=max_source),
    )
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Transformer(config.model).init(jax.random.key(0), tokens, tokens)["params"]
    params = jax.tree.map(lambda leaf: leaf * 2, params)
    return Translator(config, params, train_tokenizers(config, Pairs(WORDS, WORDS, "words")))


def greedy_by_hand(translator: Translator, src: list[int], limit: int) -> list[int]:
    """Return at most `limit` target ids, each the most probable one after those before it."""
    model, tgt = translator.config.model, []
    apply = jax.jit(Transformer(model).apply)
    while len(tgt) < limit and model.eos_id not in tgt:
        tgt_in = [model.start_id, *tgt] + [model.pad_id] * (limit - len(tgt) - 1)
        logits = np.array(apply({"params": translator.params}, np.array([src]), np.array([tgt_in])))[0, len(tgt)]
        logits[model.pad_id] = -np.inf
        tgt.append(int(logits.argmax()))
    return tgt


@pytest.mark.parametrize("source_eos", [True, False])
def test_translation_equals_ids_by_hand(source_eos):
    translator = random_translator(source_eos=source_eos)
    model = translator.config.model
    for text, (best,) in zip(TEXTS, translator.translate_n_best(TEXTS, 1), strict=True):
        (ids,) = translator.tokenizers.source.encode([text])
        src = [model.bos_id, *ids, *[model.eos_id] * source_eos]
        limit = len(ids) + 1 + 2  # the words, EOS, and decoding.max_length_offset; BOS does not count
        assert list(best.token_ids) == greedy_by_hand(translator, src, limit)


def test_bos_counts_towards_max_source():
    translator = random_translator(max_source=5)
    model, text = translator.config.model, "one two three four five six"
    with pytest.warns(UserWarning, match=r"line 1 has 6 tokens; it is truncated to 3 tokens \(decoding\.max_source\)"):
        (src,) = translator.encode([text])
    assert src == [model.bos_id, *translator.tokenizers.source.encode([text])[0][:3], model.eos_id]
