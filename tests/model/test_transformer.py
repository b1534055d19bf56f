"""The complete model against the reference, with its masks, dtypes, lengths and traces."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from flax import nnx
from flax.nnx import bridge
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from model_cases import (
    CONFIGS,
    apply,
    as_float32,
    every_config,
    model_and_inputs,
    random_params,
    sentences,
    tiny,
    to_jax,
)

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import Transformer, abstract_params, attention_maps, count_parameters
from transformer_jax.types import UserError

# ------------------------------------------------------------------------------------------------------ the reference


@pytest.mark.parametrize("name", **every_config)
def test_model_equals_the_reference(name):
    config, model, params, src, tgt_in = model_and_inputs(name)
    logits = apply(model, params, src, tgt_in)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference.transformer(params, config, src, tgt_in), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "tensor2tensor", "everything else"])
def test_float64_stays_float64(name):
    config = dataclasses.replace(CONFIGS[name], dtype="float64", param_dtype="float64")
    params, (src, tgt_in) = random_params(CONFIGS[name]), sentences(config)
    with jax.enable_x64(True):
        model = Transformer(config)
        assert {leaf.dtype for leaf in jax.tree.leaves(abstract_params(config))} == {np.dtype("float64")}
        logits = np.asarray(apply(model, params, src, tgt_in))
    assert logits.dtype == np.float64
    np.testing.assert_allclose(logits, reference.transformer(params, config, src, tgt_in), rtol=1e-12, atol=1e-12)


def test_model_settings_change_the_logits():
    """Guard the comparison with the reference, which would prove nothing if two settings gave equal logits."""
    equal_to_paper = {"paper", "no source EOS", "other ids"}  # the first by definition, the others change the tokens
    _, model, params, src, tgt_in = model_and_inputs("paper")
    logits = apply(model, params, src, tgt_in)
    for name, other in CONFIGS.items():
        same_tree = jax.tree.map(lambda leaf: leaf.shape, abstract_params(other)) == jax.tree.map(np.shape, params)
        if name in equal_to_paper or not same_tree or other.decoder_start in ("eos", "pad"):
            continue
        difference = reference.transformer(params, other, src[:1], tgt_in[:1]) - logits[:1]
        assert np.abs(difference).max() > 1e-3, name


def test_encode_then_decode_equals_the_model():
    config, model, params, src, tgt_in = model_and_inputs("torch")
    src_mask = (src != config.pad_id)[:, None, None, :]
    memory = apply(model, params, src, method="encode")
    logits = apply(model, params, tgt_in, memory, src_mask, method="decode")
    np.testing.assert_array_equal(logits, apply(model, params, src, tgt_in))
    for row in range(3):
        expected = reference.embed(params, config, src[row], "source")
        expected = reference.encoder(params["encoder"], config, expected, src_mask[row, 0, 0])
        np.testing.assert_allclose(memory[row], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("source_eos", [True, False])
def test_source_eos_does_not_change_the_model(source_eos):
    _, model, params, src, tgt_in = model_and_inputs("paper")
    other = Transformer(dataclasses.replace(model.config, source_eos=source_eos))
    np.testing.assert_array_equal(apply(other, params, src, tgt_in), apply(model, params, src, tgt_in))


# ------------------------------------------------------------------------------------------------- dtypes, lengths


def recorded(method_name, record):
    """Return an interceptor that calls `record(module, arguments, result)` after each call of the named method."""

    def interceptor(next_function, args, kwargs, context):
        result = next_function(*args, **kwargs)
        if context.method_name == method_name:
            record(context.module, args, result)
        return result

    return nn.intercept_methods(interceptor)


def test_bfloat16_computes_logits_in_float32():
    config, _, params, src, tgt_in = model_and_inputs("paper")
    model = Transformer(dataclasses.replace(config, dtype="bfloat16"))
    dtypes: dict[str, set[str]] = {"weights": set(), "layer_norm_output": set()}
    with recorded("weights", lambda module, args, result: dtypes["weights"].add(str(result.dtype))):
        logits = apply(model, params, src, tgt_in)
    assert dtypes["weights"] == {"float32"}
    assert logits.dtype == jnp.float32
    assert apply(model, params, src, method="encode").dtype == jnp.bfloat16
    expected = reference.transformer(params, config, src, tgt_in)
    assert 1e-4 < np.abs(logits - expected).max() < 0.15  # it was computed in bfloat16, and near enough


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_param_dtype_sets_the_dtype_of_every_parameter(param_dtype):
    for name in ("torch", "everything else"):
        config = dataclasses.replace(CONFIGS[name], param_dtype=param_dtype, logits_bias=True)
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(abstract_params(config))} == {param_dtype}


@pytest.mark.parametrize("field", ["dtype", "param_dtype"])
def test_float64_needs_x64(field):
    with pytest.raises(UserError, match=rf"model\.{field}.* 'float64'.*jax_enable_x64"):
        abstract_params(tiny(**{field: "float64"}))


def test_sinusoids_allow_any_length():
    config = tiny(max_length=4)
    model, params = Transformer(config), as_float32(random_params(config))
    src = np.resize(np.arange(4, 11, dtype=np.int32), (1, 40))
    tgt_in = src[:, :33]
    expected = reference.transformer(params, config, src, tgt_in)
    np.testing.assert_allclose(apply(model, params, src, tgt_in), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("src_length", "tgt_length"), [(5, 3), (3, 5)])
def test_sequence_longer_than_the_learned_positions_is_rejected(src_length, tgt_length):
    config = tiny(positions="learned", max_length=6, position_offset=2)
    model, params = Transformer(config), as_float32(random_params(config))
    ids = np.full((1, 8), 4, np.int32)
    assert apply(model, params, ids[:, :4], ids[:, :4]).shape == (1, 4, 11)
    with pytest.raises(UserError, match=r"5 tokens .*position_offset 2.*max_length 6"):
        apply(model, params, ids[:, :src_length], ids[:, :tgt_length])


# --------------------------------------------------------------------------------------------------- what one can ask


def test_attention_maps():
    config, model, params, src, tgt_in = model_and_inputs("decoder's own sizes")
    maps = attention_maps(model, *to_jax((params, src, tgt_in)))
    assert {name: value.shape for name, value in maps.items()} == {
        "encoder/layer_0/self_attention": (4, 2, 5, 5),
        "encoder/layer_1/self_attention": (4, 2, 5, 5),
        "decoder/layer_0/self_attention": (4, 4, 4, 4),
        "decoder/layer_0/cross_attention": (4, 4, 4, 5),
    }
    may_source = np.broadcast_to((src != config.pad_id)[:, None, None, :], (4, 1, 5, 5))
    may_target = np.stack([reference.target_mask(config, row) for row in tgt_in])[:, None]
    for name, may in {
        "encoder/layer_0/self_attention": may_source,
        "encoder/layer_1/self_attention": may_source,
        "decoder/layer_0/self_attention": may_target,
        "decoder/layer_0/cross_attention": may_source[:, :, :4],
    }.items():
        np.testing.assert_array_equal(maps[name] > 0, np.broadcast_to(may, maps[name].shape))
        any_allowed = np.broadcast_to(may.any(-1), maps[name].shape[:-1])
        np.testing.assert_allclose(maps[name].sum(-1), any_allowed.astype(float), atol=1e-6)


def test_attention_maps_equal_the_reference():
    config, model, params, src, tgt_in = model_and_inputs("paper")
    weights = attention_maps(model, *to_jax((params, src, tgt_in)))["encoder/layer_0/self_attention"]
    layer, x = params["encoder"]["layer_0"]["self_attention"], reference.embed(params, config, src[1], "source")
    mask = np.stack([reference.source_mask(config, src[1])] * 5)
    for head in range(2):
        query, key = (x @ layer[name]["kernel"][:, head] for name in ("query", "key"))
        expected = reference.attention_weights(query, key, mask)
        np.testing.assert_allclose(weights[1, head], expected, rtol=1e-5, atol=1e-6)


def test_flax_nnx_wraps_the_model():
    _, model, params, src, tgt_in = model_and_inputs("paper")
    wrapped = bridge.ToNNX(model, rngs=nnx.Rngs(0)).lazy_init(*to_jax((src, tgt_in)))
    assert jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(wrapped, nnx.Param))) == jax.tree.map(np.shape, params)
    state = nnx.state(wrapped, nnx.Param)
    nnx.replace_by_pure_dict(state, to_jax(params))
    nnx.update(wrapped, state)
    np.testing.assert_array_equal(wrapped(*to_jax((src, tgt_in))), apply(model, params, src, tgt_in))


def test_model_traces_once_per_shape():
    _, model, params, _, _ = model_and_inputs("paper")
    traces = []

    @jax.jit
    def logits(params, src, tgt_in):
        traces.append((src.shape, tgt_in.shape))
        return apply(model, params, src, tgt_in)

    shapes = [((1, 2), (1, 3)), ((1, 3), (1, 2)), ((2, 2), (2, 3))]
    for seed in range(3):
        tokens = np.random.default_rng(seed).integers(0, 11, 6, dtype=np.int32)
        for src, tgt_in in shapes:
            logits(params, np.resize(tokens, src), np.resize(tokens, tgt_in))
    assert traces == shapes


# Millions of parameters of Table 3's rows, with attention biases and 40,960 rows, the vocabulary of the first release
# for this task: every one is the paper's figure (last column) when rounded.
TABLE_3 = {
    "base": ({}, 65.11, 65),
    "B, d_k 16": ({"d_k": 16}, 58.02, 58),
    "B, d_k 32": ({"d_k": 32}, 60.38, 60),
    "C, N 2": ({"num_layers": 2}, 35.68, 36),
    "C, N 4": ({"num_layers": 4}, 50.40, 50),
    "C, N 8": ({"num_layers": 8}, 79.82, 80),
    "C, d_model 256": ({"d_model": 256, "d_k": 32, "d_v": 32}, 27.85, 28),
    "C, d_model 1024": ({"d_model": 1024, "d_k": 128, "d_v": 128}, 167.94, 168),
    "C, d_ff 1024": ({"d_ff": 1024}, 52.51, 53),
    "C, d_ff 4096": ({"d_ff": 4096}, 90.30, 90),
}


@pytest.mark.parametrize("row", TABLE_3)
def test_parameter_counts_equal_table_3(row):
    changes, millions, paper = TABLE_3[row]
    count = count_parameters(ModelConfig.base(40_960, attention_bias=True, **changes))
    assert round(count / 1e6, 2) == millions
    assert round(count / 1e6) == paper


def test_row_a_has_the_parameter_count_of_base():
    """Row A of Table 3 changes the number of heads and keeps h d_k."""
    base = count_parameters(ModelConfig.base(100))
    assert count_parameters(ModelConfig.base(100, num_heads=32)) == base
    assert count_parameters(ModelConfig.base(100, num_heads=1)) == base


def test_big_has_218_million_parameters():
    assert round(count_parameters(ModelConfig.big(40_960, attention_bias=True)) / 1e6, 1) == 218.3


def test_model_has_no_state_besides_parameters():
    """The only variable collection is `params`, so the model is a pure function of its parameters."""
    config = tiny(positions="learned", tie_embeddings="none", logits_bias=True)
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    assert set(jax.eval_shape(Transformer(config).init, jax.random.key(0), tokens, tokens)) == {"params"}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_meshes_of_both_axis_types(axis_type):
    """Auto axes work. Explicit axes, the default of `jax.make_mesh`, raise an error whose suggested fix works."""
    config = tiny()
    model, params, (src, tgt_in) = Transformer(config), to_jax(random_params(config)), to_jax(sentences(config))
    expected = apply(model, params, src, tgt_in)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    rows, everywhere = (NamedSharding(mesh, spec) for spec in (PartitionSpec("data"), PartitionSpec()))
    params, src, tgt_in = jax.device_put((params, src, tgt_in), (everywhere, rows, rows))

    def call(params, src, tgt_in):
        return model.apply({"params": params}, src, tgt_in)

    if axis_type == AxisType.Explicit:
        for function in (call, jax.jit(call)):
            with pytest.raises(UserError, match=r"Explicit axes \('data',\).*AxisType.Auto,\) \* 1 to jax.make_mesh"):
                function(params, src, tgt_in)
        call = jax.sharding.auto_axes(call, out_sharding=PartitionSpec("data"))
    with jax.set_mesh(mesh):
        logits = jax.jit(call)(params, src, tgt_in)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", ["src", "tgt_in"])
def test_sequence_beyond_the_learned_positions_fails_when_traced(side):
    config = tiny(positions="learned", max_length=5, position_offset=1)
    shapes = {"src": 4, "tgt_in": 4, side: 5}
    inputs = [jax.ShapeDtypeStruct((2, length), jnp.int32) for length in shapes.values()]
    with pytest.raises(UserError, match=r"sequence of 5 tokens \(plus position_offset 1\) .* 5 rows\. Shorten"):
        jax.eval_shape(Transformer(config).init, jax.random.key(0), *inputs)
