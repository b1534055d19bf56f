"""CTranslate2 folders that are damaged, unsupported, or written by older versions."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ctranslate2_cases import only_min_length, run, sentences, translated
from interop_cases import change_json, odd, random_params

from transformer_jax.decoding.translator import Translator
from transformer_jax.interop.ctranslate2_files import read_model_file, write_model_file
from transformer_jax.interop.ctranslate2_format import read_ctranslate2, write_ctranslate2
from transformer_jax.interop.exchange import identify_positions
from transformer_jax.model.positional import sinusoids
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import UserError


@pytest.fixture
def folder(tmp_path):
    return exported(tmp_path, "paper")


def exported(path, name):
    config, params, pair = run(name)
    write_ctranslate2(path, config, params, pair, warn=only_min_length)
    return path


def change(folder, function):
    """Change the variables of a `model.bin`."""
    variables = {name: np.array(value) for name, value in read_model_file(folder / "model.bin").items()}
    function(variables)
    write_model_file(folder / "model.bin", variables, {})


def test_every_truncation_is_rejected(folder):
    content = (folder / "model.bin").read_bytes()
    for length in [*range(60), *range(60, len(content), len(content) // 60)]:
        (folder / "model.bin").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"model\.bin: not a readable CTranslate2 model"):
            read_ctranslate2(folder)
    (folder / "model.bin").write_bytes(content + b"\0")
    with pytest.raises(UserError, match=r"1 bytes are left over"):
        read_ctranslate2(folder)


def header(version=6, spec=b"TransformerSpec", revision=7, variables=1):
    name = struct.pack("<H", len(spec) + 1) + spec + b"\0"
    return struct.pack("<I", version) + name + struct.pack("<II", revision, variables)


def variable(name=b"a", shape=(1,), kind=0, size=4, data=b"\0" * 4):
    dimensions = struct.pack(f"<B{len(shape)}I", len(shape), *shape)
    return struct.pack("<H", len(name) + 1) + name + b"\0" + dimensions + struct.pack("<BI", kind, size) + data


def content(data):
    return lambda folder: (folder / "model.bin").write_bytes(data)


def with_variable(name, value):
    return lambda folder: change(
        folder, lambda variables: variables.pop(name) if value is None else variables.update({name: value})
    )


def with_setting(name, value):
    return lambda folder: change_json(folder / "config.json", **{name: value})


def with_vocabularies(**files):
    """Replace the shared vocabulary by other files. Ellipsis means the shared vocabulary's words from id 4 on."""

    def write(folder):
        path = folder / "shared_vocabulary.json"
        words = json.loads(path.read_text())[4:]
        path.unlink()
        for name, value in files.items():
            if isinstance(value, list) and ... in value:
                value = [*value[: value.index(...)], *words, *value[value.index(...) + 1 :]]
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / f"{name}_vocabulary.json").write_text(text)

    return write


SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
REFUSALS = [
    (content(b""), "it ends within the binary version"),
    (content(b"PK\3\4 something else"), "its binary version is 67324752; versions 2 to 6 are supported"),
    (content(header(version=7)), "its binary version is 7"),
    (content(header(version=1)), "its binary version is 1"),
    (content(header(spec=b"WhisperSpec")), "it is a 'WhisperSpec'; only TransformerSpec"),
    (content(header(spec=b"\xff")), "the name of the model is not UTF-8"),
    (content(header(revision=8)), "TransformerSpec has revision 8; 1 to 7 are supported"),
    (content(header(variables=2**32 - 1)), "the number of variables is 4294967295, more than the file has bytes"),
    (content(header() + variable(shape=(2**32 - 1,) * 8)), r"a has shape \[.*bytes, but its size is 4"),
    (content(header() + variable(shape=(1,) * 200)), "a has 200 dimensions; at most 8 are supported"),
    (
        content(header() + variable(shape=(2**20, 2**10), size=2**32 - 1)),
        "296 bytes, but its size is 4294967295",
    ),
    (content(header() + variable(shape=(2**20,), size=2**22)), "it ends within a: 4194304 bytes are needed"),
    (content(header() + variable(kind=9)), "a has the unknown type 9"),
    (content(header(variables=2) + 2 * variable()), "it has a twice"),
    (content(header() + variable() + struct.pack("<I", 1) + b"\2\0b\0\2\0c\0"), "b of c refers to no variable"),
    *[
        (
            content(header() + variable(kind=kind, size=size, data=b"\0" * size)),
            f"a holds {name} weights.*--quantization",
        )
        for kind, size, name in ((1, 1, "int8"), (2, 2, "int16"), (4, 2, "float16"), (5, 2, "bfloat16"))
    ],
    (with_variable("encoder/activation", np.int8(1)), "encoder/activation is 1; supported: {0: 'relu'"),
    (with_variable("encoder/activation", np.int8(2)), "'swish' in the encoder and 'relu' in the decoder"),
    (with_variable("decoder/pre_norm", np.int8(1)), "norm_position is 'post' in the encoder and 'pre' in the decoder"),
    (with_variable("decoder/scale_embeddings", np.int8(0)), "is True in the encoder and False in the decoder"),
    (with_variable("decoder/scale_embeddings", np.float32(2)), r"scale_embeddings is 2\.0; only 1 and sqrt"),
    (with_variable("decoder/scale_outputs", np.float32(0.5)), r"not supported: decoder/scale_outputs 0\.5"),
    (with_variable("decoder/alibi", np.int8(1)), "not supported: decoder/alibi 1"),
    (with_variable("decoder/layer_0/self_attention/queries_scale", np.float32(1)), "not supported: .*queries_scale"),
    (with_variable("encoder/layer_norm/gamma", np.ones(12, np.float32)), "encoder/layer_norm/beta is missing"),
    (with_variable("encoder/layer_0/ffn/linear_0/weight", None), "encoder/layer_0/ffn/linear_0/weight is missing"),
    (with_variable("decoder/embeddings/weight", None), "decoder/embeddings/weight is missing"),
    (with_setting("multi_query_attention", True), "multi_query_attention is True"),
    (with_setting("quantization_type", 1), "quantization_type is 1"),
    (with_setting("decoder_start_token", None), "decoder_start_token is null"),
    (with_setting("decoder_start_token", "<other>"), "decoder_start_token is '<other>', which is not in the target"),
    (with_setting("eos_token", "<other>"), "eos_token is '<other>', which is not in the target vocabulary"),
    (with_setting("layer_norm_epsilon", "small"), "layer_norm_epsilon is 'small'"),
    (
        lambda folder: change_json(folder / "config.json", add_source_bos=True, bos_token="w3"),
        "add_source_bos puts 'w3' into the source, but its id in the source vocabulary is 7 and model.bos_id is 1",
    ),
    (with_vocabularies(shared="{"), r"shared_vocabulary\.json: not a vocabulary"),
    (with_vocabularies(shared="{}"), "not a vocabulary: a list of tokens is needed"),
    (with_vocabularies(shared=[*SPECIAL, 3]), "not a vocabulary"),
    (with_vocabularies(shared=[*SPECIAL, "a", "a"]), "has the token 'a' twice"),
    (with_vocabularies(shared=[*SPECIAL, ..., "more"]), "has 23 tokens, but the source table has 22 rows"),
    (with_vocabularies(), r"neither shared_vocabulary\.json nor source_vocabulary\.json"),
    (
        lambda folder: (folder / "shared_vocabulary.json").rename(folder / "source_vocabulary_1.json"),
        "more than one vocabulary",
    ),
    (
        with_vocabularies(source=["</s>", "<unk>", "<s>", "<pad>", ...], target=[*SPECIAL, ...]),
        r"id \d is '.*' in the source and '.*' in the target",
    ),
    (
        with_vocabularies(source=["<pad>", "<s>", ...], target=[*SPECIAL, ...]),
        "id 2 is 'w0' in the source and '</s>' in the target",
    ),
]


