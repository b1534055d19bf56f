"""A trained translator, and log-probabilities of its translations computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer


@pytest.fixture(scope="module")
def translator(tiny):
    return Translator.load(tiny.run)


@pytest.fixture(scope="session")
def score_by_hand():
    """Return `score_by_hand(translator, source, target)`: log P of the target's tokens and EOS, and their number."""

    def score(translator, source, target):
        model, width = translator.config.model, 64  # one length, so that one function is compiled
        (src,), (tgt,) = translator.tokenizers.source.encode([source]), translator.tokenizers.target.encode([target])
        sides = [*[model.bos_id] * model.source_bos, *src, model.eos_id], [model.bos_id, *tgt]
        padded = [jnp.asarray(np.pad(np.array([ids], np.int32), ((0, 0), (0, width - len(ids))))) for ids in sides]
        logits = np.asarray(jax.jit(Transformer(model).apply)({"params": translator.params}, *padded), np.float64)[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return log_probs[np.arange(len(tgt) + 1), [*tgt, model.eos_id]].sum(), len(tgt) + 1

    return score
