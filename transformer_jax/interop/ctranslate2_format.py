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

import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.ctranslate2_files import read_model_file, read_tokens, write_model_file
from transformer_jax.interop.exchange import (
    OWN_TOKENIZER,
    Imported,
    ModelFields,
    Positions,
    Settings,
    identify_positions,
    unique_tokens,
    visible_fields,
    warn_about_penalty,
    write_json,
)
from transformer_jax.interop.mapping import names
from transformer_jax.interop.tables import Format, embeddings, flatten, from_foreign, to_foreign, unflatten
from transformer_jax.model.positional import sinusoids
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import read_json
from transformer_jax.types import Params, UserError

_STACKS = ("encoder", "decoder")
_SOURCE = ("encoder/embeddings_0/weight", "encoder/embeddings/weight")
_TARGET, _OUTPUT, _BIAS = "decoder/embeddings/weight", "decoder/projection/weight", "decoder/projection/bias"
_POSITIONS = [f"{stack}/position_encodings/encodings" for stack in _STACKS]
_NEVER = -1e9
"""Finite bias of a token that must have a probability of 0."""
_UNSTORED = Positions("halves", "tensor2tensor", 1)
"""Sinusoids that CTranslate2 computes if the file has no position table."""

CTRANSLATE2 = Format(
    "ctranslate2",
    rows=(
        *embeddings(_SOURCE, (_TARGET,), (_OUTPUT,)),
        *names(
            {
                _BIAS: "logits_bias",
                "{encoder,decoder}/position_encodings/encodings": "{source,target}_positions/table",
                "{layer}/self_attention/linear_0/": "{layer}/self_attention/{query,key,value}",
                "{layer}/self_attention/linear_1/": "{layer}/self_attention/output",
                "{layer}/attention/linear_0/": "{layer}/cross_attention/query",
                "{layer}/attention/linear_1/": "{layer}/cross_attention/{key,value}",
                "{layer}/attention/linear_2/": "{layer}/cross_attention/output",
                "{layer}/ffn/linear_{0,1}/": "{layer}/feed_forward/{inner,outer}",
                "{layer}/{self_attention,attention}/layer_norm/": "{layer}/{self,cross}_attention_norm",
                "{layer}/ffn/layer_norm/": "{layer}/feed_forward_norm",
                "{encoder,decoder}/layer_norm/": "{encoder,decoder}/final_norm",
            },
            "{encoder,decoder}/layer_{i}",
            norm=(("gamma",), ("beta",)),
            zeros=False,
        ),
    ),
    legal=lambda model: {"norm_variant": ("standard",)},
)

_ACTIVATIONS = {0: "relu", 2: "swish", 3: "gelu"}
# Endings of numbers that do not change the result, and of numbers that must be zero.
_IDLE = ("embeddings_merge", "alignment_layer", "alignment_heads", "alibi_use_positive_positions")
_ZERO = ("multi_query_attention", "alibi", "scale_alibi", "with_relative_position")