@pytest.mark.parametrize(("mutate", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_unreadable_folder_is_rejected(folder, mutate, message):
    mutate(folder)
    with pytest.raises(UserError, match=message):
        read_ctranslate2(folder)


def test_files_of_old_binary_versions_are_read(tmp_path):
    """Before version 4 a variable stores the size of an item and the number of items."""
    old = header(version=3) + variable(kind=4, size=1, data=struct.pack("<f", 2.5)) + struct.pack("<I", 0)
    (tmp_path / "model.bin").write_bytes(old)
    np.testing.assert_array_equal(read_model_file(tmp_path / "model.bin")["a"], [2.5])
    (tmp_path / "model.bin").write_bytes(header(version=3) + variable(kind=1, size=1, data=b"\0"))
    with pytest.raises(UserError, match="a holds int8 weights"):
        read_model_file(tmp_path / "model.bin")


def test_all_wrong_weights_are_listed(folder):
    def damage(variables):
        variables["encoder/layer_0/ffn/linear_0/weight"][1, 2] = np.nan
        variables["decoder/layer_1/ffn/linear_1/bias"] = np.zeros(5, np.float32)
        variables["decoder/layer_0/attention/linear_1/weight"] = np.zeros((24, 5), np.float32)
        variables["decoder/layer_0/self_attention/relative_position_keys"] = np.zeros((3, 4), np.float32)
        del variables["decoder/layer_0/attention/layer_norm/beta"]

    change(folder, damage)
    with pytest.raises(UserError, match="does not fit the model") as error:
        read_ctranslate2(folder)
    for problem in (
        "encoder/layer_0/ffn/linear_0/weight holds numbers that are not finite",
        "decoder/layer_1/ffn/linear_1/bias has shape [5], not [12]",
        "decoder/layer_0/attention/linear_1/weight has shape [24, 5], not [24, 12]",
        "decoder/layer_0/self_attention/relative_position_keys [3, 4] is left over",
        "decoder/layer_0/attention/layer_norm/beta is missing",
    ):
        assert problem in str(error.value)


def test_number_of_heads_may_be_missing(folder):
    with pytest.raises(UserError, match="the encoder has 3 attention heads, but num_heads is 4"):
        read_ctranslate2(folder, num_heads=4)
    change(folder, lambda variables: [variables.pop(f"{stack}/num_heads") for stack in ("encoder", "decoder")])
    with pytest.raises(UserError, match=r"does not store the number of attention heads. State it with --num-heads"):
        read_ctranslate2(folder)
    assert read_ctranslate2(folder, num_heads=6).config.model.decoder.num_heads == 6
    change(folder, lambda variables: variables.update({"num_heads": np.int8(4)}))
    assert read_ctranslate2(folder).config.model.num_heads == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_variant": "unbiased_std"}, "model.norm_variant='unbiased_std', ctranslate2 has only 'standard'"),
        ({"d_k": 5}, r"d_k=5.*\(fields d_k"),
        ({"decoder_d_v": 5}, r"d_v=5.*decoder_d_v\)"),
        ({"decoder_start": "pad", "pad_id": 22}, "model.decoder_start='pad', but .* no token with the id 22"),
        ({"source_bos": True, "bos_id": 22}, "the id 22 is not one token of both vocabularies"),
    ],
)
def test_inexpressible_model_is_rejected(tmp_path, changes, message):
    config, _, pair = run("paper")
    decoder_start = {"decoder_start": "eos"} if "source_bos" in changes else {}
    config = dataclasses.replace(config, model=odd(**decoder_start, **changes))
    with pytest.raises(UserError, match=message):
        write_ctranslate2(tmp_path, config, random_params(config.model), pair, warn=only_min_length)
    assert not list(tmp_path.iterdir())


def test_model_without_padding_is_imported(optional_package, tmp_path):
    """The imported model gets an additional row for PAD, which changes no output."""
    ctranslate2 = optional_package("ctranslate2")
    config, params, pair = run("paper")
    write_ctranslate2(tmp_path, config, params, pair, warn=only_min_length)
    words = json.loads((tmp_path / "shared_vocabulary.json").read_text())
    (tmp_path / "shared_vocabulary.json").write_text(json.dumps(["w99", *words[1:]]))
    for file in (tmp_path / "tokenizer").iterdir():
        file.unlink()
    (tmp_path / "tokenizer").rmdir()
    imported = read_ctranslate2(tmp_path)
    model = imported.config.model
    assert (model.pad_id, model.vocab_size, model.logits_bias) == (22, 23, True)
    assert imported.tokenizers.source.encode(["w99 w0 nothing"]) == [[0, 4, 3]]
    translator = ctranslate2.Translator(str(tmp_path), device="cpu", inter_threads=1, intra_threads=1)
    config = imported.config.with_changes(decoding={"beam_size": 1, "max_length_offset": 5})
    ours = Translator(config, imported.params, imported.tokenizers)
    lines = sentences()
    for line, (found,) in zip(lines, ours.translate_n_best(lines, 1), strict=True):
        words = found.text.split()
        expected = translator.score_batch([line.split()], [words])[0].log_probs[: found.num_tokens]
        assert abs(found.log_prob - sum(expected)) < 1e-4
    (tmp_path / "other").mkdir()
    write_ctranslate2(tmp_path / "other", imported.config, imported.params, imported.tokenizers, warn=pytest.fail)
    again = read_ctranslate2(tmp_path / "other")
    assert again.config.model.pad_id == 22


