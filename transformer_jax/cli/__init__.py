"""The command line: `transformer-jax COMMAND ...` and `train.py`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from transformer_jax.cli.evaluate import Average, Evaluate, Score
from transformer_jax.cli.experiments import Parsing, Table3
from transformer_jax.cli.inspect import Attention, Doctor, Params, Plot
from transformer_jax.cli.interop import Compare, Export, Import
from transformer_jax.cli.parsing import arg, parse, parse_known, subcommand
from transformer_jax.cli.session import GlobalOptions, session
from transformer_jax.cli.train import Train
from transformer_jax.cli.train import train_main as train_main
from transformer_jax.cli.translate import Translate

Command = (
    Annotated[Train, subcommand("train")]
    | Annotated[Translate, subcommand("translate")]
    | Annotated[Evaluate, subcommand("evaluate")]
    | Annotated[Score, subcommand("score")]
    | Annotated[Average, subcommand("average")]
    | Annotated[Attention, subcommand("attention")]
    | Annotated[Plot, subcommand("plot")]
    | Annotated[Import, subcommand("import")]
    | Annotated[Export, subcommand("export")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[Doctor, subcommand("doctor")]
    | Annotated[Params, subcommand("params")]
    | Annotated[Table3, subcommand("table3")]
    | Annotated[Parsing, subcommand("parsing")]
)


@dataclass(frozen=True)
class CommandLine:
    """The Transformer of 'Attention Is All You Need': train, decode, measure, compare.

    `transformer-jax COMMAND --help` lists the options of a command.
    """

    command: Annotated[Command, arg(name="")]
    options: Annotated[GlobalOptions, arg(name="")] = field(default_factory=GlobalOptions)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0, 1 after a failure, 2 after wrong usage.

    Args:
        args: The arguments. None takes those of the process.
    """
    options, rest = parse_known(GlobalOptions, sys.argv[1:] if args is None else args)
    if rest[:1] == ["train"]:
        return train_main(rest[1:], options)
    with session(options, trains=rest[:1] == ["table3"]) as current:
        command = parse(CommandLine, rest or ["--help"]).command
        assert not isinstance(command, Train)  # its defaults depend on the recipe: train_main parses it
        current.status = command.run() or 0
    return current.status
