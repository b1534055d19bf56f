"""The command `train`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from transformer_jax.cli.parsing import FlagConversionOff, Positional, arg, parse, parse_known, usage_error
from transformer_jax.cli.session import GlobalOptions, processes, session
from transformer_jax.config import Config
from transformer_jax.presets import load_recipe, numbers_config
from transformer_jax.runtime.distributed import Cluster, is_main_process


@dataclass(frozen=True)
class Train:
    """Train a recipe, or resume the run in --workdir. Every field of the recipe is a flag."""

    recipe: Annotated[Positional[str], arg(metavar="CONFIG")] = ""
    """Recipe: FILE or FILE:NAME of a Python file that defines get_config(), or a run's config.json. It must be the
    first argument. Empty takes the built-in recipe, spelled-out numbers."""
    workdir: Path = Path("runs") / "numbers"
    """Folder of the run. The same command resumes the run in it."""
    profile: bool = False
    """Trace five training steps into the run's profile/, for TensorBoard and Perfetto."""
    strict: bool = False
    """Fail if the newest checkpoint is damaged, instead of resuming from an earlier one."""
    cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)
    config: Annotated[FlagConversionOff[Config], arg(name="")] = field(default_factory=numbers_config)


def train_main(args: Sequence[str] | None = None, options: GlobalOptions | None = None) -> int:
    """Run the command `train`, which is also what `python train.py` runs, and return its exit status.

    Args:
        args: The arguments after the name of the command. None takes those of the process.
        options: The global options. None takes them out of `args`.
    """
    found, rest = parse_known(GlobalOptions, sys.argv[1:] if args is None else args)
    with session(options or found, trains=True) as current:
        command = parse_train(rest)
        with processes(command.cluster):
            from transformer_jax import run
            from transformer_jax.evaluation.evaluate import result_lines

            outcome = run.train(command.config, command.workdir, profile=command.profile, strict=command.strict)
            if outcome.test is not None and is_main_process():
                print(*result_lines(outcome.test), sep="\n")
    return current.status


def parse_train(args: Sequence[str]) -> Train:
    """Parse the arguments of `train`. The recipe, which is the first one, decides the defaults of all flags."""
    recipe = args[0] if args and not args[0].startswith("-") else ""
    path, _, name = recipe.partition(":")
    workdir = Path("runs") / (Path(path).stem + (f"-{name}" if name else "")) if recipe else Train.workdir
    config = load_recipe(recipe) if recipe else numbers_config()
    command = parse(Train, args, command="train", default=Train(recipe, workdir, config=config))
    if command.recipe != recipe:
        usage_error("train", f"{command.recipe!r} must be the first argument, before all flags")
    return command
