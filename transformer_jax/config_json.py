"""Dataclasses from JSON, every field and value checked: nothing that a file says is run."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal

from transformer_jax.errors import UserError


def check_numbers(fields: Mapping[str, Any]) -> None:
    """Raises UserError for a number that is not finite, which JSON cannot say, or that needs more than 64 bits."""
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} is {value}; it must be a finite number")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"{name} has {value.bit_length()} bits; it must fit into 64")


def from_tree(cls: Any, tree: Any, origin: str, prefix: str = "") -> Any:
    """The dataclass that a tree of JSON objects describes; a field that is not there keeps its default.

    Args:
        cls: a dataclass of scalars, Literals, tuples and such dataclasses.
        tree: what `json.loads` gave.
        origin: the file, for errors.
        prefix: where in it this tree stands, such as `model.`.

    Raises:
        UserError: a field or a value that is not known.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{origin}: {prefix or 'the whole'} is {tree!r:.200}; a JSON object is needed")
    kinds = typing.get_type_hints(cls)
    for name in tree:
        if name not in kinds:
            raise UserError(f"{origin}: unknown field {prefix}{name:.100}; known: {', '.join(kinds)}")
    values = {}
    for name, value in tree.items():
        if dataclasses.is_dataclass(kinds[name]):
            values[name] = from_tree(kinds[name], value, origin, f"{prefix}{name}.")
        else:
            values[name] = _checked(kinds[name], value, f"{origin}: {prefix}{name}")
    return cls(**values)


def _checked(kind: Any, value: Any, where: str) -> Any:
    """`value` if it is of the annotated type (a scalar, Literal, one of them or None, or a tuple), else UserError."""
    options = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise UserError(f"{where} is {value!r:.200}; it must be a list")
        return tuple(_checked(options[0], item, where) for item in value)
    if typing.get_origin(kind) is Literal:
        if value not in options or isinstance(value, bool):
            raise UserError(f"{where} is {value!r:.200}; legal: {', '.join(map(str, options))}")
        return value
    kinds = options or (kind,)
    if float in kinds and type(value) is int and abs(value) < 2**63:
        return float(value)
    if type(value) not in kinds:
        names = " or ".join("None" if item is type(None) else item.__name__ for item in kinds)
        raise UserError(f"{where} is {value!r:.200}; it must be {names}")
    return value
