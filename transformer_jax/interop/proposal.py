"""A configuration proposed from the tensors of a state dict, for an import without a configuration file.

Sizes, biases, tied tables, final norms and position tables are visible in the tensors. The fields in `INVISIBLE` are
not: the user states them. Those in `ASSUMED` have a usual value, which is logged.
"""

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from transformer_jax.config import Config, DataConfig, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.exchange import Tying, identify_positions
from transformer_jax.interop.tables import Table, Tensors
from transformer_jax.interop.torch_format import (
    ANNOTATED_CONVENTIONS,
    TABLE,
    annotated_layout,
    standard_torch_names,
)
from transformer_jax.types import UserError

logger = logging.getLogger(__name__)

INVISIBLE = {
    "num_heads": "the number of attention heads",
    "source_bos": "whether its batches start the source with BOS, as annotated-transformer's <s> source </s> does",
    "norm_position": "'post' for norm_first=False, 'pre' for norm_first=True",
    "norm_variant": "'standard' as torch.nn.LayerNorm, or 'unbiased_std' as annotated-transformer's a_2 and b_2",
    "activation": "relu, gelu or swish",
    "scale_embeddings": "whether embeddings are multiplied by sqrt(d_model)",
    "positions": "interleaved (the paper's sinusoids), halves or learned",
}
"""Fields of `ModelConfig` that change the function and that tensors cannot show, each with an explanation."""

ASSUMED = ("norm_epsilon", "position_exponent", "position_offset", "decoder_start", "source_eos")
"""Fields of `ModelConfig` that tensors cannot show and that take a usual value unless the user states another."""

SPECIAL_IDS = ("pad_id", "bos_id", "eos_id", "unk_id")
"""Fields of `ModelConfig` that the tokenizers state."""


def propose_config(
    tensors: Tensors,
    table: Table,
    tokenizers: TokenizerPair | None,
    stated: Mapping[str, object],
    origin: str,
    is_mapping: bool = False,
) -> Config:
    """Return a configuration for a state dict.

    Args:
        tensors: Tensors of the state dict.
        table: Table of its format.
        tokenizers: Tokenizers of the model, which state the special ids. None assumes the ids of this package.
        stated: Fields of `ModelConfig` that the user or the format states.
        origin: Where the tensors come from, for errors.
        is_mapping: Whether the table is a mapping file, which decides by itself what is tied and what has biases.

    Raises:
        UserError: A field that the tensors cannot show is not stated, or the tensors are not those of a Transformer.
    """
    visible = visible_fields(tensors, table, origin, is_mapping)
    missing = {name: why for name, why in INVISIBLE.items() if name not in {**visible, **stated}}
    shown = ", ".join(f"{name}={value!r}" for name, value in visible.items())
    if missing:
        flags = "; ".join(f"--{name.replace('_', '-')} ({why})" for name, why in missing.items())
        raise UserError(
            f"{origin}: the tensors show {shown}, but they cannot show {', '.join(missing)}. State {flags}. "
            "Or pass a complete configuration with --config"
        )
    ids = {name: getattr(tokenizers.source, name) for name in SPECIAL_IDS} if tokenizers else {}
    ids = {name: ids["pad_id"] if value is None else value for name, value in ids.items()}
    model = ModelConfig(**{**ids, **visible, **stated})
    changes = ", ".join(
        f"{field.name}={getattr(model, field.name)!r}"
        for field in dataclasses.fields(ModelConfig)
        if getattr(model, field.name) != field.default
    )
    logger.info("%s: configuration proposed from the tensors: %s", origin, changes)
    invisible = (*INVISIBLE, *ASSUMED, *(() if tokenizers else SPECIAL_IDS))
    hidden = ", ".join(f"{name}={getattr(model, name)!r}" for name in invisible if name not in visible)
    logger.info("%s: the tensors do not show these fields, which are stated or assumed: %s", origin, hidden)
    return Config(
        model=model,
        data=DataConfig(max_length=min(256, model.max_length - model.position_offset)),
        tokenizer=TokenizerConfig(kind=tokenizers.source.kind, joint=tokenizers.joint)
        if tokenizers
        else TokenizerConfig(joint=model.tie_embeddings == "all"),
    )


def propose_standard_config(
    tensors: Tensors, source: str, tokenizers: TokenizerPair | None, stated: Mapping[str, object], origin: str
) -> Config:
    """Return a configuration for a state dict of the format torch or annotated, as `propose_config` does."""
    if source == "torch":
        usual: dict[str, object] = {"norm_epsilon": 1e-5, "norm_variant": "standard"}
        tensors, table = standard_torch_names(tensors, origin), TABLE
    else:
        usual, table = {**ANNOTATED_CONVENTIONS, "norm_epsilon": 1e-6}, annotated_layout(tensors)
    return propose_config(tensors, table, tokenizers, {**usual, **stated}, origin)


def visible_fields(tensors: Tensors, table: Table, origin: str, is_mapping: bool = False) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that the tensors of a state dict show.

    Raises:
        UserError: An embedding table or a feed-forward projection is missing.
    """
    by_path = _tensors_by_path(tensors, table)

    def need(path: str) -> np.ndarray:
        if path not in by_path or by_path[path].ndim != 2:
            names = next((item.foreign for item in table.rows if path in item.ours), (path,))
            raise UserError(f"{origin}: {' or '.join(names)} is missing or not a matrix")
        return by_path[path]

    target = need("target_embedding/table" if "target_embedding/table" in by_path else "embedding/table")
    source = by_path.get("source_embedding/table", target)
    output = by_path.get("output_projection/kernel", target)
    fields: dict[str, Any] = {
        "vocab_size": len(target),
        "source_vocab_size": None if len(source) == len(target) else len(source),
        "d_model": target.shape[1],
    }
    for stack, prefix in (("encoder", ""), ("decoder", "decoder_")):
        inner = need(f"{stack}/layer_0/feed_forward/inner/kernel")
        fields[f"{prefix}num_layers"] = _count_layers(by_path, stack)
        fields[f"{prefix}d_ff"] = len(inner)
    for name in ("num_layers", "d_ff"):
        if fields[f"decoder_{name}"] == fields[name]:
            del fields[f"decoder_{name}"]
    fields["tie_embeddings"] = _mapped_tying(table) if is_mapping else _tying(source, target, output)
    fields["attention_bias"] = _has_attention_biases(table, by_path, is_mapping)
    fields["logits_bias"] = "logits_bias" in by_path
    fields["final_norm"] = "encoder/final_norm/scale" in by_path
    return fields | _visible_positions(tensors, table, by_path)


def _mapped_tying(table: Table) -> Tying:
    """Return what a mapping ties: two of its tensors stay two parameters, even if their values are equal."""
    paths = {path for item in table.rows for path in item.ours}
    if "embedding/table" in paths:
        return "all"
    return "none" if "output_projection/kernel" in paths else "target"


def _tying(source: np.ndarray, target: np.ndarray, output: np.ndarray) -> Tying:
    if not np.array_equal(output, target):
        return "none"
    return "all" if np.array_equal(source, target) else "target"


def _has_attention_biases(table: Table, by_path: Mapping[str, np.ndarray], is_mapping: bool) -> bool:
    """Return whether attention has biases. Where the format always stores them, biases of zeros mean none."""
    biases = [path for path in by_path if re.search(r"attention/\w+/bias$", path)]
    optional = {re.sub(r"layer_\d+", "layer_{i}", path) for item in table.rows if item.zeros for path in item.ours}
    return any(
        is_mapping or re.sub(r"layer_\d+", "layer_{i}", path) not in optional or bool(by_path[path].any())
        for path in biases
    )


def _visible_positions(tensors: Tensors, table: Table, by_path: Mapping[str, np.ndarray]) -> dict[str, Any]:
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


def _count_layers(by_path: Mapping[str, np.ndarray], stack: str) -> int:
    count = 0
    while f"{stack}/layer_{count}/feed_forward/inner/kernel" in by_path:
        count += 1
    return count


def _tensors_by_path(tensors: Tensors, table: Table) -> dict[str, np.ndarray]:
    """Return the foreign tensor that holds each parameter, by the parameter's path."""
    layers = {int(number) for name in tensors for number in re.findall(r"(?<!\d)\d{1,4}(?!\d)", name)}

    def rows() -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
        for item in table.rows:
            for layer in sorted(layers) if any("{i}" in name for name in item.foreign) else (0,):
                filled = item.at(layer)
                yield filled.foreign, filled.ours

    by_path: dict[str, np.ndarray] = {}
    for foreign, ours in rows():
        name = next((name for name in foreign if name in tensors), None)
        if name is not None:
            by_path |= {path: tensors[name] for path in ours if path not in by_path}
    return by_path
