"""The commands that show what a run, a recipe or a machine is: attention, plot, params, compile, doctor."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from transformer_jax.cli.parsing import CheckpointFlag, FlagConversionOff, Positional, RunFolder, arg, given
from transformer_jax.config import Config
from transformer_jax.presets import numbers_config
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import check_writable, to_json


@dataclass(frozen=True)
class Attention:
    """Draw what the model attends to: a page that needs no server, or a picture."""

    run_folder: RunFolder
    sentence: Annotated[Positional[str], arg(metavar="SENTENCE")]
    """Sentence to translate."""
    output: Path
    """File to write: a page to explore (.html), or a picture (.png, .svg, .pdf)."""
    target: str | None = None
    """Translation to show instead of the run's own."""
    kind: Literal["encoder", "decoder", "cross"] = "cross"
    """Attention to show first: self-attention of the encoder, of the decoder, or cross-attention. A page has all."""
    layer: int | None = None
    """Layer to show first, counted from 1. None shows the last."""
    head: int | Literal["all", "mean"] = "all"
    """Head to show first, counted from 1, or all heads, or their mean."""
    style: Literal["lines", "map"] = "lines"
    """Style to show first: lines between tokens, or a heat map."""
    parameters: Annotated[CheckpointFlag, arg(name="")] = field(default_factory=CheckpointFlag)

    def run(self) -> None:
        """Draw the attention weights to a file, and print the translation."""
        from transformer_jax.decoding.translator import Translator
        from transformer_jax.visualization.attention import View, attention_of, draw_attention

        check_writable(self.output)
        translator = Translator.load(self.run_folder, **given(self.parameters))
        attention = attention_of(translator, self.sentence, self.target, run=str(self.run_folder))
        draw_attention(attention, self.output, View(self.kind, self.layer, self.head, self.style))
        print(f"{self.output}: {attention.target}")


@dataclass(frozen=True)
class Plot:
    """Draw learning curves, schedules, sentence lengths and padding of runs and recipes next to each other."""

    subjects: Annotated[Positional[tuple[str, ...]], arg(metavar="RUN|CONFIG...")]
    """Folders of runs, and recipes: FILE or FILE:NAME."""
    output: Path
    """Picture to write: .png, .svg or .pdf."""
    panels: tuple[Literal["loss", "valid_loss", "bleu", "learning_rate", "lengths", "padding", "positions"], ...] = ()
    """Panels to draw. Empty draws all for which there are data, except positions."""

    def __post_init__(self) -> None:
        require(self.subjects, "name a run or a recipe")

    def run(self) -> None:
        """Draw the plots to a file, and print the names of the panels."""
        from transformer_jax.visualization.plots import plot

        print(f"{self.output}: {', '.join(plot(self.subjects, self.output, self.panels))}")


@dataclass(frozen=True)
class Params:
    """Count the parameters of a recipe, and the cost of training it."""

    config: Annotated[Positional[str], arg(metavar="CONFIG")] = ""
    """Recipe: FILE or FILE:NAME. A file of several recipes counts all of them. Empty uses the built-in recipe."""
    vocab_size: int | None = None
    """Vocabulary size instead of the recipe's."""
    flops: bool = False
    """Add the cost of training."""
    json: bool = False
    """Print one JSON object on one line."""

    def run(self) -> None:
        """Print the table."""
        from transformer_jax.accelerators.cost import params_report

        report, text = params_report(self.config, self.vocab_size, self.flops)
        print(to_json(report) if self.json else text)


@dataclass(frozen=True)
class Compile:
    """Compile a recipe for accelerators that are not here, and print whether it fits, and an estimate of its speed.

    Exits with status 1 if a batch shape does not fit. Every field of the recipe is a flag.
    """

    target: str
    """Accelerators: a GPU and a number (h100, h100:8), or a TPU and its topology (v5e:2x4, v5p:2x2x1)."""
    recipe: Annotated[Positional[str], arg(metavar="CONFIG")] = ""
    """Recipe: FILE or FILE:NAME, or a run's config.json. Empty uses the built-in recipe."""
    mesh: str = ""
    """Sizes of the mesh axes data, fsdp and tensor, such as 4,2,1. Empty takes those of the recipe."""
    batch_tokens: int | Literal["auto"] | None = None
    """Number of tokens per batch instead of the recipe's. auto finds the largest that fits."""
    shapes: tuple[str, ...] = ()
    """Batch shapes ROWSxSOURCExTARGET, such as 832x30x30. Empty takes those of sentences as long as WMT14's."""
    decode: bool = False
    """Compile the search for one batch of sources instead of the training step."""
    json: bool = False
    """Print one JSON object per batch shape and line."""
    config: Annotated[FlagConversionOff[Config], arg(name="")] = field(default_factory=numbers_config)

    def run(self) -> int:
        """Print a row per batch shape. Return 1 if one does not fit."""
        from transformer_jax.accelerators.targets import parse_target, set_environment

        set_environment()
        from transformer_jax.accelerators import compile as aot
        from transformer_jax.data.batching import Shape

        target, config = parse_target(self.target), self.config
        shapes = [Shape(*_three_numbers(shape, "x", "--shapes")) for shape in self.shapes]
        if self.mesh:
            sizes = zip(
                ("mesh_data", "mesh_fsdp", "mesh_tensor"), _three_numbers(self.mesh, ",", "--mesh"), strict=True
            )
            config = config.with_changes(training=dict(sizes))
        if self.batch_tokens is not None:
            tokens = aot.largest_batch(config, target) if self.batch_tokens == "auto" else self.batch_tokens
            config = config.with_changes(data={"batch_tokens": tokens})
        if self.decode:
            reports = [aot.compile_decoding(config, target, (shapes or aot.typical_shapes(config))[-1])]
        else:
            reports = list(aot.compile_training(config, target, shapes))
        if self.json:
            print(*(to_json(asdict(report)) for report in reports), sep="\n")
        else:
            print(aot.render(reports, target) + (f"\nbatch_tokens {tokens:,}" if self.batch_tokens == "auto" else ""))
        return 0 if all(report.fits for report in reports) else 1


def _three_numbers(text: str, separator: str, flag: str) -> list[int]:
    parts, example = text.split(separator), separator.join(("8", "1", "1"))
    is_legal = len(parts) == 3 and all(part.isdigit() and int(part) for part in parts)
    require(is_legal, f"{flag} {text} is not three positive numbers with {separator!r} between, such as {example}")
    return [int(part) for part in parts]


@dataclass(frozen=True)
class Doctor:
    """Check this machine, and a recipe or a run, and print what needs fixing."""

    subject: Annotated[Positional[str], arg(metavar="CONFIG|RUN")] = ""
    """Recipe (FILE or FILE:NAME), folder of a run, or its config.json. Empty checks the machine alone."""

    def run(self) -> int:
        """Print a line per check. Return 1 if something needs fixing."""
        from transformer_jax.doctor import run_checks

        is_well = True
        for finding in run_checks(self.subject):
            print(finding, flush=True)
            is_well &= finding.ok
        return 0 if is_well else 1
