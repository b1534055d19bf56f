"""The parser of command lines. This module alone imports tyro."""

import dataclasses
import sys
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import tyro
from tyro.conf import FlagConversionOff as FlagConversionOff
from tyro.conf import Positional as Positional
from tyro.conf import arg as arg
from tyro.conf import subcommand as subcommand

from transformer_jax.config import RENAMED_FIELDS, DecodingConfig, Sampling
from transformer_jax.types import UserError

T = TypeVar("T")

PROGRAM = "transformer-jax"


def flag_of(field: str) -> str:
    """Return the flag of a field: `--decoding.beam-size` of `decoding.beam_size`."""
    return f"--{field.replace('_', '-')}"


RENAMED_FLAGS = {
    flag_of(prefix + old): flag_of(prefix + new)
    for section, names in RENAMED_FIELDS.items()
    for old, new in names.items()
    for prefix in ((f"{section}.", "") if section == "decoding" else (f"{section}.",))
} | {"--no-renormalise": "--no-renormalize-logits"}
"""{flag of an earlier version: flag now}. Commands on runs take the flags of decoding without the section."""


def parse(cls: type[T], args: Sequence[str], *, command: str = "", default: T | None = None) -> T:
    """Parse a command line.

    Args:
        cls: A dataclass; its docstrings are the help texts. Its constructor may raise UserError for values that
            contradict each other.
        args: The arguments, without the names of the program and of the command.
        command: The name of the command.
        default: The default of every field. None takes the defaults of `cls`.

    Raises:
        SystemExit: With status 0 after `--help`, and with status 2 after wrong usage, which is explained on stderr.
    """
    options: dict[str, Any] = {} if default is None else {"default": default}
    config = (tyro.conf.FlagCreatePairsOff,)
    try:
        return tyro.cli(cls, prog=f"{PROGRAM} {command}".strip(), args=list(args), config=config, **options)
    except UserError as error:
        usage_error(command or " ".join(args[:1]), str(error))
    except SystemExit as error:
        for flag in (arg.partition("=")[0].replace("_", "-") for arg in args) if error.code else ():
            if flag in RENAMED_FLAGS:
                print(f"{flag} is now {RENAMED_FLAGS[flag]}", file=sys.stderr)
        raise


def parse_known(cls: type[T], args: Sequence[str]) -> tuple[T, list[str]]:
    """Parse the flags of `cls` and return the other arguments in their order. Arguments after `--` are not flags.

    Raises:
        SystemExit: With status 2 if a flag that takes no value has one, as in `--deterministic=True`.
    """
    end = args.index("--") if "--" in args else len(args)
    switches = [name for name, kind in typing.get_type_hints(cls).items() if kind is bool]
    switches = [f"--{prefix}{name.replace('_', '-')}" for name in switches for prefix in ("", "no-")]
    for flag, has_value, _ in (item.partition("=") for item in args[:end]):
        if has_value and flag.replace("_", "-") in switches:
            usage_error("", f"{flag} takes no value; it is on if it is there")
    config = (tyro.conf.FlagCreatePairsOff,)
    known, rest = tyro.cli(cls, args=list(args[:end]), return_unknown_args=True, add_help=False, config=config)
    return known, [*rest, *args[end:]]


def usage_error(command: str, message: str) -> NoReturn:
    """Print what is wrong with the arguments of a command and raise SystemExit with status 2."""
    print(f"{f'{PROGRAM} {command}'.strip()}: {message}", file=sys.stderr)
    raise SystemExit(2)


def _optional(cls: type[Any], name: str) -> type[Any]:
    """Return a dataclass with the fields of the dataclass `cls`, where None stands for a flag that was not given.

    A field of type bool becomes two flags, `--field` and `--no-field`. The values are checked by the constructor of
    `cls`. `cls` is a base class so that tyro finds its docstrings.
    """
    fields: list[tuple[str, Any, Any]] = []
    for field, kind in typing.get_type_hints(cls).items():
        hint = arg(help_behavior_hint="(default: the run's own)") if cls is DecodingConfig else arg()
        if kind is bool:
            text = f"Sets {field} to False."
            fields.append((field, Annotated[bool, arg(help_behavior_hint="(default: the run's own)")], False))
            fields.append((f"no_{field}", Annotated[bool, arg(help=text, help_behavior_hint="")], False))
        else:
            fields.append((field, Annotated[kind | None, hint], None))

    def check(self: Any) -> None:
        cls(**given(self))

    return dataclasses.make_dataclass(name, fields, bases=(cls,), frozen=True, namespace={"__post_init__": check})


def given(flags: "DecodingFlags | SamplingFlags") -> dict[str, Any]:
    """Return the fields whose flags were given, with their values."""
    values = {name: value for name, value in vars(flags).items() if value is not None and value is not False}
    turned_off = [name for name in values if name.startswith("no_")]
    return {name: value for name, value in values.items() if name not in turned_off} | {
        name.removeprefix("no_"): False for name in turned_off
    }


if TYPE_CHECKING:

    class DecodingFlags:
        """The fields of `DecodingConfig`; None keeps the value of the run."""

    class SamplingFlags:
        """The fields of `Sampling`; None keeps the default."""

else:
    DecodingFlags = _optional(DecodingConfig, "DecodingFlags")
    SamplingFlags = _optional(Sampling, "SamplingFlags")
