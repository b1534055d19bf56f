"""Formats: which tensor of another library holds which parameter. One table of names serves both directions.

"Foreign" means of another library. A foreign linear layer stores [out, in]. A kernel of this package is [in, out],
with the heads as separate axes:

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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer_jax.config import ModelConfig
from transformer_jax.model.positional import sinusoids
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.fields import require
from transformer_jax.types import Params, UserError

Tensors = Mapping[str, np.ndarray]
Legal = Mapping[str, tuple[object, ...]]
"""Legal values of the fields of `ModelConfig` that a format restricts."""
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Row:
    """One row of a table. `{i}` in a name stands for the index of a layer."""

    foreign: tuple[str, ...]  # names of the foreign tensor: the first is written, all are read
    ours: tuple[str, ...]  # paths of the parameters that it holds, stacked along its first axis
    zeros: bool = False  # whether the format requires it, filled with zeros if the model has no such parameter
    leading: int = 0  # number of axes of length 1 in front of its other axes
    unless: str = ""  # path of a parameter: the row does not apply to models that have it

    def at(self, layer: int) -> "Row":
        """Return the row with the index of one layer filled in."""
        foreign, ours = (tuple(n.replace("{i}", str(layer)) for n in names) for names in (self.foreign, self.ours))
        return dataclasses.replace(self, foreign=foreign, ours=ours)

    def find(self, tensors: Tensors) -> str | None:
        """Return the first of the row's foreign names that is in a state dict, or None."""
        return next((name for name in self.foreign if name in tensors), None)

    def shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of the foreign tensor, given the shapes of the parameters by path."""
        parts = [_foreign_shape(path, shapes[path]) for path in self.ours]
        return (1,) * self.leading + (sum(part[0] for part in parts), *parts[0][1:])

    def split(self, tensor: np.ndarray, shapes: Shapes) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the parameters that a foreign tensor holds, with their paths, as views where that is possible."""
        sizes = [_foreign_shape(path, shapes[path])[0] for path in self.ours]
        parts = np.split(tensor.reshape(tensor.shape[self.leading :]), np.cumsum(sizes)[:-1])
        for path, part in zip(self.ours, parts, strict=True):
            yield path, (part.T if path.endswith("kernel") else part).reshape(shapes[path])

    def stack(self, leaves: Tensors) -> np.ndarray:
        """Return the foreign tensor that holds parameters. A missing bias is a vector of zeros."""
        tensor = np.concatenate([_foreign_layout(path, leaves) for path in self.ours])
        return np.ascontiguousarray(tensor.reshape((1,) * self.leading + tensor.shape))


@dataclass(frozen=True)
class Format:
    """A foreign format: its names of parameters, and the models that it can express."""

    name: str
    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()  # name endings of tensors that hold no parameter
    positions: tuple[str, ...] = (".pe",)  # endings in `ignored` whose tables are compared with the positions
    legal: Callable[[ModelConfig], Legal] | None = None  # None: the format expresses every model
    prepare: Callable[[Tensors, str], Tensors] = lambda tensors, _: tensors  # renames, splits or widens what is read
    conventions: Mapping[str, object] = dataclasses.field(default_factory=dict)  # model fields, unless passed
    is_mapping: bool = False  # whether a user wrote the table, which then determines tying and biases

    def check(self, model: ModelConfig) -> None:
        """Raise UserError unless the format can express a model."""
        if self.legal is not None:
            check_expressible(model, self.name, self.legal(model))


def check_expressible(model: ModelConfig, format_name: str, legal: Legal) -> None:
    """Check that the fields of a model have legal values, and that d_k = d_v = d_model / heads.

    >>> check_expressible(ModelConfig(), "marian", {"norm_position": ("post",)})
    """
    problems = [
        f"model.{name}={getattr(model, name)!r}, {format_name} has only {' or '.join(map(repr, values))}"
        for name, values in legal.items()
        if getattr(model, name) not in values
    ]
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if not stack.d_k * stack.num_heads == stack.d_v * stack.num_heads == model.d_model:
            found = f"the {name} has {stack.num_heads} heads with d_k={stack.d_k} and d_v={stack.d_v}"
            needed = f"d_k = d_v = d_model / heads with model.d_model={model.d_model}"
            fields = "(fields d_k, d_v, decoder_d_k, decoder_d_v)"
            problems.append(f"{found}, but {format_name} requires {needed} {fields}")
    require(not problems, f"{format_name} cannot express this model: {'; '.join(problems)}")


