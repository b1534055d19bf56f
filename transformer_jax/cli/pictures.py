"""Parsers of the commands that draw: attention, plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformer_jax.cli.parsing import Positional, parse, usage_error


def attention(args: list[str]) -> None:
    """`transformer-jax attention`."""

    @dataclass(frozen=True)
    class Attention:
        run: Positional[Path]
        """The run's folder."""
        sentence: Positional[str]
        """What is translated."""
        output: Path
        """A page to explore, .html; or a picture, .png, .svg or .pdf."""
        target: str | None = None
        """A translation to look at in place of the run's own."""
        kind: Literal["encoder", "decoder", "cross"] = "cross"
        """Shown first: self-attention of the encoder or the decoder, or from target to source. A page has all."""
        layer: int | None = None
        """Shown first, from 1 on; None: the last."""
        head: int | Literal["all", "mean"] = "all"
        """Shown first, from 1 on; all, or their mean."""
        style: Literal["lines", "map"] = "lines"
        """Shown first: lines between tokens, or a heat map."""
        checkpoint: str | None = None
        """last, best, average or the number of a step; None: as the run says."""

    parsed = parse(
        Attention,
        "attention",
        args,
        default=None,
        description="Shows what the model attends to: a page that needs no server, or a picture for a paper.",
    )
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.visualization.attention import View, attention_of
    from transformer_jax.visualization.attention_drawing import draw_attention

    chosen = {} if parsed.checkpoint is None else {"checkpoint": parsed.checkpoint}
    found = attention_of(Translator.load(parsed.run, **chosen), parsed.sentence, parsed.target, run=str(parsed.run))
    draw_attention(found, parsed.output, View(parsed.kind, parsed.layer, parsed.head, parsed.style))
    print(f"{parsed.output}: {found.target}")


def plot(args: list[str]) -> None:
    """`transformer-jax plot`."""
    Panel = Literal["loss", "valid_loss", "bleu", "learning_rate", "lengths", "padding", "positions"]

    @dataclass(frozen=True)
    class Plot:
        subjects: Positional[tuple[str, ...]]
        """Folders of runs, and recipes: FILE or FILE:NAME."""
        output: Path
        """A .png, .svg or .pdf file."""
        panels: tuple[Panel, ...] = ()
        """Which plots; none: all but positions that there is something for."""

    parsed = parse(
        Plot,
        "plot",
        args,
        default=None,
        description="Learning curves, schedules, sentence lengths and padding of runs and recipes side by side.",
    )
    if not parsed.subjects:
        usage_error("plot", "name a run or a recipe")
    from transformer_jax.visualization.plots import plot

    print(f"{parsed.output}: {', '.join(plot(parsed.subjects, parsed.output, parsed.panels))}")
