"""Parsers of the commands that repeat the paper's experiments: table3, parsing."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from transformer_jax.cli.parsing import MISSING, FlagConversionOff, Positional, arg, parse, take_flag, usage_error
from transformer_jax.cli.runs import decoding_of, given_fields, join_processes
from transformer_jax.config import Config, DecodingConfig
from transformer_jax.experiments.table3 import ROWS, scaled, table3_config
from transformer_jax.runtime.distributed import Cluster, is_main_process
from transformer_jax.runtime.files import to_json
from transformer_jax.types import UserError


def table3(args: list[str]) -> None:
    """`transformer-jax table3`."""
    as_json = take_flag(args, "--json")
    rows = []
    while args and not args[0].startswith("-"):
        rows.append(args.pop(0))
    if rows == ["all"]:
        rows = list(ROWS)

    @dataclass(frozen=True)
    class Table3(Config):
        scale: int = 1
        """Divides d_model and d_ff: 4 gives a base of 128 and 512. Heads and layers stay."""
        workdir: Path = Path("runs") / "table3"
        """The rows' runs are its folders. The same command again goes on with them."""
        picture: Path | None = None
        """Draws the rows beside the paper's: a .png, .svg or .pdf file."""
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    base = table3_config()
    parsed = parse(
        Table3,
        "table3 ROW...",
        args,
        default=Table3(**{item.name: getattr(base, item.name) for item in dataclasses.fields(Config)}),
        description="Trains rows of the paper's Table 3, all for the same number of steps, and prints parameters, "
        "perplexity and BLEU on the validation split beside the paper's. The flags change the base row, and the rows "
        f"change what comes of it, sizes in the paper's proportion. ROW is all, or some of {', '.join(ROWS)}. Progress "
        "goes to stderr; --json, without a value, prints one JSON object a row.",
        config=(FlagConversionOff,),
    )
    if not rows:
        usage_error("table3", f"name rows, all or some of {', '.join(ROWS)}")
    base = Config(**{item.name: getattr(parsed, item.name) for item in dataclasses.fields(Config)})
    try:
        base = scaled(base, parsed.scale)
    except UserError as error:
        usage_error("table3", str(error))
    join_processes(parsed.cluster)
    from transformer_jax.experiments.table3_runs import render, run_table3

    results = []
    for result in run_table3(rows, base, parsed.workdir):
        results.append(result)
        if as_json and is_main_process():
            print(to_json(result), flush=True)
    if results and not as_json and is_main_process():
        print(render(results))
    if results and parsed.picture is not None and is_main_process():
        from transformer_jax.experiments.table3_runs import plot_table3

        plot_table3(results, parsed.picture)


def parsing(args: list[str]) -> None:
    """`transformer-jax parsing prepare` and `parsing score`."""
    actions = {"prepare": _prepare, "score": _score}
    if args and args[0] in actions:
        actions[args[0]](args[1:])
    elif args[:1] in (["-h"], ["--help"]):
        print("usage: transformer-jax parsing {prepare,score} ...; each has a --help of its own")
    else:
        usage_error("parsing", f"{args[0] if args else 'nothing'} is no action; legal: {', '.join(actions)}")


def _prepare(args: list[str]) -> None:
    @dataclass(frozen=True)
    class Prepare:
        output: Path
        """The folder to write STEM.words and STEM.tree into."""
        train: tuple[Path, ...]
        """Files of trees in bracket form, plain or .gz, .xz, .zst."""
        valid: tuple[Path, ...] = ()
        """The same for validation."""
        test: tuple[Path, ...] = ()
        """The same for the test."""

    parsed = parse(
        Prepare,
        "parsing prepare",
        args,
        default=None,
        description="Makes sentence pairs of a treebank: the words, and the tree as a sequence of tokens, without "
        "empty elements and function tags.",
    )
    if not parsed.train:
        usage_error("parsing prepare", "--train names no file")
    from transformer_jax.experiments.parsing.command import prepare

    splits = {stem: getattr(parsed, stem) for stem in ("train", "valid", "test")}
    prepare({stem: files for stem, files in splits.items() if files}, parsed.output)


def _score(args: list[str]) -> None:
    @dataclass(frozen=True)
    class Score:
        run: Positional[Path]
        """The run's folder."""
        decoding: Annotated[DecodingConfig, arg(name="")] = field(default_factory=DecodingConfig)
        split: str = "valid"
        """Which of the files that prepare wrote."""
        output: Path | None = None
        """A file for the parses in bracket form, a line each."""
        json: bool = False
        """One JSON object on one line, and nothing else on stdout."""

    parsed = parse(
        Score,
        "parsing score",
        args,
        default=Score(MISSING, decoding_of(args)),
        description="Labeled bracketing F1 of a run's parses, as EVALB counts it. What is no tree is repaired, and "
        "counted.",
    )
    from transformer_jax.experiments.parsing.command import say_score, score

    result = score(parsed.run, parsed.split, parsed.output, **given_fields(parsed.decoding, args))
    if parsed.json:
        print(to_json(result))
    else:
        say_score(result)