def embeddings(source: tuple[str, ...], target: tuple[str, ...], output: tuple[str, ...]) -> tuple[Row, ...]:
    """Return the rows of the embedding tables and of the output projection, for every way of tying them."""
    return (
        *(Row(names, ("embedding/table",)) for names in (source, target, output)),
        Row(source, ("source_embedding/table",)),
        Row(target, ("target_embedding/table",)),
        Row(output, ("target_embedding/table",), unless="output_projection/kernel"),
        Row(output, ("output_projection/kernel",)),
    )


def flatten(params: Params) -> dict[str, Any]:
    """Return a tree's leaves by path: {"encoder/layer_0/self_attention/query/kernel": array, ...}."""
    return flatten_dict(params, sep="/")


def unflatten(leaves: Mapping[str, object]) -> Params:
    """Return the tree whose leaves `flatten` returned."""
    return unflatten_dict(leaves, sep="/")


def renamed(tensors: Tensors, rename: Callable[[str], str], origin: str) -> dict[str, np.ndarray]:
    """Rename tensors. Raise UserError if two of them get the same name."""
    old_names: dict[str, str] = {}
    for name in tensors:
        new = rename(name)
        if new in old_names:
            raise UserError(f"{origin}: {old_names[new]} and {name} both mean {new}. Remove one of them")
        old_names[new] = name
    return {new: tensors[name] for new, name in old_names.items()}


def from_foreign(tensors: Tensors, table: Format, config: ModelConfig, origin: str = "the state dict") -> Params:
    """Convert the tensors of a format to parameters, NumPy arrays of the dtype `config.param_dtype`.

    Raises:
        UserError: The format cannot express the model, or tensors are missing or left over, have wrong shapes or values
            that are not finite, or differ although the configuration ties them. All problems are listed.
    """
    table.check(config)
    tensors = table.prepare(tensors, origin)
    _check_position_tables(tensors, table, config, origin)
    shapes = {path: leaf.shape for path, leaf in flatten(abstract_params(config)).items()}
    dtype = np.dtype(jax.numpy.dtype(config.param_dtype))
    leaves: dict[str, np.ndarray] = {}
    used: set[str] = set()
    problems: list[str] = []
    missing: dict[str, str] = {}
    for item in _rows(table, config, shapes):
        name = item.find(tensors)
        if not all(path in shapes for path in item.ours):
            # A tensor that the model lacks is accepted if it is zero: a bias without effect.
            if name and item.zeros and not np.any(tensors[name]):
                used.add(name)
        elif name is None:
            missing |= dict.fromkeys(item.ours, item.foreign[0])
        else:
            used.add(name)
            tensor = in_dtype(name, tensors[name], item.shape(shapes), dtype, problems)
            for path, part in item.split(tensor, shapes) if tensor is not None else ():
                if path not in leaves:
                    leaves[path] = np.array(part, order="C")  # a copy, because the tensor may be memory-mapped
                elif not np.array_equal(leaves[path], part):
                    problems.append(
                        f"{name} differs from the other tensors that are {path}, but the configuration ties them"
                    )
    problems += [f"{name} is missing" for name in sorted({missing[path] for path in missing if path not in leaves})]
    if not problems:
        uncovered = [path for path in shapes if path not in leaves and path not in missing]
        problems += [f"the format has no tensor for {path}" for path in uncovered]
    unused = [name for name in tensors if name not in used and not name.endswith(table.ignored or ("\0",))]
    problems += [f"{name} {list(tensors[name].shape)} is left over" for name in unused]
    require(not problems, f"{origin} does not fit the model: {'; '.join(problems)}")
    return unflatten({path: leaves[path] for path in shapes})


