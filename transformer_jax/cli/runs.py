"""Parsers of the commands that make and use runs: train, translate."""

import codecs
import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from transformer_jax.cli.parsing import MISSING, FlagConversionOff, Positional, arg, parse, take_flag
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.distributed import Cluster, from_first, is_first, join
from transformer_jax.recipes import load_recipe, numbers_config
from transformer_jax.run.folder import RunFolder


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
    from transformer_jax import commands

    commands.train(
        Config(**{item.name: getattr(parsed, item.name) for item in dataclasses.fields(Config)}),
        parsed.workdir,
        lambda line: print(line, flush=True),
        profile=profile,
        strict=strict,
    )


def _run_name(recipe: str) -> str:
    path, _, name = recipe.partition(":")
    return Path(path).stem + (f"-{name}" if name else "")


def translate(args: list[str]) -> None:
    """`transformer-jax translate`."""

    @dataclass(frozen=True)
    class Translate:
        run: Positional[Path]
        """The run's folder."""
        decoding: Annotated[DecodingConfig, arg(name="")] = field(default_factory=DecodingConfig)
        explain: bool = False
        """In place of translations, tell step by step how they are found; for a few lines."""
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    parsed = parse(
        Translate,
        "translate",
        args,
        default=Translate(MISSING, decoding_of(args)),
        description="Reads lines on stdin and writes one translation for each on stdout. Defaults are the run's own.",
    )
    with_others = join_processes(parsed.cluster)
    from transformer_jax.decoding.translator import Translator

    translator = Translator.load(parsed.run, **given_fields(parsed.decoding, args))
    if parsed.explain:
        from transformer_jax.decoding.explain import explain

        told = explain(translator, _stdin_lines()) if is_first() else []
        sys.stdout.buffer.write("\n".join(f"{one}\n" for one in told).encode("utf-8", "replace"))
        return
    if with_others:
        lines = from_first(_stdin_lines() if is_first() else None)
        translations = translator.translate(lines, shared=True)
    else:
        translations = translator.translate(_stdin_lines())
    for translation in translations if is_first() else ():
        sys.stdout.buffer.write(translation.encode("utf-8", "replace") + b"\n")
    sys.stdout.buffer.flush()


def _stdin_lines() -> list[str]:
    """Lines end at `\\n` alone. A `\\r` before it and a byte-order mark are dropped; what is not UTF-8: U+FFFD."""
    data = sys.stdin.buffer.read()
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            warnings.warn(f"line {number} is not UTF-8 at byte {error.start + 1}: read as U+FFFD", stacklevel=2)
            text = line.decode("utf-8", "replace")
        texts.append(text.removesuffix("\r"))
    return texts


def join_processes(cluster: Cluster) -> bool:
    """`distributed.join`. Returns whether there are several."""
    if not join(cluster):
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
        if not given.startswith("-") and RunFolder(Path(given)).config_file.is_file():
            return RunFolder(Path(given)).load_config().decoding
    return DecodingConfig()


def given_fields(decoding: DecodingConfig, args: Sequence[str]) -> dict[str, Any]:
    """The fields that have a flag in the arguments: each run keeps its own values of the others."""
    flags = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
    return {name: value for name, value in dataclasses.asdict(decoding).items() if name in flags}
