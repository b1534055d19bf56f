"""Models of uneven shapes with random weights, the batch they are compared on, and damage to foreign files."""

import json
import os
import shutil

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
    """Return a ModelConfig of uneven shapes."""
    return ModelConfig(**({"vocab_size": 23, "norm_epsilon": 1e-5, "max_length": 40} | ODD | changes))


def random_params(config, seed=0):
    """Return random values for every parameter, also for those that start as zeros or ones."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (0.3 * rng.normal(size=leaf.shape)).astype(leaf.dtype), abstract_params(config))


def logits(config, params, src=SRC, tgt_in=TGT_IN):
    """Return this package's logits at every position that is not padding, and at the first one."""
    params = jax.tree.map(jnp.asarray, params)
    found = Transformer(config).apply({"params": params}, jnp.asarray(src), jnp.asarray(tgt_in))
    return np.asarray(found)[real(tgt_in, config.pad_id)]


def real(tgt_in, pad_id):
    """Return which positions are compared. The first is, whatever its id: the decoder may start from padding."""
    return (tgt_in != pad_id) | (np.arange(tgt_in.shape[1]) == 0)


def assert_same_trees(one, other):
    """Assert that two trees are equal bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype


def copy_files(source, target):
    """Copy the files of a folder into another one, and return it."""
    return shutil.copytree(source, target, dirs_exist_ok=True)


def change_json(path, **changes):
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Malicious:
    """A pickle that creates a folder if it is executed."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)
