"""Dataclasses whose fields are checked against their annotated types and bounds, and read from JSON trees."""

import dataclasses
import math
import numbers
import re
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from transformer_jax.types import UserError

T = TypeVar("T")


class Bounds(NamedTuple):
    """The interval of legal values of a number, as metadata of its type."""

    text: str
    low: float
    high: float = math.inf
    low_is_legal: bool = True

    def allow(self, value: float) -> bool:
        """Return whether `value` is in the interval; NaN never is."""
        return (value >= self.low if self.low_is_legal else value > self.low) and value < self.high


Count = Annotated[int, Bounds("at least 1", 1)]
CountOrZero = Annotated[int, Bounds("at least 0", 0)]
Probability = Annotated[float, Bounds("at least 0 and below 1", 0, 1)]
PositiveFloat = Annotated[float, Bounds("more than 0", 0, low_is_legal=False)]
NonNegativeFloat = Annotated[float, Bounds("at least 0", 0)]


def require(condition: object, message: str, *configs: object) -> None:
    """Raise UserError with `message` unless `condition` is true; `model.d_ff` becomes `model.d_ff=2048` in it."""
    if condition:
        return
    for config in configs:
        section = type(config).__name__.removesuffix("Config").lower()
        for name, value in vars(config).items():
            shown = f"{section}.{name}={value!r:.100}"
            message = re.sub(rf"(?<![-\w]){section}\.{name}\b", shown.replace("\\", r"\\"), message)
    raise UserError(message)


class Checked:
    """Base class of dataclasses whose fields are checked when an instance is made: their types, bounds and `rules`.

    Whole numbers in float fields become floats. The first failure raises UserError.
    """

    def __post_init__(self) -> None:
        """Check the fields, one by one and then together."""
        name = type(self).__name__
        prefix = f"{name.removesuffix('Config').lower()}." if name.endswith("Config") else ""
        for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            checked = _checked(kind, value, prefix + name)
            if checked is not value:
                object.__setattr__(self, name, checked)
        for is_legal, message in self.rules():
            require(is_legal, message, self)

    def rules(self) -> Iterable[tuple[object, str]]:
        """Return conditions that must be true, each with the message for `require`."""
        return ()


def _checked(kind: Any, value: Any, where: str, or_none: str = "") -> Any:
    """Return `value` as the annotated type: a scalar, Literal, tuple, or one of them or None. Else raise UserError."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        value = _checked(options[0], value, where, or_none)
        require(options[1].allow(value), f"{where} is {value}; it must be {options[1].text}")
        return value
    if origin is tuple:
        require(isinstance(value, list | tuple), f"{where} is {value!r:.200}; it must be a list")
        return tuple(_checked(options[0], item, where) for item in value)
    if origin is Literal:
        is_legal = isinstance(value, str) and value in options
        require(is_legal, f"{where} is {value!r:.200}; legal: {', '.join(options)}")
        return value
    if options:  # X | None
        return None if value is None else _checked(options[0], value, where, " or None")
    if kind is bool and type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()  # of np.bool_
    if not isinstance(value, bool):
        if kind in (int, float) and isinstance(value, numbers.Integral):
            value = int(value)
            require(abs(value) < 2**63, f"{where} has {value.bit_length()} bits; it must fit into 64")
        if kind is float and isinstance(value, numbers.Real):
            value = float(value)
    require(type(value) is kind, f"{where} is {value!r:.200}; it must be {kind.__name__}{or_none}")
    require(kind is not float or not math.isinf(value), f"{where} is {value}; it must be a finite number")
    return value


def from_tree(cls: type[T], tree: object, prefix: str = "") -> T:
    """Return the `Checked` dataclass, or dataclass of such ones, that a tree of JSON objects describes.

    Missing fields keep their defaults. `prefix` is the path of `tree` in the complete tree, such as `model.`.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{prefix.rstrip('.') or 'the configuration'} is {tree!r:.200}; it must be a JSON object")
    types = typing.get_type_hints(cls)
    for name in tree:
        require(name in types, f"unknown field {prefix}{name:.100}; known: {', '.join(types)}")
    nested = {name for name in tree if dataclasses.is_dataclass(types[name])}
    fields = {name: from_tree(types[name], tree[name], f"{prefix}{name}.") for name in nested}
    return cls(**tree | fields)
