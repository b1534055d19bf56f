"""The commands that train, and that repeat experiments of the paper: train, table3, parsing."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from transformer_jax.cli.parsing import DecodingFlags, FlagConversionOff, Positional, RunFolder, arg, given, subcommand
from transformer_jax.cli.session import processes
from transformer_jax.config import Config
from transformer_jax.experiments.table3 import ROWS, scaled, table3_config
from transformer_jax.presets import load_recipe, numbers_config
from transformer_jax.runtime.distributed import Cluster, is_main_process, on_main_process
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import check_writable, to_json


@dataclass(frozen=True)
class Train:
    """Train a recipe, or resume the run in --workdir. Every field of the recipe is a flag."""

    recipe: Annotated[Positional[str], arg(metavar="CONFIG")] = ""
    """Recipe: FILE or FILE:NAME of a Python file that defines get_config(), or a run's config.json. Empty uses the
    built-in recipe, spelled-out numbers."""
    workdir: Path = Path("runs") / "numbers"
    """Folder of the run. An equal command resumes the run in it."""
    profile: bool = False
    """Trace five training steps into the run's profile/, for TensorBoard and Perfetto."""
    strict: bool = False
    """Fail if the newest checkpoint is damaged, instead of resuming from an earlier one."""
    cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)
    config: Annotated[FlagConversionOff[Config], arg(name="")] = field(default_factory=numbers_config)

    def run(self) -> None:
        """Train, and print the scores on the test split."""
        with processes(self.cluster):
            from transformer_jax import run
            from transformer_jax.evaluation.evaluate import result_lines

            outcome = run.train(self.config, self.workdir, profile=self.profile, strict=self.strict)
            if outcome.test is not None and is_main_process():
                print(*result_lines(outcome.test), sep="\n")


def train_defaults(recipe: str) -> Train:
    """Return the default of every flag of `train` for a recipe."""
    if not recipe:
        return Train()
    path, _, name = recipe.partition(":")
    workdir = Path("runs") / (Path(path).stem + (f"-{name}" if name else ""))
    return Train(recipe, workdir, config=load_recipe(recipe))


@dataclass(frozen=True)
class Table3:
    """Train rows of the paper's Table 3 and print parameters, perplexity and BLEU next to the paper's.

    All rows are trained for the same number of steps. The flags of the recipe change the base row; the other rows
    change sizes in the paper's proportions. Progress goes to stderr.
    """

    rows: Annotated[Positional[tuple[str, ...]], arg(metavar="ROW...")]
    """Rows: base, A1 to A4, B1, B2, C1 to C7, D1 to D4, E, big, or all."""
    scale: int = 1
    """Divisor of d_model and d_ff: 4 gives a base model of 128 and 512. Heads and layers stay."""
    workdir: Path = Path("runs") / "table3"
    """Folder of the rows' runs. The same command resumes them."""
    picture: Path | None = None
    """File for a picture of the rows next to the paper's: .png, .svg or .pdf."""
    json: bool = False
    """Print one JSON object per row and line instead of the table."""
    cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)
    config: Annotated[FlagConversionOff[Config], arg(name="")] = field(default_factory=table3_config)

    def __post_init__(self) -> None:
        require(self.rows, f"name rows: all, or some of {', '.join(ROWS)}")
        scaled(self.config, self.scale)

    def run(self) -> None:
        """Train the selected rows of Table 3 and print the results next to the paper's."""
        with processes(self.cluster):
            from transformer_jax.experiments.table3_runs import plot_table3, render, run_table3

            if self.picture is not None:
                on_main_process(check_writable)(self.picture)
            rows = list(ROWS) if self.rows == ("all",) else list(self.rows)
            results = []
            for result in run_table3(rows, scaled(self.config, self.scale), self.workdir):
                results.append(result)
                if self.json and is_main_process():
                    print(to_json(result), flush=True)
            if results and is_main_process():
                if not self.json:
                    print(render(results))
                if self.picture is not None:
                    plot_table3(results, self.picture)


@dataclass(frozen=True)
class ParsingPrepare:
    """Convert a treebank to pairs of words and trees as tokens, without empty elements and function tags."""

    output: Path
    """Folder for the files STEM.words and STEM.tree."""
    train: tuple[Path, ...]
    """Files of trees in bracket form for training, plain or .gz, .xz, .zst."""
    valid: tuple[Path, ...] = ()
    """Files of trees for validation."""
    test: tuple[Path, ...] = ()
    """Files of trees for the test."""

    def __post_init__(self) -> None:
        require(self.train, "--train names no file")

    def run(self) -> None:
        """Write the pairs."""
        from transformer_jax.experiments.parsing.command import prepare

        splits = {"train": self.train, "valid": self.valid, "test": self.test}
        prepare({stem: files for stem, files in splits.items() if files}, self.output)


@dataclass(frozen=True)
class ParsingScore:
    """Print the labeled bracketing F1 of a run's parses, as EVALB counts it. Invalid trees are repaired and counted."""

    run_folder: RunFolder
    decoding: Annotated[DecodingFlags, arg(name="")] = field(default_factory=DecodingFlags)
    split: str = "valid"
    """Stem of the files that `parsing prepare` wrote."""
    output: Path | None = None
    """File for the parses in bracket form, a line each."""
    json: bool = False
    """Print one JSON object on one line, and nothing else on stdout."""

    def run(self) -> None:
        """Print the score."""
        from transformer_jax.experiments.parsing.command import render, score

        result = score(self.run_folder, self.split, self.output, **given(self.decoding))
        print(to_json(result) if self.json else render(result))


@dataclass(frozen=True)
class Parsing:
    """Convert treebanks, and score parses (paper section 6.3)."""

    action: Annotated[
        Annotated[ParsingPrepare, subcommand("prepare")] | Annotated[ParsingScore, subcommand("score")], arg(name="")
    ]

    def run(self) -> None:
        """Run the action."""
        self.action.run()
