"""Tables of names: every mismatch is listed, and no tensor is ignored silently."""

import dataclasses
import logging
import re
import tomllib

import numpy as np
import pytest
from interop_cases import assert_same_trees, odd, random_params

from transformer_jax.config import Config
from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.convert import import_run
from transformer_jax.interop.exchange import propose_config
from transformer_jax.interop.mapping import check_mapping, names, read_mapping
from transformer_jax.interop.tables import Format, Row, flatten, from_foreign, to_foreign, unflatten
from transformer_jax.interop.tensor_files import write_safetensors
from transformer_jax.interop.torch_format import TORCH
from transformer_jax.model.positional import sinusoids
from transformer_jax.types import SPECIAL_TOKENS, UserError

CONFIG = odd()


def tensors():
    return to_foreign(random_params(CONFIG), TORCH, CONFIG)


def message(found, config=CONFIG):
    with pytest.raises(UserError) as error:
        from_foreign(found, TORCH, config, "FILE")
    assert str(error.value).startswith("FILE does not fit the model: ")
    return str(error.value)


def test_missing_unused_and_misshaped_tensors_are_all_listed():
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


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda table: np.where(table == table[3, 4], np.nan, table), "holds numbers that are not finite"),
        (lambda table: np.where(table == table[3, 4], np.inf, table), "holds numbers that are not finite"),
        (lambda table: table * np.float64(1e300), "holds numbers that are not finite in float32"),
        (lambda table: table.astype(np.int8), "holds int8"),
        (lambda table: table + 1, "differs from the other tensors that are embedding/table"),
    ],
)
def test_unusable_tensor_is_rejected(change, problem):
    found = tensors()
    found["generator.weight"] = change(found["generator.weight"])
    assert f"generator.weight {problem}" in message(found)


def test_two_names_for_one_tensor_are_rejected():
    found = tensors()
    found["module.generator.weight"] = found["generator.weight"]
    with pytest.raises(UserError, match=r"generator.weight and module.generator.weight both mean"):
        from_foreign(found, TORCH, CONFIG)


def test_extra_bias_is_accepted_only_if_zero():
    found = tensors()
    name = "transformer.encoder.layers.0.self_attn.in_proj_bias"
    assert not found[name].any()
    from_foreign(found, TORCH, CONFIG)
    found[name] = found[name] + 1
    assert f"{name} [36] is left over" in message(found)


def test_extra_layer_is_reported():
    assert "transformer.encoder.layers.1.norm1.weight [12] is left over" in message(tensors(), odd(num_layers=1))


def test_format_without_a_tensor_for_a_parameter_is_an_error():
    table = Format("torch", tuple(item for item in TORCH.rows if "logits_bias" not in item.ours))
    config = odd(logits_bias=True)
    with pytest.raises(UserError, match="the format has no tensor for logits_bias"):
        to_foreign(random_params(config), table, config)
    with pytest.raises(UserError, match="the format has no tensor for logits_bias"):
        from_foreign(tensors(), table, config, "FILE")


def test_layout_of_heads():
    """Row h * d_k + j of a foreign matrix is column j of head h in this package."""
    config = odd(d_k=5, d_v=2)
    params = random_params(config)
    name = "encoder/layer_1/self_attention"
    table = Format("test", (Row(("a",), (f"{name}/query/kernel",)), Row(("b",), (f"{name}/output/kernel",))))
    leaves = {path: leaf for path, leaf in flatten(params).items() if path.startswith((f"{name}/q", f"{name}/o"))}
    found = to_foreign(unflatten(leaves), table, config)
    query, output = leaves[f"{name}/query/kernel"], leaves[f"{name}/output/kernel"]
    assert found["a"].shape == (3 * 5, 12)
    assert found["b"].shape == (12, 3 * 2)
    assert found["a"][2 * 5 + 4, 7] == query[7, 2, 4]
    assert found["b"][9, 2 * 2 + 1] == output[2, 1, 9]


SHORT_MAPPING = """
ignore = [".pe"]

[tensors]
"embedding" = "embedding"
"{enc,dec}.l_{i}.attn.qkv" = "{encoder,decoder}/layer_{i}/self_attention/{query,key,value}"
"dec.l_{i}.cross.qkv.weight" = "decoder/layer_{i}/cross_attention/{query,key,value}/kernel"
"{enc,dec}.l_{i}.attn.out" = "{encoder,decoder}/layer_{i}/self_attention/output"
"dec.l_{i}.cross.out" = "decoder/layer_{i}/cross_attention/output"
"{enc,dec}.l_{i}.ff.{up,down}" = "{encoder,decoder}/layer_{i}/feed_forward/{inner,outer}"
"{enc,dec}.l_{i}.self_attention_norm" = "{encoder,decoder}/layer_{i}/self_attention_norm"
"{enc,dec}.l_{i}.feed_forward_norm" = "{encoder,decoder}/layer_{i}/feed_forward_norm"
"dec.l_{i}.cross_attention_norm" = "decoder/layer_{i}/cross_attention_norm"
"""


