"""fairseq's `transformer`: checkpoints, dictionaries and subword-nmt codes.

A checkpoint holds the settings of its model (`args`, an `argparse.Namespace`, or `cfg["model"]`): the configuration
comes from there. fairseq's sinusoids stand in halves, with tensor2tensor's exponent, from position pad + 1 on; the
decoder starts from EOS.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.fairseq_dictionary import read_dictionary
from transformer_jax.interop.imported import Imported, Tying, check_expressible, check_plain_heads
from transformer_jax.interop.tables import (
    Table,
    Tensors,
    embeddings,
    fairseq_stack,
    from_foreign,
    renamed,
    row,
    to_foreign,
)
from transformer_jax.interop.tensor_files import load_torch, state_dict_arrays
from transformer_jax.types import Params, UserError

BOS_ID, PAD_ID, EOS_ID, UNK_ID = range(4)  # of every fairseq dictionary


OUTPUT = ("decoder.output_projection.weight", "decoder.embed_out")

TABLE = Table(
    rows=(
        *embeddings("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", OUTPUT),
        row("encoder.embed_positions.weight", "source_positions/table"),
        row("decoder.embed_positions.weight", "target_positions/table"),
        *fairseq_stack("encoder", {"self_attn": "self_attention"}),
        *fairseq_stack("decoder", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}),
    ),
    ignored=("_float_tensor", "encoder.version", "decoder.version", "embed_positions._float_tensor"),
)

# Names of releases before 0.6.
_OLD_NAMES = {
    "encoder": {"layer_norms.0": "self_attn_layer_norm", "layer_norms.1": "final_layer_norm"},
    "decoder": {
        "layer_norms.0": "self_attn_layer_norm",
        "layer_norms.1": "encoder_attn_layer_norm",
        "layer_norms.2": "final_layer_norm",
    },
}


def params_from_fairseq(tensors: Tensors, config: ModelConfig, origin: str = "the checkpoint") -> Params:
    """The parameters here, of a checkpoint's tensors; query, key and value may be one matrix.

    Raises:
        UserError: names, shapes or values that do not fit; all of them are listed.
    """
    check_fairseq(config)
    return from_foreign(_separate(renamed(tensors, _new_name, origin), origin), TABLE, config, origin)


def fairseq_from_params(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """A checkpoint's tensors, of the parameters here."""
    check_fairseq(config)
    return to_foreign(params, TABLE, config)


def check_fairseq(config: ModelConfig) -> None:
    """Raises UserError unless fairseq's `transformer` computes what the configuration says."""
    legal = {
        "norm_variant": ("standard",),
        "norm_epsilon": (1e-5,),
        "logits_bias": (False,),
        "positions": ("halves", "learned"),
        "position_exponent": ("tensor2tensor",) if config.positions == "halves" else ("paper", "tensor2tensor"),
        "position_offset": (config.pad_id + 1,),
        "decoder_start": ("eos",),
        "source_eos": (True,),
        "activation": ("relu", "gelu", "swish"),
    }
    check_expressible(config, "fairseq", legal)
    check_plain_heads(config, "fairseq")
    if config.final_norm != (config.norm_position == "pre"):
        raise UserError(
            f"fairseq cannot hold this model: model.final_norm is {config.final_norm} and model.norm_position "
            f"{config.norm_position!r}; fairseq has a final norm with 'pre' and none with 'post'"
        )


