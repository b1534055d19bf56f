"""What the formats share: the imported model, its configuration from settings or from tensors, and names of tokens."""

import dataclasses
import itertools
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.tables import Format, Tensors
from transformer_jax.model.positional import sinusoids
from transformer_jax.runtime.files import to_json
from transformer_jax.types import Params, UserError

logger = logging.getLogger(__name__)

ModelFields = dict[str, Any]
"""Values of fields of `ModelConfig`, which checks them."""

OWN_TOKENIZER = "tokenizer"
"""Subfolder of an exported folder with this package's own tokenizer files. Other programs ignore it."""
SPECIAL = ("pad", "bos", "eos", "unk")

INVISIBLE = {
    "num_heads": "the number of attention heads",
    "source_bos": "whether its batches start the source with BOS, as annotated-transformer's <s> source </s> does",
    "norm_position": "'post' for norm_first=False, 'pre' for norm_first=True",
    "norm_variant": "'standard' as torch.nn.LayerNorm, or 'unbiased_std' as annotated-transformer's a_2 and b_2",
    "activation": "relu, gelu or swish",
    "scale_embeddings": "whether embeddings are multiplied by sqrt(d_model)",
    "positions": "interleaved (the paper's sinusoids), halves or learned",
}
"""Fields of `ModelConfig` that change the output and cannot be inferred from tensors, each with an explanation."""

ASSUMED = ("norm_epsilon", "position_exponent", "position_offset", "decoder_start", "source_eos")
"""Fields of `ModelConfig` that cannot be inferred from tensors and have a default unless the user passes a value."""

T = TypeVar("T", bool, int, float, str)
_LEGAL = {bool: "true or false", int: "an integer of at least 0", float: "a number of at least 0", str: "a text"}


class Imported(NamedTuple):
    """A model that was read from third-party files."""

    config: Config
    params: Params  # NumPy arrays
    tokenizers: TokenizerPair


