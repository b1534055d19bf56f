"""CTranslate2 folders: written for that package, and read back or from others, in float32.

What a folder does not hold, the caller gives with each call of `translate_batch`: beam, length penalty, limits. Text is
given to it in pieces: `Tokenizer.tokens(Tokenizer.encode(...))`. It also may generate the padding, which is a token
like others there, unless `suppress_sequences=[["<pad>"]]` is given.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.ctranslate2_file import read_model_file, write_model_file
from transformer_jax.interop.ctranslate2_vocabulary import read_tokens
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
    identify_positions,
    position_tables,
)
from transformer_jax.interop.folder_files import OWN_TOKENIZER, read_json, vocabulary, write_json
from transformer_jax.interop.imported import Imported, check_expressible, check_plain_heads
from transformer_jax.interop.tables import from_foreign, to_foreign
from transformer_jax.model.positional import sinusoids
from transformer_jax.types import Params, UserError

_STACKS = ("encoder", "decoder")
_ACTIVATIONS = {0: "relu", 2: "swish", 3: "gelu"}
# Numbers in the file that change nothing here, and those that must be zero.
_IDLE = ("embeddings_merge", "alignment_layer", "alignment_heads", "alibi_use_positive_positions")
_ZERO = ("multi_query_attention", "alibi", "scale_alibi", "with_relative_position", "with_source_bos")


def read_ctranslate2(folder: Path, num_heads: int | None = None) -> Imported:
    """A folder with `model.bin` and its vocabularies. Its decoding settings become those of `translate_batch`.

    The tokenizers take and give the pieces of the vocabularies, with spaces between them; those of a folder that was
    written here take text.

    Args:
        folder: the folder.
        num_heads: of files that do not store it.

    Raises:
        UserError: files that are missing or damaged, weights that are not float32, models that are not known here.
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
        source_eos=bool(settings["add_source_eos"]),
        pad_id=tokens.pad_id,
        bos_id=tokens.bos_id,
        eos_id=tokens.eos_id,
        unk_id=tokens.pad_id if tokens.unk_id is None else tokens.unk_id,
    )
    numbers = {name: value for name, value in numbers.items() if name.rpartition("/")[2] not in _IDLE}
    odd = [f"{n} {value}" for n, value in numbers.items() if n.rpartition("/")[2] not in _ZERO or value]
    if odd:
        raise UserError(f"{path} has what the model here does not know: {', '.join(odd)}")
    config = Config(
        model=model,
        data=DataConfig(max_length=min(256, model.max_length)),
        tokenizer=TokenizerConfig(kind=tokens.pair.source.kind, joint=tokens.joint),
        decoding=DecodingConfig(
            beam_size=2, alpha=1.0, length_penalty="power", stopping="ctranslate2", max_length_offset=128
        ),
    )
    return Imported(config, from_foreign(tensors, TABLE, model, str(path)), tokens.pair)


def write_ctranslate2(
    folder: Path, config: Config, params: Params, tokenizers: TokenizerPair, warn: Callable[[str], None]
) -> None:
    """Writes a folder that `ctranslate2.Translator` loads. Rows that no token has are left out.

    Args:
        folder: an empty one.
        config: of the run.
        params: of its model.
        tokenizers: of the run; they are written beside, in `tokenizer/`.
        warn: called with what `translate_batch` does in another way.

    Raises:
        UserError: CTranslate2 cannot say what the model does; the fields are named.
    """
    model, decoding = config.model, config.decoding
    check_expressible(model, "ctranslate2", {"norm_variant": ("standard",)})
    check_plain_heads(model, "ctranslate2")
    source, target = vocabulary(tokenizers.source), vocabulary(tokenizers.target)
    if model.decoder_start != "zeros" and model.start_id >= len(target):
        raise UserError(
            f"ctranslate2 cannot hold this model: model.decoder_start is {model.decoder_start!r}, and the id "
            f"{model.start_id} is no token of the vocabulary"
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
            "decoding.length_penalty is 'gnmt' and translate_batch knows only length^alpha: its length_penalty "
            f"{decoding.alpha} prefers other lengths"
        )
    if decoding.forbidden_ids:
        words = tokenizers.target.tokens(decoding.forbidden_ids)
        warn(
            "decoding.forbidden_ids cannot be stored; give translate_batch "
            f"suppress_sequences={json.dumps([[word] for word in words], ensure_ascii=False)}"
        )


