"""A user's own model: a small TOML file says which of its tensors is which parameter here."""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

from transformer_jax.config import ModelConfig
from transformer_jax.interop.tables import Row, Table, flatten, row
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError


def read_mapping(path: Path, config: ModelConfig) -> Table:
    """The table of a mapping file.

        ignore = ["positions.table"]            # endings of names that hold no parameter

        [tensors]                               # {i}: the number of a layer
        "enc.{i}.wq.weight" = "encoder/layer_{i}/self_attention/query/kernel"
        "enc.{i}.qkv.bias" = ["encoder/layer_{i}/self_attention/query/bias", ...]

    Raises:
        UserError: no such file, not TOML, or a path that the model of `config` does not have.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: cannot be read as TOML: {error}") from error
    tensors, ignore = tree.pop("tensors", None), tree.pop("ignore", [])
    if tree or not isinstance(tensors, dict) or not isinstance(ignore, list) or not all(_is_text(e) for e in ignore):
        also = f", and no {', '.join(tree)}" if tree else ""
        raise UserError(f"{path}: a mapping has a table [tensors] and may have a list `ignore` of endings{also}")
    known = {re.sub(r"layer_\d+", "layer_{i}", name) for name in flatten(abstract_params(config))}
    rows: list[Row] = []
    for foreign, ours in tensors.items():
        names = [ours] if isinstance(ours, str) else ours
        if not isinstance(names, list) or not names or not all(_is_text(name) for name in names):
            raise UserError(f"{path}: {foreign!r} is mapped to {ours!r}; a path or a list of paths is needed")
        if {"{i}" in name for name in (foreign, *names)} != {"{i}" in foreign}:
            raise UserError(f"{path}: {foreign!r} is mapped to {ours!r}; {{i}} must be in both, or in neither")
        if len({name.rpartition("/")[2] for name in names}) > 1:
            raise UserError(f"{path}: {foreign!r} is mapped to {ours!r}; what stands in one tensor must be of one kind")
        for name in names:
            if re.sub(r"layer_\d+", "layer_{i}", name) not in known:
                close = difflib.get_close_matches(name, known, 3, 0.3)
                raise UserError(f"{path}: {foreign!r}: the model has no {name!r}; near it are {', '.join(close)}")
        rows.append(row(foreign, *names))
    return Table(tuple(rows), tuple(ignore))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""
