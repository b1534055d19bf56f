"""CTranslate2 folders: written for that package, and read, in float32.

A folder does not hold the beam size, length penalty and limits, which are arguments of `translate_batch`. Its input is
tokens: `Tokenizer.tokens(Tokenizer.encode(...))`. Padding is an ordinary token there, which it can generate unless
`suppress_sequences=[["<pad>"]]` is given. Suppressing removes the token from the softmax, as
`decoding.renormalize_logits` does for forbidden ids; this package's padding otherwise keeps its probability mass.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.ctranslate2_files import read_model_file, read_tokens, write_model_file
from transformer_jax.interop.ctranslate2_weights import (
    OUTPUT,
    OUTPUT_BIAS,
    SOURCE,
    TABLE,
    TARGET,
    UNSTORED,
    add_rows,
    add_zero_biases,
    cut_rows,
    find_tie,
    position_tables,
)
from transformer_jax.interop.exchange import (
    OWN_TOKENIZER,
    Imported,
    check_expressible,
    check_plain_heads,
    identify_positions,
    unique_tokens,
    write_json,
)
from transformer_jax.interop.tables import from_foreign, to_foreign
from transformer_jax.model.positional import sinusoids
from transformer_jax.runtime.files import read_json
from transformer_jax.types import Params, UserError

_STACKS = ("encoder", "decoder")
_ACTIVATIONS = {0: "relu", 2: "swish", 3: "gelu"}
# Variables of the file that do not change the result, and variables that must be zero.
_IDLE = ("embeddings_merge", "alignment_layer", "alignment_heads", "alibi_use_positive_positions")
_ZERO = ("multi_query_attention", "alibi", "scale_alibi", "with_relative_position")


def read_ctranslate2(folder: Path, num_heads: int | None = None) -> Imported:
    """Read a folder with `model.bin` and its vocabularies, with the decoding defaults of `translate_batch`.

    The tokenizers of a folder that this package wrote take text. Those of other folders take tokens of the
    vocabularies with spaces between them.

    Args:
        folder: Folder to read.
        num_heads: Number of attention heads, for files that do not store it.

    Raises:
        UserError: A file is missing or damaged, weights are not float32, or the model is not supported.
    """
    path = folder / "model.bin"
    stored = read_model_file(path).variables
    numbers = {name: value.item() for name, value in stored.items() if value.ndim == 0}
    tensors = {name: value for name, value in stored.items() if value.ndim}
    settings = _settings(folder, numbers)
    source_rows, target_rows = (_rows(tensors, names, path) for names in (SOURCE, (TARGET,)))
    tokens = read_tokens(folder, settings, source_rows, target_rows)
    tie = find_tie(tensors, tokens.joint)
    if tokens.pad_id >= min(source_rows, target_rows):
        source_rows = target_rows = tokens.pad_id + 1
        add_rows(tensors, target_rows)
    attention_bias = any("attention/linear_" in name and name.endswith("/bias") for name in tensors)
    add_zero_biases(tensors, attention_bias)
    sizes = _sizes(tensors, numbers, num_heads, path)
    model = ModelConfig(
        vocab_size=target_rows,
        source_vocab_size=None if source_rows == target_rows else source_rows,
        **sizes,
        **_flags(numbers, sizes["d_model"], path),
        **_positions(tensors, sizes["d_model"]),
        final_norm=_final_norm(tensors, path),
        norm_epsilon=1e-5 if settings.get("layer_norm_epsilon") is None else settings["layer_norm_epsilon"],
        attention_bias=attention_bias,
        logits_bias=OUTPUT_BIAS in tensors,
        tie_embeddings=tie,
        decoder_start="zeros" if numbers.pop("decoder/start_from_zero_embedding", 0) else tokens.start,
        source_bos=bool(settings["add_source_bos"]),
        source_eos=bool(settings["add_source_eos"]),
        pad_id=tokens.pad_id,
        bos_id=tokens.bos_id,
        eos_id=tokens.eos_id,
        unk_id=tokens.pad_id if tokens.unk_id is None else tokens.unk_id,
    )
    numbers = {name: value for name, value in numbers.items() if name.rpartition("/")[2] not in _IDLE}
    unknown = [f"{n} {value}" for n, value in numbers.items() if n.rpartition("/")[2] not in _ZERO or value]
    if unknown:
        raise UserError(f"{path} has settings that are not supported: {', '.join(unknown)}")
    config = Config(
        model=model,
        data=DataConfig(max_length=min(256, model.max_length)),
        tokenizer=TokenizerConfig(kind=tokens.pair.source.kind, joint=tokens.joint),
        decoding=DecodingConfig(
            beam_size=2, alpha=1.0, length_penalty="power", stopping="ctranslate2", max_length_offset=128, min_length=1
        ),
    )
    return Imported(config, from_foreign(tensors, TABLE, model, str(path)), tokens.pair)


def write_ctranslate2(
    folder: Path, config: Config, params: Params, tokenizers: TokenizerPair, warn: Callable[[str], None]
) -> None:
    """Write a folder that `ctranslate2.Translator` loads, without the table rows beyond the vocabularies.

    Args:
        folder: Empty folder to write to.
        config: Configuration of the run.
        params: Parameters of its model.
        tokenizers: Tokenizers of the run, also written to the subfolder `tokenizer/`.
        warn: Called with each difference between the run's decoding and `translate_batch`.

    Raises:
        UserError: CTranslate2 cannot express the model. The fields are named.
    """
    model, decoding = config.model, config.decoding
    check_expressible(model, "ctranslate2", {"norm_variant": ("standard",)})
    check_plain_heads(model, "ctranslate2")
    source, target = unique_tokens(tokenizers.source), unique_tokens(tokenizers.target)
    if model.decoder_start != "zeros" and model.start_id >= len(target):
        raise UserError(
            f"ctranslate2 cannot express this model: model.decoder_start={model.decoder_start!r}, but the vocabulary "
            f"has no token with the id {model.start_id}"
        )
    if model.source_bos and source[model.bos_id : model.bos_id + 1] != [_bos_token(model, target)]:
        raise UserError(
            f"ctranslate2 cannot express this model: model.source_bos=True, but the id {model.bos_id} is not one token "
            "of both vocabularies"
        )
    variables = to_foreign(cut_rows(_without_positions(params), len(source), len(target)), TABLE, model)
    variables |= position_tables(params, model)
    tied = {"all": (SOURCE[0], OUTPUT), "target": (OUTPUT,), "none": ()}[model.tie_embeddings]
    aliases = dict.fromkeys(tied, TARGET)
    if model.positions != "learned":
        aliases["encoder/position_encodings/encodings"] = "decoder/position_encodings/encodings"
    weights = {name: array.astype(np.float32) for name, array in variables.items() if name not in aliases}
    write_model_file(folder / "model.bin", weights | _numbers(model), aliases)
    write_json(folder / "config.json", _config_json(model, source, target))
    files = {"shared": source} if source == target else {"source": source, "target": target}
    for name, words in files.items():
        write_json(folder / f"{name}_vocabulary.json", words)
    tokenizers.save(folder / OWN_TOKENIZER)
    if decoding.length_penalty == "gnmt" and decoding.beam_size > 1:
        warn(
            "decoding.length_penalty='gnmt', but translate_batch has only length^alpha: its length_penalty="
            f"{decoding.alpha} prefers other lengths"
        )
    if decoding.min_length != 1:
        warn(
            f"decoding.min_length={decoding.min_length} cannot be stored, and translate_batch assumes 1. Call it with "
            f"min_decoding_length={decoding.min_length}"
        )
    if decoding.forbidden_ids:
        words = tokenizers.target.tokens(decoding.forbidden_ids)
        warn(
            "decoding.forbidden_ids cannot be stored. Call translate_batch with "
            f"suppress_sequences={json.dumps([[word] for word in words], ensure_ascii=False)}"
        )


def _settings(folder: Path, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `config.json`, which older files have among their numbers instead."""
    settings: dict[str, Any] = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_source_bos": bool(numbers.pop("with_source_bos", 0)),
        "add_source_eos": bool(numbers.pop("with_source_eos", 0)),
        "decoder_start_token": "<s>" if numbers.pop("with_target_bos", 1) else None,
    }
    path = folder / "config.json"
    if path.is_file():
        settings |= read_json(path)
    for name in ("multi_query_attention", "quantization_type"):
        if settings.get(name):
            raise UserError(f"{path}: {name} is {settings[name]!r}, which is not supported")
    if settings["decoder_start_token"] is None:
        raise UserError(f"{path}: decoder_start_token is null, but every sentence must start with the same token")
    epsilon = settings.get("layer_norm_epsilon")
    if epsilon is not None and (type(epsilon) not in (int, float) or epsilon < 0):
        raise UserError(f"{path}: layer_norm_epsilon is {epsilon!r}; it must be a number that is not negative")
    return settings


