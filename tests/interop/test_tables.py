"""Tables of names: everything that does not fit is listed, and nothing is taken silently."""

import re

import numpy as np
import pytest
from interop_cases import assert_same_trees, odd, random_params

from transformer_jax.interop.mapping import read_mapping
from transformer_jax.interop.tables import Table, flatten, from_foreign, row, to_foreign, unflatten
from transformer_jax.interop.torch_format import TABLE, params_from_torch, torch_from_params
from transformer_jax.types import UserError

CONFIG = odd()


def tensors():
    return torch_from_params(random_params(CONFIG), CONFIG)


def message(found, config=CONFIG):
    with pytest.raises(UserError) as error:
        params_from_torch(found, config, "FILE")
    assert str(error.value).startswith("FILE does not fit the model: ")
    return str(error.value)


def test_all_that_is_missing_left_over_or_of_another_shape_is_listed():
    found = tensors()
    del found["transformer.encoder.layers.1.linear1.weight"]
    del found["transformer.decoder.layers.2.norm3.bias"]
    found["surplus"] = np.zeros((2, 3), np.float32)
    found["transformer.decoder.layers.0.linear2.bias"] = np.zeros(13, np.float32)
    text = message(found)
    assert "transformer.encoder.layers.1.linear1.weight is missing" in text
    assert "transformer.decoder.layers.2.norm3.bias is missing" in text
    assert "surplus [2, 3] is left over" in text
    assert "transformer.decoder.layers.0.linear2.bias has shape [13], not [12]" in text
    assert text.count(";") == 3


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    found = tensors()
    found["src_embed.weight"][3, 4] = value
    assert "src_embed.weight holds numbers that are not finite" in message(found)


def test_a_number_too_large_for_the_dtype_is_refused():
    found = tensors()
    found["src_embed.weight"] = found["src_embed.weight"].astype(np.float64)
    found["src_embed.weight"][3, 4] = 1e300
    assert "src_embed.weight holds numbers that are not finite in float32" in message(found)


def test_two_names_for_one_tensor_are_refused():
    found = tensors()
    found["module.generator.weight"] = found["generator.weight"]
    with pytest.raises(UserError, match=r"generator.weight and module.generator.weight both stand for"):
        params_from_torch(found, CONFIG)


def test_integers_are_refused():
    found = tensors() | {"generator.weight": np.zeros((23, 12), np.int8)}
    assert "generator.weight holds int8" in message(found)


def test_tied_tables_must_agree():
    found = tensors()
    found["generator.weight"] = found["generator.weight"] + 1
    assert "generator.weight differs from the other tensors that are embedding/table here" in message(found)


def test_a_bias_that_the_model_lacks_may_be_there_only_as_zeros():
    found = tensors()
    name = "transformer.encoder.layers.0.self_attn.in_proj_bias"
    assert not found[name].any()
    params_from_torch(found, CONFIG)
    found[name] = found[name] + 1
    assert f"{name} [36] is left over" in message(found)


def test_one_layer_too_many_is_left_over():
    assert "transformer.encoder.layers.1.norm1.weight [12] is left over" in message(tensors(), odd(num_layers=1))


def test_a_format_without_a_place_for_a_parameter_says_so():
    table = Table(tuple(item for item in TABLE.rows if "logits_bias" not in item.ours))
    config = odd(logits_bias=True)
    with pytest.raises(UserError, match="the format has no place for logits_bias"):
        to_foreign(random_params(config), table, config)
    with pytest.raises(UserError, match="the format has no place for logits_bias"):
        from_foreign(tensors(), table, config, "FILE")


def test_layout_of_heads():
    """Row h * d_k + j of a foreign matrix is column j of head h here."""
    config = odd(d_k=5, d_v=2)
    params = random_params(config)
    name = "encoder/layer_1/self_attention"
    table = Table((row("a", f"{name}/query/kernel"), row("b", f"{name}/output/kernel")))
    leaves = {path: leaf for path, leaf in flatten(params).items() if path.startswith((f"{name}/q", f"{name}/o"))}
    found = to_foreign(unflatten(leaves), table, config)
    query, output = leaves[f"{name}/query/kernel"], leaves[f"{name}/output/kernel"]
    assert found["a"].shape == (3 * 5, 12)
    assert found["b"].shape == (12, 3 * 2)
    assert found["a"][2 * 5 + 4, 7] == query[7, 2, 4]
    assert found["b"][9, 2 * 2 + 1] == output[2, 1, 9]


def test_a_mapping_file_reads_a_model_of_ones_own(tmp_path):
    """Names of nobody's, a fused matrix and one tensor for the tied tables."""
    params = random_params(CONFIG)
    lines, tensors = ['ignore = [".pe"]', "[tensors]"], {"position.pe": np.zeros((3, 12), np.float32)}
    fused = "encoder/layer_{i}/self_attention/%s/kernel"
    names = [fused % name for name in ("query", "key", "value")]
    lines.append(f'"enc.{{i}}.qkv" = {names}'.replace("'", '"'))
    done = set()
    for path, leaf in flatten(params).items():
        pattern = re.sub(r"layer_\d+", "layer_{i}", path)
        if pattern in names:
            continue
        if pattern not in done:
            lines.append(f'"my.{pattern}" = "{pattern}"')
            done.add(pattern)
        number = re.search(r"layer_(\d+)", path)
        name = f"my.{pattern}".replace("{i}", number[1]) if number else f"my.{pattern}"
        axes = 2 if path.endswith("attention/output/kernel") else 1
        tensors[name] = leaf.reshape(np.prod(leaf.shape[:axes]), -1).T if path.endswith("kernel") else leaf
    for layer in range(2):
        leaves = [flatten(params)[name.replace("{i}", str(layer))].reshape(12, 12).T for name in names]
        tensors[f"enc.{layer}.qkv"] = np.concatenate(leaves)
    file = tmp_path / "mapping.toml"
    file.write_text("\n".join(lines))
    table = read_mapping(file, CONFIG)
    assert_same_trees(from_foreign(tensors, table, CONFIG, "FILE"), params)

    file.write_text('[tensors]\n"a.{i}" = "encoder/layer_{i}/self_atention/query/kernel"\n')
    with pytest.raises(UserError, match=r"'a.\{i\}': the model has no .*near it are encoder/layer_\{i\}/self"):
        read_mapping(file, CONFIG)
    path = "encoder/layer_{i}/self_attention/query"
    for text, message in (
        (f'"a" = "{path}/kernel"', "must be in both, or in neither"),
        (f'"a{{i}}" = ["{path}/kernel", "{path}/bias"]', "must be of one kind"),
        ('"a" = []', "a path or a list of paths is needed"),
        ('"a" = [5]', "a path or a list of paths is needed"),
    ):
        file.write_text(f"[tensors]\n{text}\n")
        with pytest.raises(UserError, match=message):
            read_mapping(file, odd(attention_bias=True))
    file.write_text('ignore = [""]\n[tensors]\n')
    with pytest.raises(UserError, match=r"a mapping has a table \[tensors\]"):
        read_mapping(file, CONFIG)
    file.write_text("[tensor]\n")
    with pytest.raises(UserError, match=r"a mapping has a table \[tensors\]"):
        read_mapping(file, CONFIG)
    file.write_text("[tensors\n")
    with pytest.raises(UserError, match="cannot be read as TOML"):
        read_mapping(file, CONFIG)