def read_ctranslate2(folder: Path, num_heads: int | None = None) -> Imported:
    """Read a folder with `model.bin` and its vocabularies, with the decoding defaults of `translate_batch`.

    The tokenizers of a folder that this package wrote take text, others take tokens with spaces between them.
    Files that do not store the number of attention heads need `num_heads`.
    """
    path = folder / "model.bin"
    stored = read_model_file(path)
    numbers = {name: value.item() for name, value in stored.items() if value.ndim == 0}
    tensors = {name: value for name, value in stored.items() if value.ndim}
    settings = _settings(folder, numbers)
    source_rows, target_rows, _ = (_rows(tensors, table, path) for table in (_SOURCE, (_TARGET,), (_OUTPUT,)))
    pair, joint, ids = read_tokens(folder, settings, source_rows, target_rows)
    if ids["pad_id"] >= min(source_rows, target_rows):
        _add_rows(tensors, ids["pad_id"] + 1)
    positions = _positions(tensors)
    fields = visible_fields(tensors, CTRANSLATE2, str(path)) | positions | _flags(numbers, tensors, path)
    fields |= _heads(numbers, num_heads, path)
    if fields["tie_embeddings"] == "all" and not joint:
        fields["tie_embeddings"] = "target"
    for name in [name for name in tensors if "/linear_" in name and name.endswith("/weight")]:
        if "/ffn/" in name or fields["attention_bias"]:  # this package's model always has a bias here
            tensors.setdefault(name.removesuffix("weight") + "bias", np.zeros(len(tensors[name]), np.float32))
    if numbers.pop("decoder/start_from_zero_embedding", 0):
        ids["decoder_start"] = "zeros"
    model = ModelConfig(
        **fields,
        **ids,
        norm_epsilon=settings.read("layer_norm_epsilon", float, 1e-5),
        source_bos=settings.read("add_source_bos", bool),
        source_eos=settings.read("add_source_eos", bool),
    )
    numbers = {name: value for name, value in numbers.items() if name.rpartition("/")[2] not in _IDLE}
    unknown = [f"{n} {value}" for n, value in numbers.items() if n.rpartition("/")[2] not in _ZERO or value]
    require(not unknown, f"{path} has settings that are not supported: {', '.join(unknown)}")
    config = Config(
        model=model,
        data=DataConfig(max_length=min(256, model.max_length)),
        tokenizer=TokenizerConfig(kind=pair.source.kind, joint=joint),
        decoding=DecodingConfig(
            beam_size=2, alpha=1.0, length_penalty="power", stopping="ctranslate2", max_length_offset=128, min_length=1
        ),
    )
    return Imported(config, from_foreign(tensors, CTRANSLATE2, model, str(path)), pair)


def write_ctranslate2(
    folder: Path, config: Config, params: Params, tokenizers: TokenizerPair, warn: Callable[[str], None]
) -> None:
    """Write a folder that `ctranslate2.Translator` loads. Embedding rows beyond the vocabularies are dropped."""
    model, decoding = config.model, config.decoding
    CTRANSLATE2.check(model)
    source, target = unique_tokens(tokenizers.source), unique_tokens(tokenizers.target)
    problem = f"{model.decoder_start!r}, but the vocabulary has no token with the id {model.start_id}"
    has_start = model.decoder_start == "zeros" or model.start_id < len(target)
    require(has_start, f"ctranslate2 cannot express this model: model.decoder_start={problem}")
    bos_token = target[model.bos_id] if model.bos_id < len(target) else "<s>"
    problem = f"model.source_bos=True, but the id {model.bos_id} is not one token of both vocabularies"
    is_shared = source[model.bos_id : model.bos_id + 1] == [bos_token]
    require(is_shared or not model.source_bos, f"ctranslate2 cannot express this model: {problem}")
    variables = to_foreign(_cut(params, model, len(source), len(target)), CTRANSLATE2, model)
    tied = {"all": (_SOURCE[0], _OUTPUT), "target": (_OUTPUT,), "none": ()}[model.tie_embeddings]
    aliases = dict.fromkeys(tied, _TARGET)
    if model.positions != "learned":
        conventions = model.positions, model.position_exponent, model.position_offset
        variables[_POSITIONS[1]] = sinusoids(model.max_length, model.d_model, *conventions)
        aliases[_POSITIONS[0]] = _POSITIONS[1]
    weights = {name: array.astype(np.float32) for name, array in variables.items() if name not in aliases}
    write_model_file(folder / "model.bin", weights | _numbers(model), aliases)
    settings = {
        "add_source_bos": model.source_bos,
        "add_source_eos": model.source_eos,
        "bos_token": bos_token,
        "eos_token": target[model.eos_id],
        "unk_token": source[model.unk_id] if model.unk_id < len(source) else "<unk>",
        "decoder_start_token": target[model.eos_id if model.decoder_start == "zeros" else model.start_id],
        "layer_norm_epsilon": model.norm_epsilon,
        "multi_query_attention": False,
    }
    write_json(folder / "config.json", settings)
    files = {"shared": source} if source == target else {"source": source, "target": target}
    for name, words in files.items():
        write_json(folder / f"{name}_vocabulary.json", words)
    tokenizers.save(folder / OWN_TOKENIZER)
    warn_about_penalty(decoding, "translate_batch", warn)
    if decoding.min_length != 1:
        fact = f"decoding.min_length={decoding.min_length} cannot be stored, and translate_batch assumes 1"
        warn(f"{fact}. Call it with min_decoding_length={decoding.min_length}")
    if decoding.forbidden_ids:
        suppressed = [[word] for word in tokenizers.target.tokens(decoding.forbidden_ids)]
        fix = f"Call translate_batch with suppress_sequences={json.dumps(suppressed, ensure_ascii=False)}"
        warn(f"decoding.forbidden_ids cannot be stored. {fix}")


