"""Models of odd shapes with random weights, and the batch they are compared on."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import Transformer, abstract_params

# Encoder and decoder that differ in layers, heads and width.
ODD = {"d_model": 12, "num_heads": 3, "d_ff": 20, "num_layers": 2}
ODD |= {"decoder_num_layers": 3, "decoder_num_heads": 2, "decoder_d_ff": 28}

SRC = np.array([[5, 6, 7, 8, 2], [5, 4, 2, 0, 0]], np.int32)
TGT_IN = np.array([[1, 4, 5, 6], [1, 9, 0, 0]], np.int32)
REAL = TGT_IN != 0


def odd(**changes):
    """A ModelConfig of odd shapes."""
    return ModelConfig(**({"vocab_size": 23, "norm_epsilon": 1e-5, "max_length": 40} | ODD | changes))


def random_params(config, seed=0):
    """Every parameter random, those too that start as zeros or ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(leaf.dtype), abstract_params(config))


def logits(config, params, src=SRC, tgt_in=TGT_IN):
    """Of our model, at real positions."""
    params = jax.tree.map(jnp.asarray, params)
    found = Transformer(config).apply({"params": params}, jnp.asarray(src), jnp.asarray(tgt_in))
    return np.asarray(found)[tgt_in != config.pad_id]


def assert_same_trees(one, other):
    """Bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype
