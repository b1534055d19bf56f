"""The command line: `transformer-jax COMMAND ...` and `train.py`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from transformer_jax.cli.evaluate import Average, Evaluate, Score
from transformer_jax.cli.inspect import Attention, Compile, Doctor, Params, Plot
from transformer_jax.cli.interop import Compare, Export, Import
from transformer_jax.cli.parsing import MISSING, arg, flag_of, parse, parse_known, positionals, switches
from transformer_jax.cli.session import GlobalOptions, session
from transformer_jax.cli.train import Parsing, Table3, Train, train_defaults
from transformer_jax.cli.translate import Translate
from transformer_jax.config import Config
from transformer_jax.presets import load_recipe

# The name of a command is the name of its class in lower case.
RunCommand = Train | Translate | Evaluate | Score | Average | Attention | Plot
OtherCommand = Import | Export | Compare | Compile | Doctor | Params | Table3 | Parsing

SWITCHES = switches(GlobalOptions, Train, Compile)
LISTS = ["--shapes", *(flag_of(name) for name, value in Config().flat().items() if isinstance(value, tuple))]


@dataclass(frozen=True)
class CommandLine:
    """The Transformer of 'Attention Is All You Need': train, decode, measure, compare.

    `transformer-jax COMMAND --help` lists the options of a command.
    """

    command: Annotated[RunCommand | OtherCommand, arg(name="")]
    options: Annotated[GlobalOptions, arg(name="")] = field(default_factory=GlobalOptions)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 after a failure, 2 after invalid usage."""
    words = list(sys.argv[1:] if args is None else args)
    return session(lambda: _run(words), show_traceback="--traceback" in words)


def train_main(args: Sequence[str] | None = None) -> int:
    """Run the command `train`, which is also what `python train.py` runs, and return its exit status."""
    return main(["train", *(sys.argv[1:] if args is None else args)])


def _run(args: Sequence[str]) -> int | None:
    command, recipe = [*positionals(args, SWITCHES, LISTS), "", ""][:2]
    parse_known(GlobalOptions, args).apply(trains=command in ("train", "table3"))
    # The recipe decides the defaults of flags, so it is loaded before they are parsed.
    default = None
    if command == "train":
        default = CommandLine(train_defaults(recipe))
    elif command == "compile" and recipe:
        default = CommandLine(Compile(MISSING, recipe, config=load_recipe(recipe)))
    return parse(CommandLine, args or ["--help"], default).command.run()
