"""The weights of CTranslate2's Transformer: names, tied tables, position tables."""

from collections.abc import Mapping, MutableMapping

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.interop.exchange import Positions, Tying
from transformer_jax.interop.tables import Row, Table, embeddings, flatten, row, unflatten
from transformer_jax.model.positional import sinusoids
from transformer_jax.types import Params

SOURCE = ("encoder/embeddings_0/weight", "encoder/embeddings/weight")
TARGET, OUTPUT, OUTPUT_BIAS = "decoder/embeddings/weight", "decoder/projection/weight", "decoder/projection/bias"
NEVER = -1e9
"""Finite bias of a token that must have a probability of 0."""


def _linear(foreign: str, *ours: str) -> list[Row]:
    return [row(f"{foreign}/{there}", *(f"{name}/{here}" for name in ours)) for there, here in _PARTS]


_PARTS = (("weight", "kernel"), ("bias", "bias"))


def _norm(foreign: str, ours: str) -> list[Row]:
    return [row(f"{foreign}/layer_norm/{there}", f"{ours}/{here}") for there, here in _NORM_PARTS]


_NORM_PARTS = (("gamma", "scale"), ("beta", "bias"))


def _layers(stack: str) -> list[Row]:
    there, here = f"{stack}/layer_{{i}}", f"{stack}/layer_{{i}}"
    own = [f"{here}/self_attention/{name}" for name in ("query", "key", "value")]
    rows = _linear(f"{there}/self_attention/linear_0", *own)
    rows += _linear(f"{there}/self_attention/linear_1", f"{here}/self_attention/output")
    rows += _norm(f"{there}/self_attention", f"{here}/self_attention_norm")
    if stack == "decoder":
        query, key, value = (f"{here}/cross_attention/{name}" for name in ("query", "key", "value"))
        rows += _linear(f"{there}/attention/linear_0", query)
        rows += _linear(f"{there}/attention/linear_1", key, value)
        rows += _linear(f"{there}/attention/linear_2", f"{here}/cross_attention/output")
        rows += _norm(f"{there}/attention", f"{here}/cross_attention_norm")
    rows += _linear(f"{there}/ffn/linear_0", f"{here}/feed_forward/inner")
    rows += _linear(f"{there}/ffn/linear_1", f"{here}/feed_forward/outer")
    rows += _norm(f"{there}/ffn", f"{here}/feed_forward_norm")
    return rows + _norm(stack, f"{stack}/final_norm")


TABLE = Table(
    rows=(
        *embeddings(SOURCE, TARGET, OUTPUT),
        row(OUTPUT_BIAS, "logits_bias"),
        row("encoder/position_encodings/encodings", "source_positions/table"),
        row("decoder/position_encodings/encodings", "target_positions/table"),
        *_layers("encoder"),
        *_layers("decoder"),
    )
)


def find_tie(tensors: Mapping[str, np.ndarray], one_vocabulary: bool) -> Tying:
    """Return `model.tie_embeddings`: which tables are equal, whether the file stores them once or repeatedly."""
    source = next((tensors[name] for name in SOURCE if name in tensors), None)
    if source is None or TARGET not in tensors or OUTPUT not in tensors:
        return "none"  # missing tensors are listed when the weights are read
    if not np.array_equal(tensors[TARGET], tensors[OUTPUT]):
        return "none"
    return "all" if one_vocabulary and np.array_equal(source, tensors[TARGET]) else "target"


def add_zero_biases(tensors: MutableMapping[str, np.ndarray], attention_bias: bool) -> None:
    """Add a bias of zeros to linear layers without one, where this package's model always has a bias."""
    for name in [name for name in tensors if "/linear_" in name and name.endswith("/weight")]:
        if "/ffn/" in name or attention_bias:
            bias = name.removesuffix("weight") + "bias"
            tensors.setdefault(bias, np.zeros(len(tensors[name]), np.float32))


def add_rows(tensors: MutableMapping[str, np.ndarray], rows: int) -> None:
    """Extend every table to `rows` rows with zeros that are never generated, for a padding that the file lacks."""
    for name in (*SOURCE, TARGET, OUTPUT):
        if name in tensors and tensors[name].ndim == 2:
            missing = rows - len(tensors[name])
            tensors[name] = np.concatenate([tensors[name], np.zeros((missing, tensors[name].shape[1]), np.float32)])
            if name == OUTPUT:
                bias = tensors.get(OUTPUT_BIAS, np.zeros(rows - missing, np.float32))
                tensors[OUTPUT_BIAS] = np.concatenate([bias, np.full(missing, NEVER, np.float32)])


def cut_rows(params: Params, source_rows: int, target_rows: int) -> Params:
    """Return the parameters without the table rows beyond the vocabularies."""
    leaves = flatten(params)
    for name, rows, axis in (
        ("embedding/table", target_rows, 0),
        ("source_embedding/table", source_rows, 0),
        ("target_embedding/table", target_rows, 0),
        ("output_projection/kernel", target_rows, 1),
        ("logits_bias", target_rows, 0),
    ):
        if name in leaves:
            leaf = np.asarray(leaves[name])
            leaves[name] = leaf[:rows] if axis == 0 else leaf[:, :rows]
    return unflatten(leaves)


UNSTORED = Positions("halves", "tensor2tensor", 1)
"""Sinusoids that CTranslate2 computes if the file has no position table."""


def position_tables(params: Params, model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the position tables of both stacks, `model.max_length` rows from the model's first position on."""
    names = ("encoder/position_encodings/encodings", "decoder/position_encodings/encodings")
    if model.positions == "learned":
        sides = ("source_positions", "target_positions")
        return {
            name: np.asarray(params[side]["table"])[model.position_offset :]
            for name, side in zip(names, sides, strict=True)
        }
    table = sinusoids(model.max_length, model.d_model, model.positions, model.position_exponent, model.position_offset)
    return dict.fromkeys(names, table)
