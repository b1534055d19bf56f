"""The command line: parsers only. `transformer-jax {train,translate,evaluate,average}`, and `train.py`."""

import codecs
import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from transformer_jax.config import Config, DecodingConfig
from transformer_jax.errors import UserError, first_line
from transformer_jax.malloc import tune_malloc
from transformer_jax.recipes import load_recipe, numbers_config
from transformer_jax.run.folder import RunFolder

USAGE = """usage: transformer-jax COMMAND ... [--traceback] [--no-malloc-tuning]

commands:
  train [CONFIG] [--workdir DIR] [--section.field VALUE ...]   train a recipe, or go on with a run
  translate RUN [...] < in.txt > out.txt                       translate, a line for each line
  evaluate RUN... [--source FILE --reference FILE] [...]       BLEU, chrF, loss and speed
  average RUN --last K                                         average the last K checkpoints

options:
  --traceback           show where an error comes from
  --no-malloc-tuning    train with the C library's allocator as it is

transformer-jax COMMAND --help says more."""


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit status: 0, or 1 for a stated failure; 2, for wrong usage, is raised."""
    given = list(sys.argv[1:] if args is None else args)
    show_traceback = _take(given, "--traceback")
    # It speeds up training and slows down decoding.
    if not _take(given, "--no-malloc-tuning") and given[:1] == ["train"]:
        tune_malloc()
    commands: dict[str, Callable[[list[str]], None]] = {
        "train": _train,
        "translate": _translate,
        "evaluate": _evaluate,
        "average": _average,
    }
    if not given or given[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if given[0] not in commands:
        print(f"transformer-jax: {given[0]!r} is no command; legal: {', '.join(commands)}", file=sys.stderr)
        return 2
    warnings.showwarning = _show_warning
    try:
        commands[given[0]](given[1:])
        sys.stdout.flush()
    except UserError as error:
        if show_traceback:
            traceback.print_exc()
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the exit's flush does not fail too
        return 1
    except Exception as error:
        if show_traceback:
            raise
        print(f"error: {first_line(error)}\nrun again with --traceback to see where", file=sys.stderr)
        return 1
    return 0


def train_main() -> int:
    """`python train.py ...` is `transformer-jax train ...`."""
    return main(["train", *sys.argv[1:]])


def _train(args: list[str]) -> None:
    # The recipe decides the defaults of all other flags, so it is looked for first.
    recipe = args.pop(0) if args and not args[0].startswith("-") else None
    config = load_recipe(recipe) if recipe else numbers_config()

    @dataclass(frozen=True)
    class Train(Config):
        workdir: Path = Path("runs") / (_run_name(recipe) if recipe else "numbers")
        """The run's folder. The same command again goes on with the run there."""

    default = Train(**{item.name: getattr(config, item.name) for item in dataclasses.fields(Config)})
    parsed = _parse(
        Train,
        "train [CONFIG]",
        args,
        default=default,
        description="Trains a recipe, or goes on with the run in --workdir. CONFIG is FILE or FILE:NAME, a Python "
        f"file that defines get_config(); the defaults below are those of {recipe or 'the built-in recipe numbers'}.",
        config=(tyro.conf.FlagConversionOff,),  # `--section.field VALUE` for every field, be it True or False
    )
    from transformer_jax import commands

    commands.train(
        Config(**{item.name: getattr(parsed, item.name) for item in dataclasses.fields(Config)}),
        parsed.workdir,
        lambda line: print(line, flush=True),
    )


def _run_name(recipe: str) -> str:
    path, _, name = recipe.partition(":")
    return Path(path).stem + (f"-{name}" if name else "")


def _translate(args: list[str]) -> None:
    @dataclass(frozen=True)
    class Translate:
        run: tyro.conf.Positional[Path]
        """The run's folder."""
        decoding: Annotated[DecodingConfig, tyro.conf.arg(name="")] = field(default_factory=DecodingConfig)

    parsed = _parse(
        Translate,
        "translate",
        args,
        default=Translate(tyro.MISSING, _decoding_of(args)),
        description="Reads lines on stdin and writes one translation for each on stdout. Defaults are the run's own.",
    )
    from transformer_jax.decoding.translator import Translator

    translator = Translator.load(parsed.run, **_given(parsed.decoding, args))
    for translation in translator.translate(_stdin_lines()):
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


def _evaluate(args: list[str]) -> None:
    @dataclass(frozen=True)
    class Evaluate:
        runs: tyro.conf.Positional[tuple[Path, ...]]
        """One run's folder or more."""
        decoding: Annotated[DecodingConfig, tyro.conf.arg(name="")] = field(default_factory=DecodingConfig)
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

    parsed = _parse(
        Evaluate,
        "evaluate",
        args,
        default=Evaluate(tyro.MISSING, _decoding_of(args)),
        description="BLEU and chrF with sacreBLEU's signatures, exact match, loss, perplexity and speed.",
    )
    if not parsed.runs:
        _usage_error("evaluate", "name a run")
    if (parsed.source is None) != (parsed.reference is None):
        _usage_error("evaluate", "--source and --reference go together")
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
        if parsed.json:
            print(json.dumps(result, ensure_ascii=False), flush=True)
        else:
            print(f"{result['run']}, checkpoint {result['checkpoint']}")
            commands.say_result(result, print)


def _average(args: list[str]) -> None:
    @dataclass(frozen=True)
    class Average:
        run: tyro.conf.Positional[Path]
        """The run's folder."""
        last: int = 5
        """How many of its last checkpoints."""

    parsed = _parse(
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
    for arg in args:
        if not arg.startswith("-") and RunFolder(Path(arg)).config_file.is_file():
            return RunFolder(Path(arg)).load_config().decoding
    return DecodingConfig()


def _given(decoding: DecodingConfig, args: Sequence[str]) -> dict[str, Any]:
    """The fields that have a flag in the arguments: each run keeps its own values of the others."""
    flags = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
    return {name: value for name, value in dataclasses.asdict(decoding).items() if name in flags}


def _parse(
    cls: Any, command: str, args: Sequence[str], *, default: Any, description: str, config: tuple[Any, ...] = ()
) -> Any:
    """tyro's parser: exits with status 2 for wrong usage, and 0 for --help."""
    extra = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            cls, prog=f"transformer-jax {command}", description=description, args=list(args), config=config, **extra
        )
    except UserError as error:  # a value that a config's own checks refuse
        _usage_error(command, str(error))


def _usage_error(command: str, message: str) -> None:
    print(f"transformer-jax {command}: {message}", file=sys.stderr)
    raise SystemExit(2)


def _take(args: list[str], flag: str) -> bool:
    """Whether the flag is there; it is removed."""
    found = flag in args
    args[:] = [arg for arg in args if arg != flag]
    return found


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, UserWarning):
        print(f"warning: {message}", file=sys.stderr, flush=True)
