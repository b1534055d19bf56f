"""fairseq's `transformer`: checkpoints, dictionaries and subword-nmt codes.

A checkpoint holds the settings of its model (`args`, an `argparse.Namespace`, or `cfg["model"]`), from which the
configuration is made. fairseq's position tables have the sines first and the cosines after them, tensor2tensor's
exponent, and start from position pad + 1. The decoder starts from EOS.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig
from transformer_jax.data.subword import SubwordTokenizer, read_codes
from transformer_jax.data.tokenizer import Tokenizer, WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.exchange import Imported, Tying, check_expressible, check_plain_heads
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
from transformer_jax.runtime.files import read_text
from transformer_jax.types import Params, UserError

SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
"""Tokens that precede the tokens listed in a dictionary."""
BOS_ID, PAD_ID, EOS_ID, UNK_ID = range(4)
MAX_POSITIONS = 1024
"""fairseq's default limit of a sentence's length, for models whose position tables have no end."""

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

# Names that releases before 0.6 used.
_OLD_NAMES = {
    "encoder": {"layer_norms.0": "self_attn_layer_norm", "layer_norms.1": "final_layer_norm"},
    "decoder": {
        "layer_norms.0": "self_attn_layer_norm",
        "layer_norms.1": "encoder_attn_layer_norm",
        "layer_norms.2": "final_layer_norm",
    },
}


def params_from_fairseq(tensors: Tensors, config: ModelConfig, origin: str = "the checkpoint") -> Params:
    """Convert the tensors of a checkpoint, in which query, key and value may be one matrix.

    Args:
        tensors: Tensors of the checkpoint.
        config: Model that the checkpoint is for.
        origin: Where the tensors come from, for errors.

    Raises:
        UserError: Names, shapes or values do not fit. All problems are listed.
    """
    check_fairseq(config)
    return from_foreign(_separate(renamed(tensors, _new_name, origin), origin), TABLE, config, origin)


def fairseq_from_params(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint with the given parameters."""
    check_fairseq(config)
    return to_foreign(params, TABLE, config)


def check_fairseq(config: ModelConfig) -> None:
    """Raise UserError unless fairseq's `transformer` can compute the model."""
    legal = {
        "norm_variant": ("standard",),
        "norm_epsilon": (1e-5,),
        "logits_bias": (False,),
        "positions": ("halves", "learned"),
        "position_exponent": ("tensor2tensor",) if config.positions == "halves" else ("paper", "tensor2tensor"),
        "position_offset": (config.pad_id + 1,),
        "decoder_start": ("eos",),
        "source_bos": (False,),
        "source_eos": (True,),
        "activation": ("relu", "gelu", "swish"),
    }
    check_expressible(config, "fairseq", legal)
    check_plain_heads(config, "fairseq")
    if config.final_norm != (config.norm_position == "pre"):
        raise UserError(
            f"fairseq cannot express this model: model.final_norm={config.final_norm} and model.norm_position="
            f"{config.norm_position!r}, but fairseq has a final norm with 'pre' and none with 'post'"
        )


