"""tyro behind the commands: the only file that knows it."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import tyro
from tyro import MISSING as MISSING
from tyro.conf import FlagConversionOff as FlagConversionOff
from tyro.conf import Positional as Positional
from tyro.conf import arg as arg

from transformer_jax.types import UserError


def parse(
    cls: Any, command: str, args: Sequence[str], *, default: Any, description: str, config: tuple[Any, ...] = ()
) -> Any:
    """tyro's parser: exits with status 2 for wrong usage, and 0 for --help."""
    extra = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            cls, prog=f"transformer-jax {command}", description=description, args=list(args), config=config, **extra
        )
    except UserError as error:  # a value that a config's own checks refuse
        usage_error(command, str(error))


def take_flag(args: list[str], flag: str) -> bool:
    """Whether the flag is there; it is removed."""
    found = flag in args
    args[:] = [arg for arg in args if arg != flag]
    return found


def usage_error(command: str, message: str) -> NoReturn:
    """Says what is wrong with the arguments and exits with status 2."""
    print(f"transformer-jax {command}: {message}", file=sys.stderr)
    raise SystemExit(2)
