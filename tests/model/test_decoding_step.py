"""Incremental decoding against the full decoder, for single hypotheses and for beams."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import CONFIGS, apply, every_config, model_and_inputs, to_jax

from transformer_jax.model.cache import reorder_cache, resize_cache
from transformer_jax.model.linear import Int8Matrix
from transformer_jax.model.transformer import Transformer, prepare_for_decoding
from transformer_jax.types import UserError

prepare = jax.jit(prepare_for_decoding, static_argnames=("config", "int8"))


@functools.partial(jax.jit, static_argnames="config")
def decode_step(params, tokens, cache, *, config):
    return Transformer(config).apply({"params": params}, tokens, cache, method="decode_step")


@functools.partial(jax.jit, static_argnames=("config", "max_length", "beam_size"))
def init_cache(params, memory, src_mask, *, config, **options):
    return Transformer(config).apply({"params": params}, memory, src_mask, method="init_cache", **options)


def prepared(config, params, src, *, rows=(0, 2), int8=False, **options):
    """Return prepared parameters, memory, source mask and an empty cache for a source and an empty source."""
    src = src[np.array(rows)]
    memory = apply(Transformer(config), params, src, method="encode")
    src_mask = jnp.asarray(src != config.pad_id)[:, None, None, :]
    weights = prepare(to_jax(params), config, int8=int8)
    return weights, memory, src_mask, init_cache(weights, memory, src_mask, config=config, **options)


@pytest.mark.parametrize("name", **every_config)
def test_cached_decoding_equals_the_full_decoder(name):
    config, model, params, src, tgt_in = model_and_inputs(name)
    tgt_in = jnp.asarray(tgt_in[np.array([0, 2])])  # targets without padding
    # More capacity than needed: unfilled positions must not be attended to.
    weights, memory, src_mask, cache = prepared(config, params, src, max_length=6)
    expected = apply(model, params, tgt_in, memory, src_mask, method="decode")
    for position in range(4):
        assert cache.position == position
        logits, cache = decode_step(weights, jnp.asarray(tgt_in[:, position]), cache, config=config)
        np.testing.assert_allclose(logits, expected[:, position], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "decoder's own heads", "learned"])
def test_reordered_hypotheses_decode_like_separate_ones(name):
    """Reorder a random beam at each step, so that rows are duplicated or dropped while the cache grows."""
    config, model, params, src, _ = model_and_inputs(name)
    rng, k = np.random.default_rng(0), 3
    weights, memory, src_mask, cache = prepared(config, params, src, max_length=2, beam_size=k)
    beams = np.zeros((2, k, 0), np.int32)
    for position in range(4):
        if position == 2:
            cache = resize_cache(cache, 4)
        new = rng.integers(3, 11, (2, k, 1), np.int32)
        beams = np.concatenate([beams, new], axis=2)
        logits, cache = decode_step(weights, jnp.asarray(new.reshape(-1)), cache, config=config)
        for j in range(k):
            expected = apply(model, params, jnp.asarray(beams[:, j]), memory, src_mask, method="decode")[:, -1]
            np.testing.assert_allclose(logits.reshape(2, k, -1)[:, j], expected, rtol=1e-5, atol=1e-5)
        parents = rng.integers(0, k, (2, k))
        beams = np.take_along_axis(beams, parents[:, :, None], axis=1)
        cache = reorder_cache(cache, jnp.asarray((parents + np.array([[0], [k]])).reshape(-1)))


def test_source_keys_and_values_are_stored_once_and_never_change():
    config, _, params, src, _ = model_and_inputs("decoder's own heads")
    weights, _, _, cache = prepared(config, params, src, max_length=4, beam_size=3)
    size = config.decoder
    for layer in cache.cross:
        assert layer.key.shape == (2 * size.num_heads, src.shape[1], size.d_k)
        assert layer.value.shape == (2 * size.num_heads, src.shape[1], size.d_v)
    _, after = decode_step.__wrapped__(weights, jnp.full((6,), 5, jnp.int32), cache, config=config)
    assert all(one is other for one, other in zip(*map(jax.tree.leaves, (cache.cross, after.cross)), strict=True))


def test_bfloat16_cache_is_close_to_the_full_decoder():
    config, _, params, src, tgt_in = model_and_inputs("paper")
    config = dataclasses.replace(config, dtype="bfloat16")
    weights, _, _, cache = prepared(config, params, src, rows=range(len(src)), max_length=4)
    assert {leaf.dtype for leaf in jax.tree.leaves((cache.past, cache.cross))} == {jnp.dtype("bfloat16")}
    logits, _ = decode_step(weights, jnp.asarray(tgt_in[:, 0]), cache, config=config)
    assert logits.dtype == jnp.float32
    expected = apply(Transformer(config), params, src, tgt_in)[:, 0]
    np.testing.assert_allclose(logits, expected, atol=0.05)


@pytest.mark.parametrize("rows", [(0,), (0, 2)])
def test_int8_decoding_is_close_to_unquantized_decoding(rows):
    config, model, params, src, tgt_in = model_and_inputs("paper")
    weights, memory, src_mask, cache = prepared(config, params, src, rows=rows, int8=True, max_length=4)
    leaves = jax.tree_util.tree_leaves_with_path(weights["decoder"], is_leaf=lambda leaf: isinstance(leaf, Int8Matrix))
    kernels = [leaf for path, leaf in leaves if path[-1].key == "kernel"]
    assert len(kernels) == 7 * config.num_layers  # the products of several maps count once
    assert all(isinstance(kernel, Int8Matrix) for kernel in (*kernels, weights["logits_matrix"]))
    tokens = jnp.asarray(tgt_in[np.array(rows), 0])
    logits, _ = decode_step(weights, tokens, cache, config=config)
    expected = apply(model, params, tokens[:, None], memory, src_mask, method="decode")[:, 0]
    assert 1e-5 < np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_cache_longer_than_the_learned_positions_is_rejected():
    config = dataclasses.replace(CONFIGS["learned"], max_length=6)
    _, _, params, src, _ = model_and_inputs("learned")
    params = params | {side: {"table": params[side]["table"][:6]} for side in ("source_positions", "target_positions")}
    with pytest.raises(UserError, match=r"sequence of 7 tokens .* learned position table of model\.max_length 6"):
        prepared(config, params, src, max_length=7)


def test_one_trace_for_all_steps_of_a_cache():
    config, _, params, src, tgt_in = model_and_inputs("learned")
    traces = []

    @jax.jit
    def step(weights, tokens, cache):
        traces.append(tokens.shape)
        return decode_step.__wrapped__(weights, tokens, cache, config=config)

    weights, _, _, cache = prepared(config, params, src, rows=range(len(src)), max_length=4)
    for position in range(4):
        _, cache = step(weights, jnp.asarray(tgt_in[:, position]), cache)
    assert traces == [(4,)]


def test_prepare_leaves_its_argument_unchanged():
    config, _, params, _, _ = model_and_inputs("paper")
    params = to_jax(params)
    before = jax.tree.structure(params)
    jax.eval_shape(lambda: prepare_for_decoding(params, config))
    assert jax.tree.structure(params) == before
