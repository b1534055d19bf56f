"""Parsers of the commands that make and use runs: train, translate, evaluate, average."""

import codecs
import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from transformer_jax.cli.parsing import MISSING, FlagConversionOff, Positional, arg, parse, take_flag, usage_error
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.distributed import Cluster, from_first, is_first, join
from transformer_jax.recipes import load_recipe, numbers_config
from transformer_jax.run.folder import RunFolder
from transformer_jax.strict_json import to_json


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
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    parsed = parse(
        Translate,
        "translate",
        args,
        default=Translate(MISSING, _decoding_of(args)),
        description="Reads lines on stdin and writes one translation for each on stdout. Defaults are the run's own.",
    )
    with_others = join_processes(parsed.cluster)
    from transformer_jax.decoding.translator import Translator

    translator = Translator.load(parsed.run, **_given(parsed.decoding, args))
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


def evaluate(args: list[str]) -> None:
    """`transformer-jax evaluate`."""

    @dataclass(frozen=True)
    class Evaluate:
        runs: Positional[tuple[Path, ...]]
        """One run's folder or more."""
        decoding: Annotated[DecodingConfig, arg(name="")] = field(default_factory=DecodingConfig)
        source: Path | None = None
        """A text file to translate, in place of a split of the run's corpus."""
        reference: Path | None = None
        """Its translation, line by line."""
        split: Literal["test", "valid", "train"] = "test"
        """Which split of the run's corpus."""
        tokenize: str | None = None
        """sacreBLEU's tokenisation; None: 13a, or none where the corpus is tokenised already."""
        lowercase: bool = False
        """Score without case."""
        json: bool = False
        """One JSON object a run, one a line, and nothing else on stdout."""
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    parsed = parse(
        Evaluate,
        "evaluate",
        args,
        default=Evaluate(MISSING, _decoding_of(args)),
        description="BLEU and chrF with sacreBLEU's signatures, exact match, loss, perplexity and speed.",
    )
    if not parsed.runs:
        usage_error("evaluate", "name a run")
    if (parsed.source is None) != (parsed.reference is None):
        usage_error("evaluate", "--source and --reference go together")
    join_processes(parsed.cluster)
    from transformer_jax import commands
    from transformer_jax.data.pairs import Pairs
    from transformer_jax.data.text_files import read_lines

    pairs = None
    if parsed.source is not None:
        pairs = Pairs(
            read_lines(parsed.source), read_lines(parsed.reference), f"{parsed.source} and {parsed.reference}"
        )
    given = _given(parsed.decoding, args)
    for run in parsed.runs:
        result = commands.evaluate(
            run, pairs, parsed.split, tokenize=parsed.tokenize, lowercase=parsed.lowercase, **given
        )
        if not is_first():
            continue
        if parsed.json:
            print(to_json(result), flush=True)
        else:
            print(f"{result['run']}, checkpoint {result['checkpoint']}")
            commands.say_result(result, print)


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


def average(args: list[str]) -> None:
    """`transformer-jax average`."""

    @dataclass(frozen=True)
    class Average:
        run: Positional[Path]
        """The run's folder."""
        last: int = 5
        """How many of its last checkpoints."""

    parsed = parse(
        Average,
        "average",
        args,
        default=None,
        description="Averages the parameters of the last checkpoints (paper section 6.1), for --checkpoint average.",
    )
    from transformer_jax import commands

    steps = commands.average(parsed.run, parsed.last)
    print(f"{RunFolder(parsed.run).average}: the average of the steps {', '.join(map(str, steps))}")


def _decoding_of(args: Sequence[str]) -> DecodingConfig:
    """The decoding section of the first run named in the arguments, so that --help shows the run's own defaults."""
    for given in args:
        if not given.startswith("-") and RunFolder(Path(given)).config_file.is_file():
            return RunFolder(Path(given)).load_config().decoding
    return DecodingConfig()


def _given(decoding: DecodingConfig, args: Sequence[str]) -> dict[str, Any]:
    """The fields that have a flag in the arguments: each run keeps its own values of the others."""
    flags = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
    return {name: value for name, value in dataclasses.asdict(decoding).items() if name in flags}