def _settings(folder: Path, numbers: dict[str, Any]) -> dict[str, Any]:
    """`config.json`; older files have flags among their numbers instead."""
    settings: dict[str, Any] = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_source_bos": False,
        "add_source_eos": bool(numbers.pop("with_source_eos", 0)),
        "decoder_start_token": "<s>" if numbers.pop("with_target_bos", 1) else None,
    }
    path = folder / "config.json"
    if path.is_file():
        settings |= read_json(path)
    for name in ("add_source_bos", "multi_query_attention", "quantization_type"):
        if settings.get(name):
            raise UserError(f"{path}: {name} is {settings[name]!r}; the model here does not know that")
    if settings["decoder_start_token"] is None:
        raise UserError(
            f"{path}: decoder_start_token is null: each sentence would bring its own; the model here has one for all"
        )
    epsilon = settings.get("layer_norm_epsilon")
    if epsilon is not None and (type(epsilon) not in (int, float) or epsilon < 0):
        raise UserError(f"{path}: layer_norm_epsilon is {epsilon!r}; it must be a number from 0")
    return settings


def _rows(tensors: dict[str, np.ndarray], names: Sequence[str], path: Path) -> int:
    table = next((tensors[name] for name in names if name in tensors), None)
    if table is None or table.ndim != 2:
        raise UserError(f"{path}: {names[0]} is missing, or no matrix")
    return len(table)


def _sizes(tensors: dict[str, np.ndarray], numbers: dict[str, Any], given: int | None, path: Path) -> dict[str, Any]:
    sizes: dict[str, Any] = {"d_model": tensors[TARGET].shape[1]}
    old_heads = numbers.pop("num_heads", None)
    for stack, prefix in zip(_STACKS, ("", "decoder_"), strict=True):
        heads = numbers.pop(f"{stack}/num_heads", old_heads)
        if heads is None and given is None:
            raise UserError(
                f"{path} does not store the number of attention heads: give it (num_heads, --num-heads); CTranslate2 "
                "itself takes 8 for such files, 16 for those of a TransformerBig"
            )
        if heads is not None and given not in (None, heads):
            raise UserError(f"{path}: the {stack} has {heads} attention heads, and num_heads is {given}")
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
    found: dict[str, list[Any]] = {"activation": [], "norm_position": [], "scale_embeddings": []}
    for stack in _STACKS:
        activation = numbers.pop(f"{stack}/activation", 0)
        if activation not in _ACTIVATIONS:
            raise UserError(f"{path}: {stack}/activation is {activation}; known: {_ACTIVATIONS}")
        found["activation"].append(_ACTIVATIONS[activation])
        found["norm_position"].append("pre" if numbers.pop(f"{stack}/pre_norm", 1) else "post")
        old_scale = numbers.pop(f"{stack}/embeddings/multiply_by_sqrt_depth", 1)
        scale = numbers.pop(f"{stack}/scale_embeddings", old_scale)
        # A flag, or the factor itself.
        if not (isinstance(scale, int) or scale == 1 or math.isclose(scale, math.sqrt(d_model), rel_tol=1e-6)):
            raise UserError(f"{path}: {stack}/scale_embeddings is {scale}; only 1 and sqrt(d_model) are known here")
        found["scale_embeddings"].append(bool(scale) if isinstance(scale, int) else scale != 1)
    for name, values in found.items():
        if values[0] != values[1]:
            raise UserError(f"{path}: {name} is {values[0]!r} in the encoder and {values[1]!r} in the decoder")
    return {name: values[0] for name, values in found.items()}


def _final_norm(tensors: dict[str, np.ndarray], path: Path) -> bool:
    found = [f"{stack}/layer_norm/gamma" in tensors for stack in _STACKS]
    if found[0] != found[1]:
        raise UserError(f"{path}: only one of the two stacks ends with a norm (final_norm)")
    return found[0]


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
    for name in names:
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
        "add_source_bos": False,
        "add_source_eos": model.source_eos,
        "bos_token": target[model.bos_id] if model.bos_id < len(target) else "<s>",
        "eos_token": target[model.eos_id],
        "unk_token": source[model.unk_id] if model.unk_id < len(source) else "<unk>",
        "decoder_start_token": target[start],
        "layer_norm_epsilon": model.norm_epsilon,
        "multi_query_attention": False,
    }