def to_foreign(params: Params, table: Format, config: ModelConfig) -> dict[str, np.ndarray]:
    """Convert the parameters of a model to the tensors of a format.

    Raises:
        UserError: The format cannot express the model, or has no tensor for a parameter.
    """
    table.check(config)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    tensors: dict[str, np.ndarray] = {}
    placed: set[str] = set()
    for item in _rows(table, config, leaves):
        kernels = [path.removesuffix("bias") + "kernel" for path in item.ours]
        if all(path in leaves for path in item.ours) or (item.zeros and all(path in leaves for path in kernels)):
            tensors[item.foreign[0]] = item.stack(leaves)
            placed.update(item.ours)
    unplaced = [path for path in leaves if path not in placed]
    require(not unplaced, f"the format has no tensor for {', '.join(unplaced)}")
    return tensors


def _rows(table: Format, config: ModelConfig, paths: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of a table for one model, with a row for each layer."""
    for item in table.rows:
        if item.unless in paths:
            continue
        stack = config.encoder if item.ours[0].startswith("encoder/") else config.decoder
        yield from map(item.at, range(stack.num_layers)) if "{i}" in item.ours[0] else (item,)


def _check_position_tables(tensors: Tensors, table: Format, config: ModelConfig, origin: str) -> None:
    """Check that the position tables in a state dict equal the positions of the configuration."""
    for name, tensor in tensors.items():
        is_table = name.endswith(table.ignored or ("\0",)) and name.endswith(table.positions)
        if not is_table or tensor.size == 0 or config.positions == "learned":
            continue
        stored = np.squeeze(tensor)
        problem = f"has shape {list(stored.shape)}, but a position table has model.d_model={config.d_model} columns"
        require(stored.ndim == 2 and stored.shape[1] == config.d_model, f"{origin}: {name} {problem}")
        conventions = config.positions, config.position_exponent, config.position_offset
        difference = np.abs(stored - sinusoids(len(stored), config.d_model, *conventions)).max()
        if not difference <= 1e-3:  # float32 tables of 5,000 rows are off by about 1e-4 themselves
            raise UserError(
                f"{origin}: {name} is not the position table that the configuration describes (largest difference "
                f"{difference:.2g}). Check model.positions={config.positions!r}, model.position_exponent="
                f"{config.position_exponent!r} and model.position_offset={config.position_offset}"
            )


def in_dtype(
    name: str, tensor: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, problems: list[str]
) -> np.ndarray | None:
    """Return a foreign tensor in another dtype, or None after adding the tensor's defect to `problems`."""
    with np.errstate(over="ignore"):
        converted = tensor.astype(dtype, copy=False)
    if tensor.shape != shape:
        problems.append(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    elif not np.issubdtype(tensor.dtype, np.floating):
        problems.append(f"{name} holds {tensor.dtype}, not floating-point numbers")
    elif not np.all(np.isfinite(converted)):  # a large number may overflow in this dtype
        problems.append(f"{name} holds numbers that are not finite in {dtype}")
    else:
        return converted
    return None


def _foreign_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if path.endswith("kernel"):
        input_axes = 2 if path.endswith("output/kernel") else 1
        return math.prod(shape[input_axes:]), math.prod(shape[:input_axes])
    return (math.prod(shape),) if path.endswith("bias") else shape


def _foreign_layout(path: str, leaves: Tensors) -> np.ndarray:
    if path not in leaves:
        kernel = leaves[path.removesuffix("bias") + "kernel"]
        return np.zeros(_foreign_shape(path.removesuffix("bias") + "kernel", kernel.shape)[0], kernel.dtype)
    shape = _foreign_shape(path, leaves[path].shape)
    return leaves[path].reshape(shape[::-1]).T if path.endswith("kernel") else leaves[path].reshape(shape)