def _rows(tensors: dict[str, np.ndarray], names: Sequence[str], path: Path) -> int:
    table = next((tensors[name] for name in names if name in tensors), None)
    if table is None or table.ndim != 2:
        raise UserError(f"{path}: {names[0]} is missing or not a matrix")
    return len(table)


def _sizes(tensors: dict[str, np.ndarray], numbers: dict[str, Any], given: int | None, path: Path) -> dict[str, Any]:
    sizes: dict[str, Any] = {"d_model": tensors[TARGET].shape[1]}
    old_heads = numbers.pop("num_heads", None)
    for stack, prefix in zip(_STACKS, ("", "decoder_"), strict=True):
        heads = numbers.pop(f"{stack}/num_heads", old_heads)
        if heads is None and given is None:
            raise UserError(
                f"{path} does not store the number of attention heads. State it with --num-heads (num_heads=); "
                "CTranslate2 itself assumes 8 for such files, and 16 for a TransformerBig"
            )
        if heads is not None and given not in (None, heads):
            raise UserError(f"{path}: the {stack} has {heads} attention heads, but num_heads is {given}")
        layer, inner = 0, f"{stack}/layer_0/ffn/linear_0/weight"
        if inner not in tensors:
            raise UserError(f"{path}: {inner} is missing")
        while f"{stack}/layer_{layer}/ffn/linear_0/weight" in tensors:
            layer += 1
        sizes |= {
            f"{prefix}num_layers": layer,
            f"{prefix}num_heads": given if heads is None else heads,
            f"{prefix}d_ff": len(tensors[inner]),
        }
    return sizes