def _settings(folder: Path, numbers: dict[str, float]) -> Settings:
    """Return the settings of `config.json`, or of `model.bin`, where older versions store them as numbers."""
    defaults = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_source_bos": bool(numbers.pop("with_source_bos", 0)),
        "add_source_eos": bool(numbers.pop("with_source_eos", 0)),
        "decoder_start_token": "<s>" if numbers.pop("with_target_bos", 1) else None,
    }
    path = folder / "config.json"
    stored = read_json(path) if path.is_file() else {}
    if (defaults | stored)["decoder_start_token"] is None:
        raise UserError(f"{path}: decoder_start_token is null, but every sentence must start with the same token")
    settings = Settings((path, defaults), (path, stored))
    settings.require({"multi_query_attention": (False,), "quantization_type": (False,)})
    return settings


def _rows(tensors: dict[str, np.ndarray], names: Sequence[str], path: Path) -> int:
    table = next((tensors[name] for name in names if name in tensors), None)
    if table is None or table.ndim != 2:
        raise UserError(f"{path}: {names[0]} is missing or not a matrix")
    return len(table)


def _add_rows(tensors: dict[str, np.ndarray], rows: int) -> None:
    """Extend tables to `rows` rows with zeros, for a padding token that the file lacks and that is never generated."""
    for name in (*_SOURCE, _TARGET, _OUTPUT):
        if name in tensors and tensors[name].ndim == 2:
            missing = rows - len(tensors[name])
            tensors[name] = np.concatenate([tensors[name], np.zeros((missing, tensors[name].shape[1]), np.float32)])
            if name == _OUTPUT:
                bias = tensors.get(_BIAS, np.zeros(rows - missing, np.float32))
                tensors[_BIAS] = np.concatenate([bias, np.full(missing, _NEVER, np.float32)])


def _heads(numbers: dict[str, float], given: int | None, path: Path) -> ModelFields:
    heads: ModelFields = {}
    old_heads = numbers.pop("num_heads", None)
    for stack, prefix in zip(_STACKS, ("", "decoder_"), strict=True):
        stored = numbers.pop(f"{stack}/num_heads", old_heads)
        number = given if stored is None else stored
        fact = "CTranslate2 itself assumes 8 for such files, and 16 for a TransformerBig"
        problem = f"{path} does not store the number of attention heads"
        require(number is not None, f"{problem}. State it with --num-heads (num_heads=); {fact}")
        problem = f"the {stack} has {stored} attention heads, but num_heads is {given}"
        require(given in (None, number), f"{path}: {problem}")
        heads[f"{prefix}num_heads"] = number
    return heads