def read_fairseq(path: Path) -> Imported:
    """A folder with `*.pt`, two `dict.LANGUAGE.txt` and, where the text is to be cut here, `code` or `bpecodes`.

    Args:
        path: the folder, or one `*.pt` in it where there are several.

    Raises:
        UserError: files that are missing or damaged, objects in the checkpoint that are no tensors, settings that the
            model here does not know.
    """
    file = _checkpoint_file(path)
    checkpoint = load_torch(file, (argparse.Namespace,))
    args = _settings(checkpoint, file)
    state = checkpoint.get("model")
    tensors = state_dict_arrays(state, str(file))
    source, target = _languages(args, file.parent)
    codes = next((file.parent / n for n in ("bpecodes", "code", "codes") if (file.parent / n).is_file()), None)
    names = [file.parent / f"dict.{language}.txt" for language in (source, target)]
    dictionaries = [read_dictionary(name, codes) for name in names]
    joint = bool(args.get("share_all_embeddings"))
    if joint and names[0].read_bytes() != names[1].read_bytes():
        raise UserError(f"{names[0]} and {names[1]} differ, and the model shares all embeddings")
    pair = TokenizerPair(dictionaries[0], dictionaries[0] if joint else dictionaries[1])
    model = _model_config(args, pair, tensors, file)
    config = Config(
        model=model,
        data=DataConfig(source_language=source, target_language=target),
        tokenizer=TokenizerConfig(kind="subword_nmt" if codes else "pretokenized", joint=joint),
        training=TrainingConfig(label_smoothing=_setting(args, file, "label_smoothing", 0.0)),
        decoding=DecodingConfig(
            beam_size=5, length_penalty="power", alpha=1.0, stopping="ctranslate2", max_length_offset=200
        ),
    )
    return Imported(config, params_from_fairseq(tensors, model, str(file)), pair)


def _checkpoint_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = sorted(path.glob("*.pt"))
    if len(files) > 1:
        files = [file for file in files if file.name in ("checkpoint_best.pt", "model.pt")] or files
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise UserError(f"{path}: one checkpoint *.pt is needed, and there is {found}; name the file")
    return files[0]


def _settings(checkpoint: Any, file: Path) -> dict[str, Any]:
    """Of the model; the languages and the smoothing too where later releases keep them elsewhere."""
    if not isinstance(checkpoint, Mapping):
        raise UserError(f"{file} holds {type(checkpoint).__name__}, not a fairseq checkpoint")

    def plain(settings: Any) -> dict[str, Any] | None:
        settings = vars(settings) if isinstance(settings, argparse.Namespace) else settings
        return dict(settings) if isinstance(settings, Mapping) else None

    args, cfg = plain(checkpoint.get("args")), plain(checkpoint.get("cfg")) or {}
    args = plain(cfg.get("model")) if args is None else args
    if args is None:
        raise UserError(f"{file} is not a fairseq checkpoint: it has no settings of a model (args, or cfg with model)")
    nested = [name for name in ("encoder", "decoder") if isinstance(args.get(name), Mapping | argparse.Namespace)]
    if nested:
        raise UserError(f"{file}: the settings {', '.join(nested)} are tables; only those of `transformer` are read")
    for part, names in (("task", ("source_lang", "target_lang")), ("criterion", ("label_smoothing",))):
        for name in names:
            if args.get(name) is None:
                args[name] = (plain(cfg.get(part)) or {}).get(name)
    return args


