"""ModelConfig: resolved defaults, validation errors, and JSON."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import CONFIGS

from transformer_jax.config import Config, DecodingConfig, ModelConfig, Sampling, StackSize, TrainingConfig
from transformer_jax.types import UserError

# Rejected changes, and what the message contains: every field involved, with its value.
REJECTED = [
    *(({name: 0}, [f"model.{name} is 0", "at least 1"]) for name in ("vocab_size", "d_model", "num_layers")),
    *(({name: -1}, [f"model.{name} is -1", "at least 1"]) for name in ("num_heads", "d_ff", "max_length")),
    *(
        ({name: 0}, [f"model.{name} is 0", "at least 1"])
        for name in (
            "source_vocab_size",
            "d_k",
            "d_v",
            "decoder_num_layers",
            "decoder_num_heads",
            "decoder_d_ff",
            "decoder_d_k",
            "decoder_d_v",
        )
    ),
    *(
        ({name: value}, [f"model.{name} is {value}", "at least 0 and below 1"])
        for name in ("residual_dropout", "attention_dropout", "activation_dropout")
        for value in (-0.1, 1.0, float("nan"))
    ),
    ({"norm_epsilon": -1e-6}, ["model.norm_epsilon is -1e-06", "at least 0"]),
    ({"position_offset": -1}, ["model.position_offset is -1", "at least 0"]),
    ({"num_heads": 7}, ["model.d_model=512", "model.num_heads=7", "--model.d-k"]),
    ({"num_heads": 7, "d_k": 64}, ["model.d_model=512", "model.num_heads=7", "--model.d-v"]),
    ({"decoder_num_heads": 7}, ["model.d_model=512", "model.decoder_num_heads=7", "--model.decoder-d-k"]),
    ({"d_model": 9, "num_heads": 3}, ["model.d_model=9", "model.positions='interleaved'", "even"]),
    (
        {"d_model": 2, "num_heads": 1, "position_exponent": "tensor2tensor"},
        ["model.d_model=2", "model.position_exponent='tensor2tensor'", "at least 4"],
    ),
    (
        {"positions": "learned", "max_length": 4, "position_offset": 4},
        ["model.position_offset=4", "model.max_length=4"],
    ),
    (
        {"source_vocab_size": 36_999},
        ["model.source_vocab_size=36999", "model.vocab_size=37000", "'all'", "target or none"],
    ),
    (
        {"d_model": 1, "num_heads": 1, "positions": "learned", "norm_variant": "unbiased_std"},
        ["model.norm_variant='unbiased_std'", "model.d_model=1", "at least 2"],
    ),
    *(({name: 37_000}, [f"model.{name}=37000", "below 37000"]) for name in ("pad_id", "bos_id", "eos_id", "unk_id")),
    ({"unk_id": -1}, ["model.unk_id is -1", "at least 0"]),
    (
        {"source_vocab_size": 10, "tie_embeddings": "target", "eos_id": 10},
        ["model.eos_id=10", "below 10"],
    ),
    ({"pad_id": 2}, ["model.pad_id=2", "model.eos_id=2", "differ"]),
    ({"source_bos": True, "pad_id": 1}, ["model.source_bos=True", "model.bos_id=1"]),
]


@pytest.mark.parametrize(("changes", "words"), REJECTED, ids=[str(changes) for changes, _ in REJECTED])
def test_invalid_model_configs_are_rejected(changes, words):
    with pytest.raises(UserError) as error:
        ModelConfig(**changes)
    message = str(error.value)
    assert all(word in message for word in words), message
    with pytest.raises(UserError):
        dataclasses.replace(ModelConfig(), **changes)


# Accepted changes at the boundary of validity.
ACCEPTED = [
    {"residual_dropout": 0.0, "norm_epsilon": 0.0},
    {"num_heads": 7, "d_k": 64, "d_v": 64},
    {"decoder_num_heads": 7, "decoder_d_k": 64, "decoder_d_v": 64},
    {"decoder_num_heads": 7, "d_k": 64, "d_v": 64},
    {"d_model": 9, "num_heads": 3, "positions": "learned"},
    {"d_model": 4, "num_heads": 1, "position_exponent": "tensor2tensor"},
    {"d_model": 2, "num_heads": 1, "norm_variant": "unbiased_std"},
    {"positions": "learned", "max_length": 4, "position_offset": 3},
    {"source_vocab_size": 37_000},
    {"source_vocab_size": 10, "tie_embeddings": "target"},
    {"source_vocab_size": 10, "tie_embeddings": "none"},
    {"pad_id": 36_999, "bos_id": 2},
]


@pytest.mark.parametrize("changes", ACCEPTED, ids=str)
def test_boundary_model_configs_are_accepted(changes):
    assert ModelConfig(**changes) == dataclasses.replace(ModelConfig(), **changes)


def test_defaults_are_the_base_model():
    assert ModelConfig() == ModelConfig.base(37_000)
    assert ModelConfig().encoder == ModelConfig().decoder == StackSize(6, 8, 2048, 64, 64)
    assert ModelConfig().residual_dropout == 0.1


def test_big_has_the_papers_sizes():
    config = ModelConfig.big(32_000)
    assert config.encoder == config.decoder == StackSize(6, 16, 4096, 64, 64)
    assert (config.vocab_size, config.d_model, config.residual_dropout) == (32_000, 1024, 0.3)
    assert ModelConfig.big(100, residual_dropout=0.1, num_heads=8).encoder.d_k == 128


@pytest.mark.parametrize(
    ("changes", "encoder", "decoder"),
    [
        ({"d_k": 16}, (6, 8, 2048, 16, 64), (6, 8, 2048, 16, 64)),
        ({"d_v": 16}, (6, 8, 2048, 64, 16), (6, 8, 2048, 64, 16)),
        ({"decoder_num_heads": 4}, (6, 8, 2048, 64, 64), (6, 4, 2048, 128, 128)),
        ({"decoder_num_heads": 4, "d_k": 16}, (6, 8, 2048, 16, 64), (6, 4, 2048, 16, 128)),
        ({"decoder_d_k": 16, "d_k": 32}, (6, 8, 2048, 32, 64), (6, 8, 2048, 16, 64)),
        ({"decoder_num_layers": 1, "decoder_d_ff": 7, "decoder_d_v": 3}, (6, 8, 2048, 64, 64), (1, 8, 7, 64, 3)),
    ],
    ids=str,
)
def test_stack_sizes(changes, encoder, decoder):
    config = ModelConfig(**changes)
    assert (config.encoder, config.decoder) == (encoder, decoder)


@pytest.mark.parametrize(("decoder_start", "start_id"), [("bos", 1), ("eos", 2), ("pad", 0), ("zeros", 1)])
def test_start_id_follows_decoder_start(decoder_start, start_id):
    assert ModelConfig(decoder_start=decoder_start).start_id == start_id


def test_source_rows_default_to_the_shared_vocabulary():
    assert ModelConfig().source_rows == 37_000
    assert ModelConfig(source_vocab_size=10, tie_embeddings="none").source_rows == 10


def test_model_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().d_model = 3


# --------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("name", CONFIGS)
def test_json_round_trip(name, tmp_path):
    model = CONFIGS[name]
    tree = {"model": dataclasses.asdict(model)}
    tree["tokenizer"] = {"joint": model.source_rows == model.vocab_size}
    tree["data"] = {"max_length": 8}
    config = Config.from_json(json.dumps(tree))
    assert config.model == model
    assert Config.from_json(config.to_json()) == config
    (tmp_path / "config.json").write_text(config.to_json(), encoding="utf-8")
    assert Config.load(tmp_path / "config.json") == config


def test_missing_json_fields_keep_their_defaults():
    assert Config.from_json("{}") == Config()
    assert Config.from_json('{"model": {"num_layers": 2}}').model == ModelConfig(num_layers=2)
    model = Config.from_json('{"model": {"residual_dropout": 0}}').model
    assert isinstance(model.residual_dropout, float)


LITERALS = {
    "norm_position": ["post", "pre"],
    "norm_variant": ["standard", "unbiased_std"],
    "activation": ["relu", "gelu", "swish"],
    "positions": ["interleaved", "halves", "learned"],
    "position_exponent": ["paper", "tensor2tensor"],
    "tie_embeddings": ["all", "target", "none"],
    "decoder_start": ["bos", "eos", "pad", "zeros"],
    "initialization": ["tensor2tensor", "xavier_uniform", "torch_fused"],
    "dtype": ["float32", "bfloat16", "float64"],
    "param_dtype": ["float32", "bfloat16", "float64"],
}


@pytest.mark.parametrize("name", LITERALS)
def test_json_with_an_invalid_choice_is_rejected(name):
    with pytest.raises(UserError) as error:
        Config.from_json(json.dumps({"model": {name: "sideways"}}), "run/config.json")
    assert str(error.value) == f"run/config.json: model.{name} is 'sideways'; legal: {', '.join(LITERALS[name])}"
    for value in LITERALS[name]:
        assert getattr(ModelConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model": {"num_layer": 2}}', ["unknown field model.num_layer", "num_layers", "vocab_size"]),
        ('{"modle": {}}', ["unknown field modle", "model", "decoding"]),
        ('{"model": {"num_layers": "2"}}', ["model.num_layers is '2'", "must be int"]),
        ('{"model": {"num_layers": 2.0}}', ["model.num_layers is 2.0", "must be int"]),
        ('{"model": {"num_layers": true}}', ["model.num_layers is True", "must be int"]),
        ('{"model": {"num_layers": null}}', ["model.num_layers is None", "must be int"]),
        ('{"model": {"d_k": "x"}}', ["model.d_k is 'x'", "int or None"]),
        ('{"model": {"final_norm": 1}}', ["model.final_norm is 1", "must be bool"]),
        ('{"model": {"norm_epsilon": "small"}}', ["model.norm_epsilon is 'small'", "must be float"]),
        ('{"model": {"norm_epsilon": true}}', ["model.norm_epsilon is True", "must be float"]),
        ('{"model": {"activation": ["relu"]}}', ["model.activation is ['relu']", "relu, gelu, swish"]),
        ('{"model": {"activation": null}}', ["model.activation is None", "relu, gelu, swish"]),
        ('{"model": 3}', ["model", "is 3", "JSON object"]),
        ("[]", ["is []", "JSON object"]),
        ('{\n"model": {,}}', ["line 2", "not JSON"]),
        ('{"model": {"num_heads": 7}}', ["model.d_model=512", "model.num_heads=7"]),
    ],
)
def test_invalid_json_is_rejected(text, words):
    with pytest.raises(UserError) as error:
        Config.from_json(text, "run/config.json")
    message = str(error.value)
    assert all(word in message for word in words), message
    assert message.startswith("run/config.json")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"source_vocab_size": 10, "tie_embeddings": "none"}, ["model.source_vocab_size=10", "model.vocab_size=37000"]),
        ({"positions": "learned", "max_length": 255}, ["data.max_length=256", "model.max_length=255"]),
        ({"positions": "learned", "max_length": 256, "position_offset": 1}, ["data.max_length=256", "_offset=1"]),
    ],
)
def test_model_that_conflicts_with_other_sections_is_rejected(model, words):
    with pytest.raises(UserError) as error:
        Config(model=ModelConfig(**model))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"], ids=["scalar", "dtype", "name"])
def test_dtypes_are_stored_by_name(dtype):
    config = ModelConfig(dtype=dtype, param_dtype=dtype)
    assert (config.dtype, config.param_dtype) == ("bfloat16", "bfloat16")
    assert config == ModelConfig(dtype="bfloat16", param_dtype="bfloat16")


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (ModelConfig, {"dtype": jnp.int32}, "model.dtype is 'int32'; legal: float32, bfloat16, float64"),
        (ModelConfig, {"param_dtype": "half"}, "model.param_dtype is 'half'; legal: float32"),
        (ModelConfig, {"activation": "tanh"}, "model.activation is 'tanh'; legal: relu, gelu, swish"),
        (ModelConfig, {"num_layers": 2.0}, "model.num_layers is 2.0; it must be int"),
        (ModelConfig, {"d_k": "64"}, "model.d_k is '64'; it must be int or None"),
        (ModelConfig, {"final_norm": 1}, "model.final_norm is 1; it must be bool"),
        (TrainingConfig, {"schedule": None}, "training.schedule is None; legal: noam"),
        (
            TrainingConfig,
            {"checkpoint_seconds": float("inf")},
            "training.checkpoint_seconds is inf; it must be a finite",
        ),
        (TrainingConfig, {"average_last": 6}, "training.average_last=6 is more than training.keep_checkpoints=5"),
        (TrainingConfig, {"mesh_data": 0}, "training.mesh_data=0 must be at least 1, or -1 for all devices"),
        (DecodingConfig, {"checkpoint": "newest"}, "decoding.checkpoint='newest' must be last, best, average or"),
        (Sampling, {"temperature": 0}, "temperature is 0.0; it must be at least 1e-6"),
        (Sampling, {"top_p": 1.5}, "top_p is 1.5; it must be more than 0 and at most 1"),
    ],
    ids=str,
)
def test_constructors_check_types_values_and_bounds(section, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        section(**changes)


def test_constructors_convert_numbers():
    config = TrainingConfig(num_steps=np.int64(7), clip_norm=1, label_smoothing=np.float32(0.5))
    assert (type(config.num_steps), type(config.clip_norm), type(config.label_smoothing)) == (int, float, float)
    assert ModelConfig(final_norm=np.bool_(True)).final_norm is True
    with pytest.raises(UserError, match="must be bool"):
        ModelConfig(final_norm=np.int64(1))


@pytest.mark.parametrize(
    ("section", "old", "new"),
    [
        ("data", {"numbers_train": 7}, {"synthetic_train_size": 7}),
        ("data", {"numbers_valid": 7}, {"synthetic_valid_size": 7}),
        ("data", {"numbers_test": 7}, {"synthetic_test_size": 7}),
        ("tokenizer", {"kind": "presegmented"}, {"kind": "pretokenized"}),
        ("training", {"logits_megabytes": 7}, {"loss_chunk_mb": 7}),
        ("training", {"smoothing_mass": "others"}, {"label_smoothing_over": "non_target"}),
        ("training", {"smoothing_mass": "all"}, {"label_smoothing_over": "all"}),
        ("training", {"smoothing_mass": "others_without_pad"}, {"label_smoothing_over": "non_target_non_pad"}),
        ("decoding", {"max_extra": 7}, {"max_length_offset": 7}),
        ("decoding", {"renormalise": True}, {"renormalize_logits": True}),
        ("decoding", {"weights": "model"}, {"quantization": "none"}),
        ("decoding", {"weights": "int8"}, {"quantization": "int8"}),
    ],
    ids=str,
)
def test_fields_of_earlier_formats_are_read_under_their_new_names(section, old, new):
    assert Config.from_json(json.dumps({section: old})) == Config.from_json(json.dumps({section: new}))
    assert json.loads(Config.from_json(json.dumps({section: old})).to_json())[section].items() >= new.items()