def mapping_table(folder, text=SHORT_MAPPING):
    """Write and read a mapping file."""
    (folder / "mapping.toml").write_text(text)
    return read_mapping(folder / "mapping.toml")


def shortened(params):
    """Return a state dict under the names of `SHORT_MAPPING`, without the biases that the model lacks."""
    tensors = to_foreign(params, Format("mapping", names(tomllib.loads(SHORT_MAPPING)["tensors"])), CONFIG)
    return {name: tensor for name, tensor in tensors.items() if tensor.any()} | {"position.pe": sinusoids(3, 12)}


def test_mapping_file_reads_modules_and_alternatives(tmp_path):
    params, table = random_params(CONFIG), mapping_table(tmp_path)
    check_mapping(table, CONFIG, tmp_path / "mapping.toml")
    tensors, leaves = shortened(params), flatten(params)
    assert_same_trees(from_foreign(tensors, table, CONFIG, "FILE"), params)

    def matrix(path, width=12):
        return leaves[path].reshape(width, -1).T

    for foreign, ours in (
        ("enc.l_1.attn.qkv.weight", "encoder/layer_1/self_attention"),
        ("dec.l_2.cross.qkv.weight", "decoder/layer_2/cross_attention"),
    ):
        parts = [matrix(f"{ours}/{name}/kernel") for name in ("query", "key", "value")]
        np.testing.assert_array_equal(tensors[foreign], np.concatenate(parts))
    for foreign, expected in (
        ("enc.l_0.ff.up.bias", leaves["encoder/layer_0/feed_forward/inner/bias"]),
        ("dec.l_0.ff.down.weight", matrix("decoder/layer_0/feed_forward/outer/kernel", 28)),
        ("dec.l_1.attn.out.weight", matrix("decoder/layer_1/self_attention/output/kernel")),
    ):
        np.testing.assert_array_equal(tensors[foreign], expected)


