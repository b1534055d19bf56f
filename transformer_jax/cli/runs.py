"""The parser of `train`, and what the parsers of commands on runs have in common."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.cli.parsing import FlagConversionOff, arg, parse, take_flag
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.presets import load_recipe, numbers_config
from transformer_jax.runtime.distributed import Cluster, initialize, is_main_process


def train(args: list[str]) -> None:
    """`transformer-jax train`."""
    profile, strict = take_flag(args, "--profile"), take_flag(args, "--strict")
    # The recipe decides the defaults of all other flags, so it is looked for first.
    recipe = args.pop(0) if args and not args[0].startswith("-") else None
    config = load_recipe(recipe) if recipe else numbers_config()

    @dataclass(frozen=True)
    class Train(Config):
        workdir: Path = Path("runs") / (_run_name(recipe) if recipe else "numbers")
        """The run's folder. The same command again goes on with the run there."""
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    default = Train(**{item.name: getattr(config, item.name) for item in dataclasses.fields(Config)})
    parsed = parse(
        Train,
        "train [CONFIG]",
        args,
        default=default,
        description="Trains a recipe, or goes on with the run in --workdir. CONFIG is FILE or FILE:NAME, a Python "
        f"file that defines get_config(); the defaults below are those of {recipe or 'the built-in recipe numbers'}. "
        "--profile, without a value, traces some steps into the run's profile/, for TensorBoard and Perfetto; --strict "
        "refuses a run whose newest checkpoint is damaged, rather than to go on from the one before; --deterministic "
        "gives the same bits in every run on GPUs too.",
        config=(FlagConversionOff,),  # `--section.field VALUE` for every field, be it True or False
    )
    join_processes(parsed.cluster)
    from transformer_jax import run as commands
    from transformer_jax.evaluation.evaluate import result_lines

    outcome = commands.train(
        Config(**{item.name: getattr(parsed, item.name) for item in dataclasses.fields(Config)}),
        parsed.workdir,
        profile=profile,
        strict=strict,
    )
    if outcome.test is not None and is_main_process():
        print(*result_lines(outcome.test), sep="\n")


def _run_name(recipe: str) -> str:
    path, _, name = recipe.partition(":")
    return Path(path).stem + (f"-{name}" if name else "")


def join_processes(cluster: Cluster) -> bool:
    """`distributed.initialize`. Returns whether there are several."""
    if not initialize(cluster):
        return False
    # What libraries print, such as Gloo on CPUs, is not the command's output.
    sys.stdout.flush()
    output = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    os.dup2(2, 1)
    sys.stdout = output
    return True


def decoding_of(args: Sequence[str]) -> DecodingConfig:
    """The decoding section of the first run named in the arguments, so that --help shows the run's own defaults."""
    for given in args:
        if not given.startswith("-") and RunDir(Path(given)).config_file.is_file():
            return RunDir(Path(given)).load_config().decoding
    return DecodingConfig()


def given_fields(decoding: DecodingConfig, args: Sequence[str]) -> dict[str, Any]:
    """The fields that have a flag in the arguments: each run keeps its own values of the others."""
    names = given_names(args)
    return {name: value for name, value in dataclasses.asdict(decoding).items() if name in names}


def given_names(args: Sequence[str]) -> set[str]:
    """The flags in the arguments, as the fields they are for: `beam_size` of `--beam-size=2`."""
    return {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
