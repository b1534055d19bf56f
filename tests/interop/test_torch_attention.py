"""Conversion of one attention module to and from `torch.nn.MultiheadAttention`, compared with torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.interop.torch_format import attention_from_torch, attention_to_torch
from transformer_jax.model.attention import MultiHeadAttention
from transformer_jax.types import UserError


@pytest.mark.parametrize("use_bias", [False, True])
def test_attention_equals_torch_in_both_directions(use_bias):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.MultiheadAttention(8, 2, bias=use_bias, batch_first=True)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    x, memory = (np.random.default_rng(seed).normal(size=(3, 5 + seed, 8)).astype(np.float32) for seed in (0, 1))
    query, keys = torch.from_numpy(x), torch.from_numpy(memory)
    expected = theirs(query, keys, keys, need_weights=False)[0].detach().numpy()

    state_dict = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    params = attention_from_torch(state_dict, num_heads=2)
    module = MultiHeadAttention(d_model=8, num_heads=2, use_bias=use_bias)
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.asarray(x))["params"]
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
    output = module.apply({"params": jax.tree.map(jnp.asarray, params)}, jnp.asarray(x), jnp.asarray(memory))
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)

    back = attention_to_torch(params)
    assert set(back) == set(state_dict)
    for name, tensor in back.items():
        np.testing.assert_array_equal(tensor, state_dict[name])


def test_attention_that_torch_cannot_express_is_rejected():
    params = MultiHeadAttention(8, 2, d_k=3).init(jax.random.key(0), jnp.zeros((1, 2, 8)))["params"]
    with pytest.raises(UserError, match=r"query/kernel has shape \[8, 2, 3\]; .* width d_model / num_heads = 4"):
        attention_to_torch(params)


@pytest.mark.parametrize(
    ("names", "num_heads", "message"),
    [
        (("in_proj_weight", "out_proj.weight"), 3, "num_heads=3 does not divide d_model=8"),
        (("in_proj_weight", "out_proj.weight", "out_proj.bias"), 2, "with or without in_proj_bias and out_proj.bias"),
        (("q_proj_weight", "out_proj.weight"), 2, "the state dict has out_proj.weight, q_proj_weight;"),
    ],
)
def test_state_dict_of_another_attention_is_rejected(names, num_heads, message):
    with pytest.raises(UserError, match=message):
        attention_from_torch({name: np.zeros((8, 8), np.float32) for name in names}, num_heads)