def _languages(args: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    source, target = args.get("source_lang"), args.get("target_lang")
    if source and target:
        for language in (str(source), str(target)):
            if not re.fullmatch(r"[\w.-]+", language):  # it becomes part of a file's name
                raise UserError(f"{folder}: the checkpoint's settings name the language {language!r:.80}; refused")
        return str(source), str(target)
    found = ", ".join(sorted(file.name for file in folder.glob("dict.*.txt"))) or "none"
    raise UserError(
        f"{folder}: the checkpoint's settings name no source_lang and target_lang, so it is not known which of the "
        f"dictionaries ({found}) is which"
    )


def _setting(args: Mapping[str, Any], file: Path, name: str, default: Any) -> Any:
    """A setting of the type of its default; one without a default is given as its type, and must be there."""
    kind = default if isinstance(default, type) else type(default)
    value = args.get(name)
    if value is None and not isinstance(default, type):
        return default
    if type(value) not in ((int, float) if kind is float else (kind,)):
        found = "missing" if value is None else repr(value)
        raise UserError(f"{file}: the setting {name} is {found}; a value of type {kind.__name__} is needed")
    return kind(value)


def _model_config(args: Mapping[str, Any], pair: TokenizerPair, tensors: Tensors, file: Path) -> ModelConfig:
    def setting(name: str, default: Any) -> Any:
        return _setting(args, file, name, default)

    for name, legal in _UNKNOWN_SETTINGS.items():
        if args.get(name) not in (None, legal):
            raise UserError(f"{file}: the setting {name} is {args[name]!r}; the model here has only {legal!r}")
    pre = [setting(f"{stack}_normalize_before", False) for stack in ("encoder", "decoder")]
    learned = [setting(f"{stack}_learned_pos", False) for stack in ("encoder", "decoder")]
    widths = [setting(f"{stack}_embed_dim", 512) for stack in ("encoder", "decoder")]
    for name, values in (("normalize_before", pre), ("learned_pos", learned), ("embed_dim", widths)):
        if values[0] != values[1]:
            raise UserError(f"{file}: encoder_{name} is {values[0]} and decoder_{name} {values[1]}; they must be equal")
    tied: Tying = "none"
    if setting("share_all_embeddings", False):
        tied = "all"
    elif setting("share_decoder_input_output_embed", False):
        tied = "target"
    table = tensors.get("encoder.embed_positions.weight") if learned[0] else None
    return ModelConfig(
        vocab_size=pair.target.vocab_size,
        source_vocab_size=None if pair.joint else pair.source.vocab_size,
        d_model=widths[0],
        num_layers=setting("encoder_layers", 6),
        decoder_num_layers=setting("decoder_layers", 6),
        num_heads=setting("encoder_attention_heads", int),
        decoder_num_heads=setting("decoder_attention_heads", int),
        d_ff=setting("encoder_ffn_embed_dim", 2048),
        decoder_d_ff=setting("decoder_ffn_embed_dim", 2048),
        norm_position="pre" if pre[0] else "post",
        final_norm=pre[0],
        norm_epsilon=1e-5,
        activation=setting("activation_fn", "relu"),
        attention_bias=True,
        residual_dropout=setting("dropout", 0.1),
        attention_dropout=setting("attention_dropout", 0.0),
        activation_dropout=setting("activation_dropout", 0.0) or setting("relu_dropout", 0.0),
        positions="learned" if learned[0] else "halves",
        position_exponent="tensor2tensor",
        position_offset=PAD_ID + 1,
        max_length=len(table) if table is not None else 1024,
        tie_embeddings=tied,
        scale_embeddings=not setting("no_scale_embedding", False),
        decoder_start="eos",
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        unk_id=UNK_ID,
        initialization="torch_fused",
    )


# Settings that change the function, with the only value that the model here knows.
_UNKNOWN_SETTINGS = {
    "no_token_positional_embeddings": False,
    "layernorm_embedding": False,
    "adaptive_input": False,
    "adaptive_softmax_cutoff": None,
    "cross_self_attention": False,
    "no_cross_attention": False,
    "no_decoder_final_norm": False,
    "tie_adaptive_weights": False,
}


def _new_name(name: str) -> str:
    for old, new in _OLD_NAMES.get(name.partition(".")[0], {}).items():
        name = name.replace(f".{old}.", f".{new}.")
    return name


def _separate(tensors: Mapping[str, np.ndarray], origin: str) -> dict[str, np.ndarray]:
    """Query, key and value as three tensors where they are one."""
    separate: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        prefix, found, kind = name.partition(".in_proj_")
        parts = {name: tensor}
        if found and kind in ("weight", "bias") and tensor.ndim and len(tensor) % 3 == 0:
            names = [f"{prefix}.{letter}_proj.{kind}" for letter in "qkv"]
            parts = dict(zip(names, np.split(tensor, 3), strict=True))
            twice = [part for part in parts if part in tensors]
            if twice:
                raise UserError(f"{origin}: {name} and {', '.join(twice)} stand for the same; only one may be there")
        separate |= parts
    return separate
