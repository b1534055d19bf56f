"""Tables of names: which tensor of a foreign format is which parameter. One table serves both directions.

A foreign linear layer stores [out, in]. A kernel of this package is [in, out], with the heads as separate axes:

| parameter                          | shape              | foreign tensor       |
|------------------------------------|--------------------|----------------------|
| `query/kernel`, `key/kernel`       | [d_model, h, d_k]  | [h * d_k, d_model]   |
| `value/kernel`                     | [d_model, h, d_v]  | [h * d_v, d_model]   |
| attention's `output/kernel`        | [h, d_v, d_model]  | [d_model, h * d_v]   |
| any other `kernel`                 | [in, out]          | [out, in]            |
| `query/bias`, `key/bias`, ...      | [h, d]             | [h * d]              |
| tables, scales, other biases       | any                | equal shape          |
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import Params, UserError

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Row:
    """One row of a table. `{i}` in a name stands for the index of a layer.

    Attributes:
        foreign: Names of the foreign tensor. The first one is written, all of them are read.
        ours: Paths of the parameters that the foreign tensor holds, stacked along its first axis.
        zeros: Whether the format always has this tensor, with zeros where the model has no such parameter.
        leading: Number of axes of length 1 in front of the foreign tensor's other axes.
        unless: Path of a parameter. The row does not apply to models that have it.
    """

    foreign: tuple[str, ...]
    ours: tuple[str, ...]
    zeros: bool = False
    leading: int = 0
    unless: str = ""

    def at(self, layer: int) -> "Row":
        """Return the row with the index of one layer filled in."""

        def fill(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.replace("{i}", str(layer)) for name in names)

        return dataclasses.replace(self, foreign=fill(self.foreign), ours=fill(self.ours))


@dataclass(frozen=True)
class Table:
    """All rows of a format, and the name endings of foreign tensors that hold no parameter."""

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()


def row(foreign: str | Sequence[str], *ours: str, zeros: bool = False, leading: int = 0, unless: str = "") -> Row:
    """Return a `Row` for one foreign name or several, and one path or several."""
    return Row((foreign,) if isinstance(foreign, str) else tuple(foreign), ours, zeros, leading, unless)


def linear(foreign: str, *ours: str, zeros: bool = False) -> list[Row]:
    """Return the rows of a linear layer: foreign `weight` and `bias` are `kernel` and `bias`."""
    return [
        row(f"{foreign}.weight", *(f"{name}/kernel" for name in ours)),
        row(f"{foreign}.bias", *(f"{name}/bias" for name in ours), zeros=zeros),
    ]


def norm(foreign: str, ours: str, names: tuple[str, str] = ("weight", "bias")) -> list[Row]:
    """Return the rows of a LayerNorm whose foreign scale and shift have the given names."""
    return [row(f"{foreign}.{names[0]}", f"{ours}/scale"), row(f"{foreign}.{names[1]}", f"{ours}/bias")]


def embeddings(source: str | Sequence[str], target: str | Sequence[str], output: str | Sequence[str]) -> list[Row]:
    """Return the rows of the embedding tables and of the output projection, for every way of tying them."""
    return [
        row(source, "embedding/table"),
        row(target, "embedding/table"),
        row(output, "embedding/table"),
        row(source, "source_embedding/table"),
        row(target, "target_embedding/table"),
        row(output, "target_embedding/table", unless="output_projection/kernel"),
        row(output, "output_projection/kernel"),
    ]


def fairseq_stack(stack: str, attentions: Mapping[str, str], prefix: str = "") -> list[Row]:
    """Return the rows of a stack under fairseq's names, which Hugging Face's models use too."""
    there, here = f"{prefix}{stack}.layers.{{i}}", f"{stack}/layer_{{i}}"
    rows: list[Row] = []
    for foreign, ours in attentions.items():
        for projection, name in (("q", "query"), ("k", "key"), ("v", "value"), ("out", "output")):
            rows += linear(f"{there}.{foreign}.{projection}_proj", f"{here}/{ours}/{name}", zeros=True)
        rows += norm(f"{there}.{foreign}_layer_norm", f"{here}/{ours}_norm")
    rows += linear(f"{there}.fc1", f"{here}/feed_forward/inner")
    rows += linear(f"{there}.fc2", f"{here}/feed_forward/outer")
    rows += norm(f"{there}.final_layer_norm", f"{here}/feed_forward_norm")
    return rows + norm(f"{prefix}{stack}.layer_norm", f"{stack}/final_norm")


def flatten(params: Params) -> dict[str, Any]:
    """Return a tree's leaves by path: {"encoder/layer_0/self_attention/query/kernel": array, ...}."""
    return flatten_dict(params, sep="/")


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """Return the tree whose leaves `flatten` returned."""
    return unflatten_dict(leaves, sep="/")


def renamed(tensors: Tensors, rename: Callable[[str], str], origin: str) -> dict[str, np.ndarray]:
    """Return the tensors under other names.

    Raises:
        UserError: Two tensors would get one name.
    """
    old_names: dict[str, str] = {}
    for name in tensors:
        new = rename(name)
        if new in old_names:
            raise UserError(f"{origin}: {old_names[new]} and {name} both mean {new}. Remove one of them")
        old_names[new] = name
    return {new: tensors[name] for new, name in old_names.items()}