def read_fairseq(path: Path) -> Imported:
    """Read a folder with a checkpoint `*.pt`, two `dict.LANGUAGE.txt` and optionally subword-nmt codes.

    Codes (`bpecodes`, `code` or `codes`) make tokenizers that take text. Without them the tokenizers take text that
    is split into pieces already.

    Args:
        path: The folder, or the checkpoint in it if it has several.

    Raises:
        UserError: A file is missing or damaged, the checkpoint holds objects other than tensors, or the model has
            settings that this package's model does not know.
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
        data=DataConfig(
            source_language=source,
            target_language=target,
            max_length=min(256, model.max_length - model.position_offset),
        ),
        tokenizer=TokenizerConfig(kind="subword_nmt" if codes else "pretokenized", joint=joint),
        training=TrainingConfig(label_smoothing=_setting(args, file, "label_smoothing", 0.0)),
        decoding=DecodingConfig(
            beam_size=5, length_penalty="power", alpha=1.0, stopping="ctranslate2", max_length_offset=200, min_length=1
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
        names = ", ".join(file.name for file in files) or "none"
        raise UserError(f"{path}: the folder has these checkpoints *.pt: {names}. Give the path of one file")
    return files[0]


def read_dictionary(path: Path, codes: Path | None = None) -> Tokenizer:
    """Read a `dict.LANGUAGE.txt`, which has a piece and its count on each line.

    Args:
        path: The dictionary.
        codes: subword-nmt codes, for a tokenizer that splits words into pieces.

    Raises:
        UserError: A file cannot be read, or a line is not a piece and its count.
    """
    vocabulary, known = list(SPECIAL_TOKENS), set(SPECIAL_TOKENS)
    for number, line in enumerate(read_text(path).removesuffix("\n").split("\n"), 1):
        overwrites = line.endswith(" #fairseq:overwrite")
        line = line.removesuffix(" #fairseq:overwrite")
        piece, separator, count = line.rpartition(" ")
        if not separator or not count.isdecimal():
            raise UserError(f"{path}, line {number}: {line!r} is not a piece and its count")
        if piece in known and not overwrites:
            raise UserError(f"{path}, line {number}: {piece!r} is listed twice and not marked as overwriting")
        known.add(piece)
        vocabulary.append(piece)
    ids = (PAD_ID, BOS_ID, EOS_ID, UNK_ID)
    if codes is None:
        return WordTokenizer("pretokenized", vocabulary, ids)
    return SubwordTokenizer(read_codes(codes), vocabulary, ids)


def _settings(checkpoint: Any, file: Path) -> dict[str, Any]:
    """Return the settings of the model, with the languages and the smoothing that later releases keep elsewhere."""
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
        raise UserError(
            f"{file}: the settings {', '.join(nested)} are tables. Only the architecture `transformer` can be imported"
        )
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
                raise UserError(
                    f"{folder}: the checkpoint's settings name the language {language!r:.80}, which may not be part "
                    "of a file name"
                )
        return str(source), str(target)
    names = ", ".join(sorted(file.name for file in folder.glob("dict.*.txt"))) or "none"
    raise UserError(
        f"{folder}: the checkpoint's settings name no source_lang and target_lang, so it is not known which dictionary "
        f"({names}) belongs to which side"
    )


def _setting(args: Mapping[str, Any], file: Path, name: str, default: Any) -> Any:
    """Return a setting of the type of its default. A setting whose default is a type must be in the checkpoint."""
    kind = default if isinstance(default, type) else type(default)
    value = args.get(name)
    if value is None and not isinstance(default, type):
        return default
    if type(value) not in ((int, float) if kind is float else (kind,)):
        actual = "missing" if value is None else repr(value)
        raise UserError(f"{file}: the setting {name} is {actual}; a value of type {kind.__name__} is needed")
    return kind(value)


def _model_config(args: Mapping[str, Any], pair: TokenizerPair, tensors: Tensors, file: Path) -> ModelConfig:
    def setting(name: str, default: Any) -> Any:
        return _setting(args, file, name, default)

    for name, legal in _UNKNOWN_SETTINGS.items():
        if args.get(name) not in (None, legal):
            raise UserError(f"{file}: the setting {name} is {args[name]!r}; only {legal!r} can be imported")
    pre = [setting(f"{stack}_normalize_before", False) for stack in ("encoder", "decoder")]
    learned = [setting(f"{stack}_learned_pos", False) for stack in ("encoder", "decoder")]
    widths = [setting(f"{stack}_embed_dim", 512) for stack in ("encoder", "decoder")]
    for name, values in (("normalize_before", pre), ("learned_pos", learned), ("embed_dim", widths)):
        if values[0] != values[1]:
            raise UserError(
                f"{file}: encoder_{name} is {values[0]} and decoder_{name} is {values[1]}; they must be equal"
            )
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
        max_length=len(table) if table is not None else MAX_POSITIONS,
        tie_embeddings=tied,
        scale_embeddings=not setting("no_scale_embedding", False),
        decoder_start="eos",
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        unk_id=UNK_ID,
        initialization="torch_fused",
    )


# Settings that change the function, with the only value that can be imported.
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
    """Return the tensors with a fused query, key and value matrix split in three."""
    separate: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        prefix, separator, kind = name.partition(".in_proj_")
        parts = {name: tensor}
        if separator and kind in ("weight", "bias") and tensor.ndim and len(tensor) % 3 == 0:
            names = [f"{prefix}.{letter}_proj.{kind}" for letter in "qkv"]
            parts = dict(zip(names, np.split(tensor, 3), strict=True))
            duplicates = [part for part in parts if part in tensors]
            if duplicates:
                raise UserError(f"{origin}: {name} and {', '.join(duplicates)} hold the same weights. Remove one")
        separate |= parts
    return separate