class Settings:
    """Settings of a third-party model by name. Later files override earlier ones, except where they have null."""

    def __init__(self, *files: tuple[Path, Mapping[str, object]]) -> None:
        self._default_file = files[0][0]
        self._settings = {
            name: (value, file) for file, settings in files for name, value in settings.items() if value is not None
        }

    def get(self, name: str, default: object = None) -> object:
        """Return a setting without checking its type."""
        return self._settings[name][0] if name in self._settings else default

    def read(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a setting of the given type. A setting without a default must exist. Numbers are at least 0."""
        value = self.get(name, default)
        if kind is int and isinstance(value, list) and len(value) == 1:  # as transformers stores some ids
            value = value[0]
        is_legal = type(value) in ((int, float) if kind is float else (kind,))
        if not is_legal or (isinstance(value, int | float) and not value >= 0):
            raise self.error(name, _LEGAL[kind])
        return kind(cast(T, value))

    def require(self, legal: Mapping[str, tuple[object, ...]]) -> None:
        """Check the settings that change the output. A setting without legal values must be absent or null."""
        for name, values in legal.items():
            if name in self._settings and self.get(name) not in values:
                raise self.error(name, " or ".join(map(repr, values)) if values else "null")

    def error(self, name: str, legal: str) -> UserError:
        """Return an error about a setting that cannot be used."""
        value, file = self._settings.get(name, (None, self._default_file))
        return UserError(
            f"{file}: the setting {name} is {'missing' if value is None else repr(value)}; only {legal} is supported"
        )


def write_json(path: Path, tree: object) -> None:
    """Write a tree of dicts, lists and scalars as indented JSON."""
    path.write_text(to_json(tree, indent=2) + "\n", encoding="utf-8")


def warn_about_penalty(decoding: DecodingConfig, program: str, warn: Callable[[str], None]) -> None:
    """Warn that a program has another length penalty than a beam search."""
    if decoding.length_penalty == "gnmt" and decoding.beam_size > 1:
        fact = f"{program} has only length^alpha: its length_penalty={decoding.alpha} prefers other lengths"
        warn(f"decoding.length_penalty='gnmt', but {fact}")


def unique_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the token of each id, with a special token renamed if a word of the vocabulary is spelled like it."""
    words = tokenizer.tokens(range(tokenizer.vocab_size))
    for name in SPECIAL:
        i = getattr(tokenizer, f"{name}_id")
        while i is not None and i < len(words) and words.count(words[i]) > 1:
            words[i] = f"{words[i][:-1]}_>"
    return words


def propose_config(
    tensors: Tensors, table: Format, tokenizers: TokenizerPair | None, stated: Mapping[str, object], origin: str
) -> Config:
    """Infer a configuration from a state dict. Without tokenizers it has this package's special ids."""
    visible = visible_fields(table.prepare(tensors, origin), table, origin)
    stated = {**table.conventions, **stated}
    missing = {name: why for name, why in INVISIBLE.items() if name not in {**visible, **stated}}
    if missing:
        shown = ", ".join(f"{name}={value!r}" for name, value in visible.items())
        flags = "; ".join(f"--{name.replace('_', '-')} ({why})" for name, why in missing.items())
        problem = f"{origin}: the tensors determine {shown}, but not {', '.join(missing)}"
        raise UserError(f"{problem}. Pass {flags}. Or pass a complete configuration with --config")
    special = [f"{name}_id" for name in SPECIAL]
    ids = {name: getattr(tokenizers.source, name) for name in special} if tokenizers else {}
    ids = {name: ids["pad_id"] if value is None else value for name, value in ids.items()}
    fields: ModelFields = {**ids, **visible, **stated}
    model = ModelConfig(**fields)

    def values(names: list[str]) -> str:
        return ", ".join(f"{name}={getattr(model, name)!r}" for name in names)

    changed = [field.name for field in dataclasses.fields(model) if getattr(model, field.name) != field.default]
    logger.info("%s: configuration inferred from the tensors: %s", origin, values(changed))
    hidden = [name for name in (*INVISIBLE, *ASSUMED, *([] if tokenizers else special)) if name not in visible]
    logger.info("%s: fields that the tensors do not determine, passed or assumed: %s", origin, values(hidden))
    tokenizer = TokenizerConfig(joint=model.tie_embeddings == "all")
    if tokenizers:
        tokenizer = TokenizerConfig(kind=tokenizers.source.kind, joint=tokenizers.joint)
    return Config(model=model, data=DataConfig(max_length=training_length(model)), tokenizer=tokenizer)


def training_length(model: ModelConfig) -> int:
    """Return `data.max_length` for fine-tuning a model, whose position tables may be short."""
    return min(256, model.max_length - model.position_offset)


def visible_fields(tensors: Tensors, table: Format, origin: str) -> ModelFields:
    """Infer the fields of `ModelConfig` that the tensors of a state dict determine, such as sizes and biases."""
    by_path = _tensors_by_path(tensors, table)

    def need(path: str) -> np.ndarray:
        if path not in by_path or by_path[path].ndim != 2:
            names = next((item.at(0).foreign for item in table.rows if path in item.at(0).ours), (path,))
            raise UserError(f"{origin}: {' or '.join(names)} is missing or not a matrix")
        return by_path[path]

    target = need("target_embedding/table" if "target_embedding/table" in by_path else "embedding/table")
    source = by_path.get("source_embedding/table", target)
    output = by_path.get("output_projection/kernel", target)
    fields: ModelFields = {
        "vocab_size": len(target),
        "source_vocab_size": None if len(source) == len(target) else len(source),
        "d_model": target.shape[1],
    }
    for stack, prefix in (("encoder", ""), ("decoder", "decoder_")):
        inner = "{}/layer_{}/feed_forward/inner/kernel"
        first = need(inner.format(stack, 0))
        num_layers = next(i for i in itertools.count(1) if inner.format(stack, i) not in by_path)
        sizes = {"num_layers": num_layers, "d_ff": len(first)}
        fields |= {prefix + name: size for name, size in sizes.items() if not prefix or fields[name] != size}
    return fields | {
        "tie_embeddings": _tying(table, source, target, output),
        "attention_bias": _has_attention_biases(table, by_path),
        "logits_bias": "logits_bias" in by_path,
        "final_norm": "encoder/final_norm/scale" in by_path,
        **_visible_positions(tensors, table, by_path),
    }


def _tying(table: Format, source: np.ndarray, target: np.ndarray, output: np.ndarray) -> str:
    if table.is_mapping:  # two of its tensors stay two parameters, even if their values are equal
        paths = {path for item in table.rows for path in item.ours}
        return "all" if "embedding/table" in paths else "none" if "output_projection/kernel" in paths else "target"
    if not np.array_equal(output, target):
        return "none"
    return "all" if np.array_equal(source, target) else "target"


def _has_attention_biases(table: Format, by_path: Tensors) -> bool:
    """Return whether attention has biases. Where the format always stores them, biases of zeros mean none."""
    optional = {re.sub(r"layer_\d+", "layer_{i}", path) for item in table.rows if item.zeros for path in item.ours}
    return any(
        table.is_mapping or re.sub(r"layer_\d+", "layer_{i}", path) not in optional or bool(tensor.any())
        for path, tensor in by_path.items()
        if re.search(r"attention/\w+/bias$", path)
    )


def _visible_positions(tensors: Tensors, table: Format, by_path: Tensors) -> ModelFields:
    learned = by_path.get("source_positions/table")
    if learned is not None:
        return {"positions": "learned", "max_length": len(learned)}
    for name, tensor in tensors.items():
        stored = np.squeeze(tensor)
        if name.endswith(table.ignored or ("\0",)) and stored.ndim == 2 and stored.size:
            kind = identify_positions(stored)
            if kind is not None:
                return kind._asdict()
    return {}


def _tensors_by_path(tensors: Tensors, table: Format) -> dict[str, np.ndarray]:
    """Return the foreign tensor that holds each parameter, by the parameter's path."""
    layers = sorted({int(number) for name in tensors for number in re.findall(r"(?<!\d)\d{1,4}(?!\d)", name)})
    by_path: dict[str, np.ndarray] = {}
    for item in table.rows:
        for filled in [item.at(layer) for layer in layers] if "{i}" in item.foreign[0] else [item]:
            if (name := filled.find(tensors)) is not None:
                by_path = dict.fromkeys(filled.ours, tensors[name]) | by_path
    return by_path


class Positions(NamedTuple):
    """Fields of `ModelConfig` that describe a table of sinusoids."""

    positions: Literal["interleaved", "halves"]
    position_exponent: Literal["paper", "tensor2tensor"]
    position_offset: int


def identify_positions(table: np.ndarray) -> Positions | None:
    """Return the conventions of the sinusoids in a table, or None for a learned table or other sinusoids.

    The tolerance grows with the position, because other programs compute the angles in float32.
    """
    rows, d_model = table.shape
    tolerance = 1e-6 + 2e-7 * np.arange(rows)[:, None]
    candidates = [
        Positions(layout, exponent, offset)
        for layout in ("interleaved", "halves")
        for exponent in ("paper", "tensor2tensor")
        for offset in range(4)
        if rows and d_model % 2 == 0 and (exponent == "paper" or d_model >= 4)
    ]
    for kind in candidates:
        # The first rows exclude most conventions before a long table is computed.
        if all(np.all(np.abs(table[:n] - sinusoids(n, d_model, *kind)) <= tolerance[:n]) for n in (min(rows, 8), rows)):
            return kind
    return None