def _flags(numbers: dict[str, float], tensors: dict[str, np.ndarray], path: Path) -> ModelFields:
    flags: ModelFields = {}
    for stack in _STACKS:
        activation = numbers.pop(f"{stack}/activation", 0)
        if activation not in _ACTIVATIONS:
            raise UserError(f"{path}: {stack}/activation is {activation}; supported: {_ACTIVATIONS}")
        old_scale = numbers.pop(f"{stack}/embeddings/multiply_by_sqrt_depth", 1)
        scale = numbers.pop(f"{stack}/scale_embeddings", old_scale)
        # A flag, or the factor itself.
        factor = math.sqrt(tensors[_TARGET].shape[1])
        if not (isinstance(scale, int) or scale == 1 or math.isclose(scale, factor, rel_tol=1e-6)):
            raise UserError(f"{path}: {stack}/scale_embeddings is {scale}; only 1 and sqrt(d_model) are supported")
        own: ModelFields = {
            "activation": _ACTIVATIONS[int(activation)],
            "norm_position": "pre" if numbers.pop(f"{stack}/pre_norm", 1) else "post",
            "scale_embeddings": bool(scale) if isinstance(scale, int) else scale != 1,
        }
        for name, value in own.items():
            if flags.setdefault(name, value) != value:
                raise UserError(f"{path}: {name} is {flags[name]!r} in the encoder and {value!r} in the decoder")
    return flags


def _positions(tensors: dict[str, np.ndarray]) -> ModelFields:
    """Return the positions, and leave only learned tables among the tensors."""
    tables = [tensors[name] for name in _POSITIONS if name in tensors and tensors[name].ndim == 2]
    if not tables:
        return _UNSTORED._asdict()
    length = min(len(table) for table in tables)
    kinds = [identify_positions(table) for table in tables] + [_UNSTORED] * (2 - len(tables))
    if kinds[0] is not None and kinds[0] == kinds[1]:
        for name in _POSITIONS:
            tensors.pop(name, None)
        return kinds[0]._asdict() | {"max_length": length}
    for name in _POSITIONS:  # a missing table is the one that CTranslate2 computes
        table = tensors[name] if name in tensors else sinusoids(length, tables[0].shape[1], *_UNSTORED)
        tensors[name] = np.asarray(table[:length], np.float32)
    return {"positions": "learned", "max_length": length}


def _numbers(model: ModelConfig) -> dict[str, np.ndarray]:
    code = next(code for code, name in _ACTIVATIONS.items() if name == model.activation)
    unused = "decoder/alibi", "decoder/alibi_use_positive_positions", "decoder/scale_alibi"
    numbers: dict[str, np.generic] = {
        **dict.fromkeys(("encoder/embeddings_merge", "encoder/multi_query_attention", *unused), np.int8(0)),
        "decoder/alignment_heads": np.int16(1),
        "decoder/alignment_layer": np.int16(-1),
        "decoder/start_from_zero_embedding": np.int8(model.decoder_start == "zeros"),
    }
    for stack in _STACKS:
        numbers |= {
            f"{stack}/num_heads": np.int16(getattr(model, stack).num_heads),
            f"{stack}/pre_norm": np.int8(model.norm_position == "pre"),
            f"{stack}/activation": np.int8(code),
            f"{stack}/scale_embeddings": np.int8(model.scale_embeddings),
        }
    return {name: np.asarray(number) for name, number in numbers.items()}


def _cut(params: Params, model: ModelConfig, source_rows: int, target_rows: int) -> Params:
    """Drop the embedding rows beyond the vocabularies and the learned positions before `position_offset`."""
    leaves = flatten(params)
    rows: dict[str, slice | tuple[slice, slice]] = {
        "embedding/table": slice(target_rows),
        "source_embedding/table": slice(source_rows),
        "target_embedding/table": slice(target_rows),
        "output_projection/kernel": (slice(None), slice(target_rows)),
        "logits_bias": slice(target_rows),
        "source_positions/table": slice(model.position_offset, None),
        "target_positions/table": slice(model.position_offset, None),
    }
    return unflatten({name: np.asarray(leaf)[rows.get(name, slice(None))] for name, leaf in leaves.items()})
