"""Tables of names: which tensor of a foreign format is which parameter here. One table serves both directions.

A foreign linear layer holds [out, in], ours a kernel [in, out] whose heads are axes of their own:

| here                               | shape              | there                |
|------------------------------------|--------------------|----------------------|
| `query/kernel`, `key/kernel`       | [d_model, h, d_k]  | [h * d_k, d_model]   |
| `value/kernel`                     | [d_model, h, d_v]  | [h * d_v, d_model]   |
| attention's `output/kernel`        | [h, d_v, d_model]  | [d_model, h * d_v]   |
| any other `kernel`                 | [in, out]          | [out, in]            |
| `query/bias`, `key/bias`, ...      | [h, d]             | [h * d]              |
| tables, scales, other biases       |                    | the same             |
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
    """One line of a table. `{i}` in a name stands for the number of a layer.

    Args:
        foreign: the tensor's name there; of several the first is the one that is written, the others are read too.
        ours: the parameter's path here; of several, their matrices stand one below the other in the foreign tensor.
        zeros: the format always has this tensor, and it is zero where the model here has no such parameter.
        leading: the foreign tensor has so many axes of length 1 before its own.
        unless: the row does not count for a model that has this parameter.
    """

    foreign: tuple[str, ...]
    ours: tuple[str, ...]
    zeros: bool = False
    leading: int = 0
    unless: str = ""

    def at(self, layer: int) -> "Row":
        """The row of one layer."""

        def fill(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.replace("{i}", str(layer)) for name in names)

        return dataclasses.replace(self, foreign=fill(self.foreign), ours=fill(self.ours))


@dataclass(frozen=True)
class Table:
    """All rows of a format, and the endings of the names of foreign tensors that hold no parameter."""

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()


def row(foreign: str | Sequence[str], *ours: str, zeros: bool = False, leading: int = 0, unless: str = "") -> Row:
    """A `Row`, its names given one by one."""
    return Row((foreign,) if isinstance(foreign, str) else tuple(foreign), ours, zeros, leading, unless)


def linear(foreign: str, *ours: str, zeros: bool = False) -> list[Row]:
    """The rows of a linear layer: `weight` and `bias` there, `kernel` and `bias` here."""
    return [
        row(f"{foreign}.weight", *(f"{name}/kernel" for name in ours)),
        row(f"{foreign}.bias", *(f"{name}/bias" for name in ours), zeros=zeros),
    ]


def norm(foreign: str, ours: str, names: tuple[str, str] = ("weight", "bias")) -> list[Row]:
    """The rows of a LayerNorm."""
    return [row(f"{foreign}.{names[0]}", f"{ours}/scale"), row(f"{foreign}.{names[1]}", f"{ours}/bias")]


def embeddings(source: str | Sequence[str], target: str | Sequence[str], output: str | Sequence[str]) -> list[Row]:
    """The rows of the tables and of the output's matrix, however many of them are one: tied ones must agree."""
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
    """The rows of a stack under fairseq's names, which Hugging Face's models took over."""
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
    """{"encoder/layer_0/self_attention/query/kernel": array, ...}."""
    return flatten_dict(params, sep="/")


def unflatten(leaves: Mapping[str, Any]) -> Params:
    """The reverse of `flatten`."""
    return unflatten_dict(leaves, sep="/")


def renamed(tensors: Tensors, rename: Callable[[str], str], origin: str) -> dict[str, np.ndarray]:
    """The tensors under other names.

    Raises:
        UserError: two of them would get one name.
    """
    found: dict[str, tuple[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        new = rename(name)
        if new in found:
            raise UserError(f"{origin}: {found[new][0]} and {name} both stand for {new}; only one may be there")
        found[new] = (name, tensor)
    return {new: tensor for new, (_, tensor) in found.items()}


def from_foreign(tensors: Tensors, table: Table, config: ModelConfig, origin: str) -> Params:
    """The parameters of the model of `config`, as NumPy arrays of its `param_dtype`, from a format's tensors.

    Raises:
        UserError: names that are missing or left over, wrong shapes, values that are not finite, tables that the
            configuration ties and that differ: all of them are listed.
    """
    wanted = flatten(abstract_params(config))
    dtype = np.dtype(jax.numpy.dtype(config.param_dtype))
    found: dict[str, np.ndarray] = {}
    used: set[str] = set()
    problems: list[str] = []
    missing: dict[str, str] = {}
    for item in _rows(table, config, wanted):
        name = next((name for name in item.foreign if name in tensors), None)
        if not all(path in wanted for path in item.ours):
            # What the model here lacks may be there if it is zero: a bias that does nothing.
            if name and item.zeros and not np.any(tensors[name]):
                used.add(name)
            continue
        if name is None:
            missing.update(dict.fromkeys(item.ours, item.foreign[0]))
            continue
        used.add(name)
        problems += _read(item, name, tensors[name], wanted, found, dtype)
    problems += [f"{name} is missing" for name in sorted({missing[path] for path in missing if path not in found})]
    uncovered = [path for path in wanted if path not in found and path not in missing]
    if not problems:
        problems += [f"the format has no place for {path}" for path in uncovered]
    left = [name for name in tensors if name not in used and not name.endswith(table.ignored or ("\0",))]
    problems += [f"{name} {list(tensors[name].shape)} is left over" for name in left]
    if problems:
        raise UserError(f"{origin} does not fit the model: {'; '.join(problems)}")
    return unflatten({path: found[path] for path in wanted})


def to_foreign(params: Params, table: Table, config: ModelConfig) -> dict[str, np.ndarray]:
    """A format's tensors, from the parameters of the model of `config`.

    Raises:
        UserError: a parameter has no place in the format.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    tensors: dict[str, np.ndarray] = {}
    placed: set[str] = set()
    for item in _rows(table, config, leaves):
        have = [path in leaves for path in item.ours]
        if all(have):
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
    homeless = [path for path in leaves if path not in placed]
    if homeless:
        raise UserError(f"the format has no place for {', '.join(homeless)}")
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
    """A foreign tensor in the dtype of the model here, or None and what is wrong with it."""
    if tensor.shape != shape:
        return None, [f"{name} has shape {list(tensor.shape)}, not {list(shape)}"]
    if not np.issubdtype(tensor.dtype, np.floating):
        return None, [f"{name} holds {tensor.dtype}, not floating-point numbers"]
    with np.errstate(over="ignore"):
        tensor = tensor.astype(dtype, copy=False)  # first: a large number may be none in this dtype
    if not np.all(np.isfinite(tensor)):
        return None, [f"{name} holds numbers that are not finite in {dtype}"]
    return tensor, []


def _read(
    item: Row, name: str, tensor: np.ndarray, wanted: Mapping[str, Any], found: dict[str, np.ndarray], dtype: np.dtype
) -> list[str]:
    """Puts what a foreign tensor holds into `found`; returns what is wrong with it."""
    shapes = [_foreign_shape(path, wanted[path].shape) for path in item.ours]
    expected = (1,) * item.leading + (sum(shape[0] for shape in shapes), *shapes[0][1:])
    fitting, problems = in_dtype(name, tensor, expected, dtype)
    if fitting is None:
        return problems
    tensor, first = fitting.reshape(expected[item.leading :]), 0
    for path, shape in zip(item.ours, shapes, strict=True):
        # A copy: the tensor may be a window on a file that changes.
        leaf = np.array(_our_layout(path, tensor[first : first + shape[0]], wanted[path].shape), order="C")
        first += shape[0]
        if path in found and not np.array_equal(found[path], leaf):
            problems.append(f"{name} differs from the other tensors that are {path} here")
        found[path] = leaf
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
