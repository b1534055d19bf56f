"""The parser of command lines. This module alone imports tyro."""

import dataclasses
import sys
import typing
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from tyro.conf import FlagConversionOff as FlagConversionOff
from tyro.conf import Positional as Positional
from tyro.conf import arg as arg
from tyro.conf import subcommand as subcommand

from transformer_jax.config import RENAMED_FIELDS, DecodingConfig, ModelConfig, Sampling
from transformer_jax.types import UserError

T = TypeVar("T")
MISSING = tyro.MISSING  # the value of a flag without a default, where others have one

RunFolder = Annotated[Positional[Path], arg(metavar="RUN", help="Folder of the run.")]
_OPTIONS = (tyro.conf.FlagCreatePairsOff, tyro.conf.CascadeSubcommandArgs)  # global flags may follow the command


class UsageError(UserError):
    """Flags that contradict each other. The command exits with status 2."""


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


def parse(cls: type[T], args: Sequence[str], default: T | None = None) -> T:
    """Parse a command line into the dataclass `cls`, whose docstrings are the help texts.

    Raises:
        UsageError: A dataclass rejected the values.
        SystemExit: With status 0 after `--help`, and with status 2 after invalid usage, which is explained on stderr.
    """
    missing = tyro.MISSING_NONPROP if default is None else default
    try:
        return tyro.cli(cls, prog="transformer-jax", args=args, default=missing, config=_OPTIONS)
    except UserError as error:  # of a constructor, if tyro does not report it
        raise UsageError(str(error)) from error
    except SystemExit as error:
        for flag in (item.partition("=")[0].replace("_", "-") for item in args) if error.code else ():
            if flag in RENAMED_FLAGS:
                print(f"{flag} is now {RENAMED_FLAGS[flag]}", file=sys.stderr)
        raise


def parse_known(cls: type[T], args: Sequence[str]) -> T:
    """Parse the flags of `cls` and ignore all other arguments, including those after `--`."""
    known = args[: args.index("--")] if "--" in args else args
    return tyro.cli(cls, args=known, return_unknown_args=True, add_help=False, config=_OPTIONS)[0]


def switches(*classes: type) -> set[str]:
    """Return the flags of dataclasses that take no value, in their positive and negative form."""
    hints = [hint for cls in classes for hint in typing.get_type_hints(cls).items()]
    return {flag_of(prefix + name) for name, kind in hints if kind is bool for prefix in ("", "no_")}


def positionals(args: Sequence[str], without_value: Collection[str], with_list: Collection[str]) -> Iterator[str]:
    """Yield the arguments that are neither flags nor values of flags.

    Flags `with_list` take any number of values, and those neither there nor in `without_value` take one.
    """
    expects_value = None  # the flag whose values follow
    for index, item in enumerate(args):
        flag, has_value, _ = item.partition("=")
        name = flag.replace("_", "-")
        if item == "--":
            yield from args[index + 1 :]
            return
        if item.startswith("--"):
            if has_value and name in without_value:
                raise UsageError(f"{flag} takes no value. Leave out the value, or the flag to turn it off")
            expects_value = None if has_value or name in without_value else name
        elif expects_value is None:
            yield item
        elif expects_value not in with_list:
            expects_value = None


def _overrides(
    cls: type, name: str, fields: Collection[str] = (), default: str = "the run's own", pairs: bool = True
) -> type:
    """Return a dataclass whose flags replace fields of the section `cls`. None stands for an unused flag.

    `cls` is a base class so that tyro finds its docstrings. Its constructor checks the values, unless `fields` selects
    some of its fields. With `pairs`, a field of type bool becomes two flags, `--field` and `--no-field`, instead of one
    with a value. Help texts describe the default by `default`.
    """
    members: list[tuple[str, object, object]] = []
    hint = arg(help_behavior_hint=f"(default: {default})" if default else None)
    for field, kind in typing.get_type_hints(cls).items():
        if fields and field not in fields:
            members.append((field, Annotated[kind | None, tyro.conf.Fixed, tyro.conf.Suppress], None))
        elif kind is bool and pairs:
            no = arg(help=f"Sets {field} to False.", help_behavior_hint="")
            members += [(field, Annotated[bool, hint], False), (f"no_{field}", Annotated[bool, no], False)]
        else:
            members.append((field, Annotated[kind | None, hint], None))

    def check(self: object) -> None:
        if not fields:
            cls(**given(self))

    return dataclasses.make_dataclass(name, members, bases=(cls,), frozen=True, namespace={"__post_init__": check})


def given(flags: object) -> dict[str, Any]:
    """Return the fields that flags on the command line replace, with their values."""
    values = {name: value for name, value in vars(flags).items() if value is not None}
    for negative in [name for name in values if name.startswith("no_")]:  # of a pair, both are False by default
        positive = negative.removeprefix("no_")
        if values.pop(negative):
            values[positive] = False
        elif not values[positive]:
            del values[positive]
    return values


if TYPE_CHECKING:  # subclasses of their sections
    DecodingFlags = DecodingConfig
    CheckpointFlag = DecodingConfig
    ModelFlags = ModelConfig
    SamplingFlags = Sampling
else:
    MODEL_FIELDS = (  # what a state dict does not determine
        *("num_heads", "decoder_num_heads", "source_bos", "norm_position", "norm_epsilon", "activation"),
        *("scale_embeddings", "positions", "norm_variant", "position_exponent", "position_offset", "decoder_start"),
        "source_eos",
    )
    DecodingFlags = _overrides(DecodingConfig, "DecodingFlags")
    CheckpointFlag = _overrides(DecodingConfig, "CheckpointFlag", ("checkpoint",))
    ModelFlags = _overrides(ModelConfig, "ModelFlags", MODEL_FIELDS, "inferred from the tensors or format", pairs=False)
    SamplingFlags = _overrides(Sampling, "SamplingFlags", default="")