def _flags(numbers: dict[str, Any], d_model: int, path: Path) -> dict[str, Any]:
    flags: dict[str, list[Any]] = {"activation": [], "norm_position": [], "scale_embeddings": []}
    for stack in _STACKS:
        activation = numbers.pop(f"{stack}/activation", 0)
        if activation not in _ACTIVATIONS:
            raise UserError(f"{path}: {stack}/activation is {activation}; supported: {_ACTIVATIONS}")
        flags["activation"].append(_ACTIVATIONS[activation])
        flags["norm_position"].append("pre" if numbers.pop(f"{stack}/pre_norm", 1) else "post")
        old_scale = numbers.pop(f"{stack}/embeddings/multiply_by_sqrt_depth", 1)
        scale = numbers.pop(f"{stack}/scale_embeddings", old_scale)
        # A flag, or the factor itself.
        if not (isinstance(scale, int) or scale == 1 or math.isclose(scale, math.sqrt(d_model), rel_tol=1e-6)):
            raise UserError(f"{path}: {stack}/scale_embeddings is {scale}; only 1 and sqrt(d_model) are supported")
        flags["scale_embeddings"].append(bool(scale) if isinstance(scale, int) else scale != 1)
    for name, values in flags.items():
        if values[0] != values[1]:
            raise UserError(f"{path}: {name} is {values[0]!r} in the encoder and {values[1]!r} in the decoder")
    return {name: values[0] for name, values in flags.items()}


def _final_norm(tensors: dict[str, np.ndarray], path: Path) -> bool:
    has_norm = [f"{stack}/layer_norm/gamma" in tensors for stack in _STACKS]
    if has_norm[0] != has_norm[1]:
        raise UserError(f"{path}: only one of the two stacks ends with a norm (final_norm)")
    return has_norm[0]


def _positions(tensors: dict[str, np.ndarray], d_model: int) -> dict[str, Any]:
    names = [f"{stack}/position_encodings/encodings" for stack in _STACKS]
    tables = [tensors[name] for name in names if name in tensors and tensors[name].ndim == 2]
    if not tables:
        return UNSTORED._asdict()
    length = min(len(table) for table in tables)
    kinds = [identify_positions(table) for table in tables] + [UNSTORED] * (2 - len(tables))
    if kinds[0] is not None and kinds[0] == kinds[1]:
        for name in names:
            tensors.pop(name, None)
        return kinds[0]._asdict() | {"max_length": length}
    for name in names:  # a missing table is the one that CTranslate2 computes
        computed = sinusoids(length, d_model, "halves", "tensor2tensor", 1) if name not in tensors else tensors[name]
        tensors[name] = np.asarray(computed[:length], np.float32)
    return {"positions": "learned", "max_length": length}


def _without_positions(params: Params) -> Params:
    return {name: leaf for name, leaf in params.items() if name not in ("source_positions", "target_positions")}


def _numbers(model: ModelConfig) -> dict[str, np.ndarray]:
    code = next(code for code, name in _ACTIVATIONS.items() if name == model.activation)
    numbers: dict[str, np.ndarray] = {
        "encoder/embeddings_merge": np.array(0, np.int8),
        "encoder/multi_query_attention": np.array(0, np.int8),
        "decoder/alibi": np.array(0, np.int8),
        "decoder/alibi_use_positive_positions": np.array(0, np.int8),
        "decoder/scale_alibi": np.array(0, np.int8),
        "decoder/alignment_heads": np.array(1, np.int16),
        "decoder/alignment_layer": np.array(-1, np.int16),
        "decoder/start_from_zero_embedding": np.array(model.decoder_start == "zeros", np.int8),
    }
    for stack in _STACKS:
        numbers |= {
            f"{stack}/num_heads": np.array(getattr(model, stack).num_heads, np.int16),
            f"{stack}/pre_norm": np.array(model.norm_position == "pre", np.int8),
            f"{stack}/activation": np.array(code, np.int8),
            f"{stack}/scale_embeddings": np.array(model.scale_embeddings, np.int8),
        }
    return numbers


def _config_json(model: ModelConfig, source: Sequence[str], target: Sequence[str]) -> dict[str, Any]:
    start = model.eos_id if model.decoder_start == "zeros" else model.start_id
    return {
        "add_source_bos": model.source_bos,
        "add_source_eos": model.source_eos,
        "bos_token": _bos_token(model, target),
        "eos_token": target[model.eos_id],
        "unk_token": source[model.unk_id] if model.unk_id < len(source) else "<unk>",
        "decoder_start_token": target[start],
        "layer_norm_epsilon": model.norm_epsilon,
        "multi_query_attention": False,
    }


def _bos_token(model: ModelConfig, target: Sequence[str]) -> str:
    return target[model.bos_id] if model.bos_id < len(target) else "<s>"
