"""A small language for tensor names, used by the tables of the formats and by the mapping files of users.

A mapping file states in TOML which tensor of the user's own PyTorch model holds which parameter.
"""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformer_jax.config import ModelConfig
from transformer_jax.interop.tables import Format, Row, flatten
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.files import read_text
from transformer_jax.types import UserError

NormNames = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of a norm's scale and of its shift. The first of each is written, all of them are read."""
LAYER_NORM: NormNames = (("weight",), ("bias",))
_ANY_NORM = ("weight", "g", "gamma", "alpha", "a_2", "scale"), ("bias", "b", "beta", "b_2", "shift")
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_PARAMETERS = {"kernel", "bias", "scale", "table", "logits_bias"}


def names(
    table: Mapping[str, object], layer: str = "", *, norm: NormNames = LAYER_NORM, zeros: bool = True, origin: str = ""
) -> tuple[Row, ...]:
    """Return the rows of a table {foreign name: path or list of paths}, written as in a mapping file.

    `{layer}` stands for `layer` in a name and for `{encoder,decoder}/layer_{i}` in a path. A dot joins the names of
    a foreign module and its tensors, unless the module's name ends in `_` or `/`. `zeros` states whether the format
    stores zero biases for a model without biases.
    """
    rows: list[Row] = []
    for foreign, value in table.items():
        where = f"{origin}: {foreign!r} is mapped to {value!r}"
        ours = [value] if isinstance(value, str) else value
        if not isinstance(ours, list) or not ours or not all(map(_is_text, ours)):
            raise UserError(f"{where}; a path or a list of paths is needed")
        foreign = foreign.replace("{layer}", layer)
        ours = [path.replace("{layer}", "{encoder,decoder}/layer_{i}") for path in ours]
        if {"{i}" in name for name in (foreign, *ours)} != {"{i}" in foreign}:
            raise UserError(f"{where}; {{i}} must be on both sides, or on neither")
        for name, paths in _expanded(foreign, ours, where):
            leaves = {path.rpartition("/")[2] for path in paths}
            if not leaves & _PARAMETERS:
                rows += _module(name, paths, norm, zeros)
            elif len(leaves) == 1:
                rows.append(Row((name,), paths))
            else:
                raise UserError(f"{where}; all parameters in one tensor must be of one kind")
    return tuple(rows)


def read_mapping(path: Path) -> Format:
    """Read a mapping file, whose syntax docs/interop.md explains."""
    try:
        tree = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: cannot be read as TOML: {error}") from error
    tensors, ignore = tree.pop("tensors", None), tree.pop("ignore", [])
    if tree or not isinstance(tensors, dict) or not isinstance(ignore, list) or not all(map(_is_text, ignore)):
        unknown = f", not {', '.join(tree)}" if tree else ""
        raise UserError(f"{path}: a mapping has a table [tensors] and optionally a list `ignore` of endings{unknown}")
    rows = names(tensors, norm=_ANY_NORM, origin=str(path))
    return Format("mapping", rows, tuple(ignore), conventions={"norm_epsilon": 1e-5}, is_mapping=True)


def check_mapping(table: Format, config: ModelConfig, path: Path) -> None:
    """Check that every parameter that a mapping file names exists in a model."""
    known = {re.sub(r"layer_\d+", "layer_{i}", name) for name in flatten(abstract_params(config))}
    # Biases are optional.
    optional = {name.rpartition("/")[0] + "/bias" for name in known if name.endswith("/kernel")} | {"logits_bias"}
    for item in table.rows:
        for name in item.ours:
            pattern = re.sub(r"layer_\d+", "layer_{i}", name)
            if pattern not in known and not (item.zeros and pattern in optional):
                close = difflib.get_close_matches(name, known, 3, 0.3)
                raise UserError(f"{path}: {item.foreign[0]!r}: the model has no {name!r}. Similar: {', '.join(close)}")


def _expanded(foreign: str, ours: list[str], where: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a foreign name and its parameter paths for each combination of the alternatives {a,b} in `foreign`."""
    if _ALTERNATIVES.search(foreign):
        columns = [_filled(text) for text in (foreign, *ours)]
        if len({len(column) for column in columns}) > 1:
            raise UserError(f"{where}; both sides must have the same number of alternatives {{a,b}}")
        for name, *paths in zip(*columns, strict=True):
            yield from _expanded(name, paths, where)
    else:
        while any(map(_ALTERNATIVES.search, ours)):
            ours = [filled for path in ours for filled in _filled(path)]
        yield foreign, tuple(ours)


def _filled(text: str) -> list[str]:
    """Return the text once per alternative of its first {a,b}, with the alternative filled in."""
    group = _ALTERNATIVES.search(text)
    return [text.replace(group[0], word, 1) for word in group[1].split(",")] if group else [text]


def _module(foreign: str, paths: tuple[str, ...], norm: NormNames, zeros: bool) -> list[Row]:
    """Return the rows of the tensors of one foreign module."""
    prefix = foreign if foreign.endswith(("_", "/")) else f"{foreign}."

    def tensor(names: tuple[str, ...], kind: str, zeros: bool = False) -> Row:
        return Row(tuple(prefix + name for name in names), tuple(f"{path}/{kind}" for path in paths), zeros)

    weight, bias = LAYER_NORM
    if all(path.endswith("norm") for path in paths):
        return [tensor(norm[0], "scale"), tensor(norm[1], "bias")]
    if all(path.endswith(("embedding", "positions")) for path in paths):
        return [tensor(weight, "table")]
    if paths == ("output_projection",):
        return [tensor(weight, "kernel"), Row((f"{prefix}bias",), ("logits_bias",), zeros=True)]
    return [tensor(weight, "kernel"), tensor(bias, "bias", zeros)]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""