def from_foreign(tensors: Tensors, table: Table, config: ModelConfig, origin: str) -> Params:
    """Convert the tensors of a format to parameters, NumPy arrays of the dtype `config.param_dtype`.

    Args:
        tensors: Foreign tensors by name.
        table: Table of the format.
        config: Model that the parameters are for.
        origin: Where the tensors come from, for errors.

    Raises:
        UserError: Tensors are missing or left over, have wrong shapes or values that are not finite, or differ
            although the configuration ties them. All problems are listed.
    """
    wanted = flatten(abstract_params(config))
    dtype = np.dtype(jax.numpy.dtype(config.param_dtype))
    leaves: dict[str, np.ndarray] = {}
    used: set[str] = set()
    problems: list[str] = []
    missing: dict[str, str] = {}
    for item in _rows(table, config, wanted):
        name = next((name for name in item.foreign if name in tensors), None)
        if not all(path in wanted for path in item.ours):
            # A tensor that the model lacks is accepted if it is zero: a bias without effect.
            if name and item.zeros and not np.any(tensors[name]):
                used.add(name)
            continue
        if name is None:
            missing.update(dict.fromkeys(item.ours, item.foreign[0]))
            continue
        used.add(name)
        problems += _read(item, name, tensors[name], wanted, leaves, dtype)
    problems += [f"{name} is missing" for name in sorted({missing[path] for path in missing if path not in leaves})]
    if not problems:
        uncovered = [path for path in wanted if path not in leaves and path not in missing]
        problems += [f"the format has no tensor for {path}" for path in uncovered]
    unused = [name for name in tensors if name not in used and not name.endswith(table.ignored or ("\0",))]
    problems += [f"{name} {list(tensors[name].shape)} is left over" for name in unused]
    if problems:
        raise UserError(f"{origin} does not fit the model: {'; '.join(problems)}")
    return unflatten({path: leaves[path] for path in wanted})


def to_foreign(params: Params, table: Table, config: ModelConfig) -> dict[str, np.ndarray]:
    """Convert the parameters of a model to the tensors of a format.

    Raises:
        UserError: The format has no tensor for a parameter.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    tensors: dict[str, np.ndarray] = {}
    placed: set[str] = set()
    for item in _rows(table, config, leaves):
        if all(path in leaves for path in item.ours):
            parts = [_foreign_layout(path, leaves[path]) for path in item.ours]
            placed.update(item.ours)
        elif item.zeros:
            kernels = [path.removesuffix("bias") + "kernel" for path in item.ours]
            if not all(kernel in leaves for kernel in kernels):
                continue
            parts = [np.zeros(len(_foreign_layout(k, leaves[k])), leaves[k].dtype) for k in kernels]
        else:
            continue
        tensor = np.concatenate(parts)
        tensors[item.foreign[0]] = np.ascontiguousarray(tensor.reshape((1,) * item.leading + tensor.shape))
    unplaced = [path for path in leaves if path not in placed]
    if unplaced:
        raise UserError(f"the format has no tensor for {', '.join(unplaced)}")
    return tensors


def _rows(table: Table, config: ModelConfig, leaves: Mapping[str, Any]) -> Iterable[Row]:
    for item in table.rows:
        if item.unless in leaves:
            continue
        if "{i}" not in item.ours[0]:
            yield item
            continue
        stack = config.encoder if item.ours[0].startswith("encoder/") else config.decoder
        for layer in range(stack.num_layers):
            yield item.at(layer)


def in_dtype(
    name: str, tensor: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
) -> tuple[np.ndarray | None, list[str]]:
    """Return a foreign tensor in another dtype, or None and what is wrong with the tensor."""
    if tensor.shape != shape:
        return None, [f"{name} has shape {list(tensor.shape)}, not {list(shape)}"]
    if not np.issubdtype(tensor.dtype, np.floating):
        return None, [f"{name} holds {tensor.dtype}, not floating-point numbers"]
    with np.errstate(over="ignore"):
        tensor = tensor.astype(dtype, copy=False)  # before the check: a large number may overflow in this dtype
    if not np.all(np.isfinite(tensor)):
        return None, [f"{name} holds numbers that are not finite in {dtype}"]
    return tensor, []


def _read(
    item: Row, name: str, tensor: np.ndarray, wanted: Mapping[str, Any], leaves: dict[str, np.ndarray], dtype: np.dtype
) -> list[str]:
    """Add the parameters that a foreign tensor holds to `leaves`, and return what is wrong with the tensor."""
    shapes = [_foreign_shape(path, wanted[path].shape) for path in item.ours]
    expected = (1,) * item.leading + (sum(shape[0] for shape in shapes), *shapes[0][1:])
    fitting, problems = in_dtype(name, tensor, expected, dtype)
    if fitting is None:
        return problems
    tensor, first = fitting.reshape(expected[item.leading :]), 0
    for path, shape in zip(item.ours, shapes, strict=True):
        # A copy, because the tensor may be a view of a memory-mapped file.
        leaf = np.array(_our_layout(path, tensor[first : first + shape[0]], wanted[path].shape), order="C")
        first += shape[0]
        if path in leaves and not np.array_equal(leaves[path], leaf):
            problems.append(f"{name} differs from the other tensors that are {path}, but the configuration ties them")
        leaves[path] = leaf
    return problems


def _input_axes(path: str) -> int:
    return 2 if path.endswith("attention/output/kernel") else 1


def _foreign_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if path.endswith("kernel"):
        axes = _input_axes(path)
        return int(np.prod(shape[axes:])), int(np.prod(shape[:axes]))
    return (int(np.prod(shape)),) if path.endswith("bias") else shape


def _foreign_layout(path: str, leaf: np.ndarray) -> np.ndarray:
    shape = _foreign_shape(path, leaf.shape)
    return leaf.reshape(shape[::-1]).T if path.endswith("kernel") else leaf.reshape(shape)


def _our_layout(path: str, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return (tensor.T if path.endswith("kernel") else tensor).reshape(shape)