QUERY = "encoder/layer_{i}/self_attention/query"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f'[tensors]\n"a.{{i}}" = "{QUERY.replace("tt", "t")}/kernel"',
            r"'a.\{i\}': the model has no .*Similar: enc",
        ),
        (f'[tensors]\n"a" = "{QUERY}/kernel"', "must be on both sides, or on neither"),
        (f'[tensors]\n"a{{i}}" = ["{QUERY}/kernel", "{QUERY}/bias"]', "must be of one kind"),
        ('[tensors]\n"{a,b}" = "{c,d,e}"', "the same number of alternatives"),
        ('[tensors]\n"{a,b}" = "embedding"', "the same number of alternatives"),
        ('[tensors]\n"a" = []', "a path or a list of paths is needed"),
        ('[tensors]\n"a" = [5]', "a path or a list of paths is needed"),
        ('ignore = [""]\n[tensors]', r"a mapping has a table \[tensors\]"),
        ("[tensor]", r"a mapping has a table \[tensors\]"),
        ("[tensors", "cannot be read as TOML"),
    ],
)
def test_wrong_mapping_file_is_rejected(text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        check_mapping(mapping_table(tmp_path, text), odd(attention_bias=True), tmp_path / "mapping.toml")


STATED = {
    "num_heads": 3, "decoder_num_heads": 2, "source_bos": False, "norm_position": "post", "activation": "relu",
    "scale_embeddings": True, "positions": "interleaved", "norm_variant": "standard",
}  # fmt: skip
LONG_MAPPING = SHORT_MAPPING.replace('"embedding" = "embedding"\n', "")
UNTIED = """
"source" = "source_embedding"
"target" = "target_embedding"
"generator" = "output_projection"
"""


def words():
    tokenizer = WordTokenizer("word", [*SPECIAL_TOKENS, *(f"w{i}" for i in range(CONFIG.vocab_size - 4))])
    return TokenizerPair(tokenizer, tokenizer)


def mapped_folder(folder, tensors, mapping=SHORT_MAPPING):
    """Write a folder of tensors, a tokenizer and a mapping. Return the arguments of `import_run` for it."""
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    words().save(folder / "tokenizer")
    (folder / "mapping.toml").write_text(mapping)
    return (folder, "torch", folder.parent / "run"), {"mapping": folder / "mapping.toml"}


def test_mapping_without_a_configuration_takes_the_epsilon_of_torch(optional_package, tmp_path):
    optional_package("safetensors")
    params = random_params(CONFIG)
    args, options = mapped_folder(tmp_path / "mine", shortened(params))
    for epsilon, stated in ((1e-5, {}), (1e-3, {"norm_epsilon": 1e-3})):
        run = import_run(*args, **options, **STATED, **stated, overwrite=True)
        assert run.load_config().model == dataclasses.replace(CONFIG, norm_epsilon=epsilon, max_length=1024)


def test_mapping_requires_the_variant_of_its_norms(tmp_path):
    table = mapping_table(tmp_path)
    tensors = {re.sub(r"norm\.weight$", "norm.a_2", n): t for n, t in shortened(random_params(CONFIG)).items()}
    stated = {name: value for name, value in STATED.items() if name != "norm_variant"}
    with pytest.raises(UserError, match=r"but not norm_variant\. Pass --norm-variant \(.*unbiased_std"):
        propose_config(tensors, table, words(), stated, "FILE")
    stated["norm_variant"] = "unbiased_std"
    config = propose_config(tensors, table, words(), stated, "FILE")
    assert config.model.norm_variant == "unbiased_std"


@pytest.mark.parametrize("tied", ["all", "target", "none"])
def test_mapping_decides_which_tables_are_tied(tied, tmp_path):
    """Tensors with equal values, such as tied weights stored twice, are not tied unless the mapping ties them."""
    model = odd(tie_embeddings=tied)
    tensors = shortened(random_params(CONFIG))
    equal = tensors.pop("embedding.weight")
    names = {"all": ["embedding"], "target": ["source", "target"], "none": ["source", "target", "generator"]}[tied]
    tensors |= {f"{name}.weight": equal for name in names}
    rows = [line for line in UNTIED.split("\n") if line and line.split('"')[1] in names]
    table = mapping_table(tmp_path, SHORT_MAPPING if tied == "all" else LONG_MAPPING + "\n".join(rows))
    config = propose_config(tensors, table, words(), STATED, "FILE")
    assert config.model.tie_embeddings == tied
    check_mapping(table, config.model, tmp_path / "mapping.toml")
    flat = flatten(from_foreign(tensors, table, config.model, "FILE"))
    assert set(flat) == set(flatten(random_params(model)))


def test_mapped_biases_of_zeros_are_parameters(tmp_path):
    model = odd(attention_bias=True)
    leaves = flatten(random_params(model))
    leaves |= {path: leaf * 0 for path, leaf in leaves.items() if re.search(r"attention/\w+/bias$", path)}
    explicit = '"dec.l_{i}.cross.qkv.bias" = "decoder/layer_{i}/cross_attention/{query,key,value}/bias"\n'
    table = mapping_table(tmp_path, SHORT_MAPPING + explicit)
    tensors = to_foreign(unflatten(leaves), table, model)
    config = propose_config(tensors, table, words(), STATED, "FILE")
    assert config.model.attention_bias
    check_mapping(table, config.model, tmp_path / "mapping.toml")
    assert_same_trees(from_foreign(tensors, table, config.model, "FILE"), unflatten(leaves))


def test_configuration_of_another_program_next_to_a_state_dict_is_ignored(optional_package, tmp_path, caplog):
    optional_package("safetensors")
    args, options = mapped_folder(tmp_path / "mine", shortened(random_params(CONFIG)))
    sibling = tmp_path / "mine" / "config.json"
    for foreign in ('{"model_type": "mine", "hidden_size": 12}', '{"model": {}, "optimizer": {}}'):
        sibling.write_text(foreign)
        run = import_run(*args, **options, **STATED, overwrite=True)
        assert run.load_config().model.norm_epsilon == 1e-5
        assert f"{sibling} is not a configuration of this package and is ignored" in caplog.text
        caplog.clear()
    sibling.write_text(dataclasses.replace(Config(), model=CONFIG).to_json())
    assert import_run(*args, **options, overwrite=True).load_config().model == CONFIG
    assert "is ignored" not in caplog.text
    unknown_field = '{"model": {"no_such_field": 1}}'
    for text, message in ((unknown_field, r"model\.no_such_field"), ("{", "not JSON"), ("[]", "not a JSON object")):
        sibling.write_text(text)
        with pytest.raises(UserError, match=rf"config\.json.*{message}"):
            import_run(*args, **options, overwrite=True)


def test_fields_that_tensors_do_not_show_are_logged(tmp_path, caplog):
    tensors = shortened(random_params(CONFIG))
    del tensors["position.pe"]
    with caplog.at_level(logging.INFO, "transformer_jax"):
        propose_config(tensors, mapping_table(tmp_path), words(), {**STATED, "decoder_start": "eos"}, "FILE")
    for text in ("position_exponent='paper'", "position_offset=0", "decoder_start='eos'", "source_eos=True"):
        assert text in caplog.text
    assert "norm_variant='standard'" in caplog.text