def logits(imported):
    model = imported.config.model
    tokens = jnp.asarray(np.random.default_rng(0).integers(4, 20, (2, 9)))
    params = jax.tree.map(jnp.asarray, imported.params)
    return np.asarray(Transformer(model).apply({"params": params}, tokens, tokens))


def test_files_of_older_converters_are_equivalent(folder):
    """Older converters use other names and files, and a factor in place of a flag."""
    expected = logits(read_ctranslate2(folder))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "shared_vocabulary.txt").write_text(
        "\n".join(json.loads((folder / "shared_vocabulary.json").read_text()))
    )
    (folder / "shared_vocabulary.json").unlink()

    def rename(variables):
        variables["encoder/embeddings/weight"] = variables.pop("encoder/embeddings_0/weight")
        for stack in ("encoder", "decoder"):
            variables[f"{stack}/scale_embeddings"] = np.float32(np.sqrt(np.float32(12)))
        variables["with_source_eos"] = np.int8(1)

    change(folder, rename)
    (folder / "config.json").write_text(json.dumps({"layer_norm_epsilon": settings["layer_norm_epsilon"]}))
    imported = read_ctranslate2(folder)
    assert imported.config.model.source_eos
    assert imported.config.model.tie_embeddings == "all"
    np.testing.assert_array_equal(logits(imported), expected)


def test_missing_positions_equal_those_that_ctranslate2_computes(optional_package, folder):
    change(
        folder, lambda variables: [variables.pop(f"{s}/position_encodings/encodings") for s in ("encoder", "decoder")]
    )
    model = read_ctranslate2(folder).config.model
    assert (model.positions, model.position_exponent, model.position_offset) == ("halves", "tensor2tensor", 1)
    imported = read_ctranslate2(folder)
    config = dataclasses.replace(imported.config, decoding=run("paper")[0].decoding)
    config = config.with_changes(decoding={"forbidden_ids": (0,)})
    found = Translator(config, imported.params, imported.tokenizers).translate_n_best(sentences(), 1)
    expected = translated(optional_package("ctranslate2"), folder, sentences(), config)
    for (ours,), ((_, log_prob), *_) in zip(found, expected, strict=True):
        assert abs(ours.log_prob - log_prob) < 1e-4


def test_a_single_stored_position_table_makes_both_tables_learned(folder):
    stored = read_model_file(folder / "model.bin")["decoder/position_encodings/encodings"]
    change(folder, lambda variables: variables.pop("encoder/position_encodings/encodings"))
    imported = read_ctranslate2(folder)
    assert imported.config.model.positions == "learned"
    np.testing.assert_array_equal(imported.params["target_positions"]["table"], stored)
    expected = sinusoids(50, 12, "halves", "tensor2tensor", 1)
    np.testing.assert_allclose(imported.params["source_positions"]["table"], expected, rtol=0, atol=1e-6)


def test_position_tables_are_identified():
    for layout in ("interleaved", "halves"):
        for exponent in ("paper", "tensor2tensor"):
            for offset in range(4):
                table = sinusoids(300, 12, layout, exponent, offset).astype(np.float32)
                assert identify_positions(table) == (layout, exponent, offset)
    assert identify_positions(table + np.float32(1e-3)) is None
    table[299, 3] += 1e-3
    assert identify_positions(table) is None
    # Angles in float32, as other programs compute them.
    angles = np.arange(2000, dtype=np.float32)[:, None] / np.float32(10000.0) ** (np.arange(6, dtype=np.float32) / 6)
    table = np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(2000, 12)
    assert identify_positions(table) == ("interleaved", "paper", 0)
    assert identify_positions(np.zeros((9, 5), np.float32)) is None
