"""Initial parameters: bounds and variances of every scheme against its formula."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_flatten_with_path
from model_cases import tiny

from transformer_jax.config import ModelConfig
from transformer_jax.model.initializers import attention_initializer, embedding_initializer, xavier_uniform
from transformer_jax.model.transformer import Transformer

SCHEMES = ["tensor2tensor", "xavier_uniform", "torch_fused"]
# h d_k = 32 and h d_v = 64 differ from each other and from d_model.
D_MODEL, ROWS, SOURCE_ROWS, D_FF, QK_WIDTH, V_WIDTH = 48, 300, 200, 80, 32, 64


def config_of(scheme: str) -> ModelConfig:
    return tiny(
        vocab_size=ROWS,
        source_vocab_size=SOURCE_ROWS,
        tie_embeddings="none",
        d_model=D_MODEL,
        num_layers=1,
        num_heads=4,
        d_k=QK_WIDTH // 4,
        d_v=V_WIDTH // 4,
        d_ff=D_FF,
        positions="learned",
        max_length=128,
        attention_bias=True,
        logits_bias=True,
        final_norm=True,
        initialization=scheme,
    )


@functools.cache
def initial(scheme: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the initial parameters by path."""
    tokens = jnp.array([[4, 5]])
    params = jax.jit(Transformer(config_of(scheme)).init)(jax.random.key(seed), tokens, tokens)["params"]
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in tree_flatten_with_path(params)[0]}


def check_uniform(values, fan_in, fan_out, name=""):
    bound = math.sqrt(6 / (fan_in + fan_out))
    assert np.abs(values).max() <= bound, name
    assert np.abs(values).max() > 0.98 * bound, name
    check_variance(values, bound**2 / 3, 1.8, name)  # 1.8: the kurtosis of a uniform distribution


def check_normal(values, variance, name=""):
    check_variance(values, variance, 3.0, name)
    kurtosis = (values**4).mean() / (values**2).mean() ** 2
    assert abs(kurtosis - 3) < 5 * math.sqrt(24 / values.size), name


def check_variance(values, variance, kurtosis, name):
    """Check that mean and variance are within 5 standard errors."""
    assert abs(values.mean()) < 5 * math.sqrt(variance / values.size), name
    assert abs(values.var() / variance - 1) < 5 * math.sqrt((kurtosis - 1) / values.size), name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention(scheme):
    fused = 2 * QK_WIDTH + V_WIDTH
    fans_out = {"query": QK_WIDTH, "key": QK_WIDTH, "value": V_WIDTH}
    attentions = ("encoder/layer_0/self", "decoder/layer_0/self", "decoder/layer_0/cross")
    for attention in attentions:
        for name, width in fans_out.items():
            kernel = initial(scheme)[f"{attention}_attention/{name}/kernel"]
            check_uniform(kernel, D_MODEL, fused if scheme == "torch_fused" else width, name)
        check_uniform(initial(scheme)[f"{attention}_attention/output/kernel"], V_WIDTH, D_MODEL, "output")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_feed_forward_and_output(scheme):
    for stack in ("encoder", "decoder"):
        for name in ("inner", "outer"):
            check_uniform(initial(scheme)[f"{stack}/layer_0/feed_forward/{name}/kernel"], D_MODEL, D_FF, name)
    check_uniform(initial(scheme)["output_projection/kernel"], D_MODEL, ROWS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_embeddings(scheme):
    for side, rows in (("source", SOURCE_ROWS), ("target", ROWS)):
        table = initial(scheme)[f"{side}_embedding/table"]
        assert table.shape == (rows, D_MODEL)
        if scheme == "xavier_uniform":
            check_uniform(table, rows, D_MODEL, side)
        else:
            check_normal(table, 1 / D_MODEL, side)
        check_normal(initial(scheme)[f"{side}_positions/table"], 1 / D_MODEL, side)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_biases_are_zero_and_scales_one(scheme):
    seen = set()
    for path, values in initial(scheme).items():
        name = path.split("/")[-1]
        seen.add(name)
        if name in ("bias", "logits_bias"):
            assert not values.any(), path
        elif name == "scale":
            assert (values == 1).all(), path
    assert seen == {"bias", "logits_bias", "scale", "kernel", "table"}


def test_initial_parameters_depend_on_seed_and_layer():
    first, other = initial("tensor2tensor"), initial("tensor2tensor", seed=1)
    initial.cache_clear()
    again = initial("tensor2tensor")
    for path, values in first.items():
        np.testing.assert_array_equal(values, again[path])
        if path.split("/")[-1] in ("kernel", "table"):
            assert not np.array_equal(values, other[path]), path
    kernels = [values for path, values in first.items() if path.endswith("query/kernel")]
    assert len(kernels) == 3
    assert not np.array_equal(kernels[0], kernels[1])
    assert not np.array_equal(kernels[1], kernels[2])


def test_initializers_have_the_documented_variances():
    key = jax.random.key(0)
    check_uniform(np.asarray(xavier_uniform(30, 70)(key, (50, 20, 10))), 30, 70)  # whatever the shape
    check_normal(np.asarray(embedding_initializer("tensor2tensor", 10, 16)(key, (1000, 16))), 1 / 16)
    check_uniform(np.asarray(embedding_initializer("xavier_uniform", 1000, 16)(key, (1000, 16))), 1000, 16)
    check_uniform(np.asarray(attention_initializer("torch_fused", 64, 32, 96)(key, (64, 32))), 64, 96)
    check_uniform(np.asarray(attention_initializer("tensor2tensor", 64, 32, 96)(key, (64, 32))), 64, 32)
    assert xavier_uniform(3, 4)(key, (3, 4), "bfloat16").dtype == "bfloat16"
