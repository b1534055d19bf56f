"""Which positions influence which: gradients are exactly zero where masked and nonzero where attention is allowed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from model_cases import (
    apply,
    as_float32,
    model_and_inputs,
    random_params,
    tiny,
)

from transformer_jax.model.transformer import Transformer

# Every position of every row has a distinct token, so the gradient with respect to the embedding table is the
# gradient with respect to the input at that position. The tables are not tied, so they are used nowhere else.
PAD = 0
SRC = np.array([[4, 5, 6], [7, 8, PAD], [PAD, PAD, PAD]], np.int32)
TGT_IN = np.array([[1, 4, 5, 6], [2, 7, PAD, 8], [3, 9, 10, 11]], np.int32)  # row 1 has padding between tokens


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_masked_positions_have_zero_gradients(norm_position):
    config = tiny(vocab_size=12, tie_embeddings="none", norm_position=norm_position, attention_bias=True)
    model, params = Transformer(config), as_float32(random_params(config))
    weights = np.random.default_rng(1).normal(size=12).astype(np.float32)

    def outputs(source_table, target_table):
        changed = params | {"source_embedding": {"table": source_table}, "target_embedding": {"table": target_table}}
        return apply(model, changed, SRC, TGT_IN) @ weights

    tables = params["source_embedding"]["table"], params["target_embedding"]["table"]
    by_source, by_target = jax.jit(jax.jacrev(outputs, argnums=(0, 1)))(*tables)
    assert np.isfinite(by_source).all()
    assert np.isfinite(by_target).all()

    may_source, may_target = np.zeros((2, 3, 4, 12), bool)
    for row in range(3):
        for query in range(4):
            may_source[row, query, [token for token in SRC[row] if token != PAD]] = True
            for key in range(query + 1):  # padding influences only itself, through the residual connection
                may_target[row, query, TGT_IN[row, key]] |= TGT_IN[row, key] != PAD or key == query
    np.testing.assert_array_equal((by_source != 0).any(-1), may_source)
    np.testing.assert_array_equal((by_target != 0).any(-1), may_target)


def test_start_token_is_attended_to_even_if_it_is_padding():
    config = tiny(decoder_start="pad", tie_embeddings="none", source_vocab_size=11)
    model, params = Transformer(config), as_float32(random_params(config))
    src, tgt_in = np.array([[4, 5]], np.int32), np.array([[0, 4, 5]], np.int32)

    def last_logit(table):
        return apply(model, params | {"target_embedding": {"table": table}}, src, tgt_in)[0, -1, 0]

    gradient = jax.grad(last_logit)(params["target_embedding"]["table"])
    np.testing.assert_array_equal(np.flatnonzero(gradient.any(-1)), [0, 4, 5])


@pytest.mark.parametrize("name", ["paper", "everything else"])
def test_empty_rows_give_no_nan(name):
    """Row 2 has an empty source and row 3 is all padding: logits and the gradients of their sum are finite."""
    _, model, params, src, tgt_in = model_and_inputs(name)
    logits, gradients = jax.value_and_grad(lambda p: jnp.square(apply(model, p, src, tgt_in)).sum())(params)
    assert np.isfinite(logits)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert any(leaf.any() for leaf in jax.tree.leaves(gradients))


def test_added_padding_does_not_change_logits():
    config, model, params, src, tgt_in = model_and_inputs("paper")
    long_src = np.pad(src[:2], ((0, 0), (0, 3)), constant_values=config.pad_id)
    long_tgt = np.pad(tgt_in[:2], ((0, 0), (0, 2)), constant_values=config.pad_id)
    logits = apply(model, params, long_src, long_tgt)[:, :4]
    np.testing.assert_allclose(logits, apply(model, params, src[:2], tgt_in[:2]), rtol=1e-5, atol=1e-6)


def test_given_masks_override_padding():
    """With masks that hide no padding, the model behaves as if pad_id did not occur."""
    config, model, params, src, tgt_in = model_and_inputs("paper")
    src_mask = np.ones((4, 1, 1, 5), bool)
    tgt_mask = np.tril(np.ones((4, 1, 4, 4), bool))
    logits = apply(model, params, src, tgt_in, src_mask=src_mask, tgt_mask=tgt_mask)
    src, tgt_in = src[:2], tgt_in[:2]
    unused = min(set(range(config.vocab_size)) - set(src.flat) - set(tgt_in.flat) - {config.eos_id})
    other = dataclasses.replace(config, pad_id=unused)
    expected = reference.transformer(params, other, src, tgt_in)
    np.testing.assert_allclose(logits[:2], expected, rtol=1e-5, atol=1e-5)
    assert np.abs(expected[1] - reference.transformer(params, config, src, tgt_in)[1]).max() > 1e-3
    encoded = apply(model, params, src, src_mask=src_mask[:2], method="encode")
    memory = reference.encoder(
        params["encoder"], config, reference.embed(params, config, src[1], "source"), np.ones(5, bool)
    )
    np.testing.assert_allclose(encoded[1], memory, rtol=1e-5, atol=1e-5)
