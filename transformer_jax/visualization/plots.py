"""Plot and compare runs and recipes: learning curves, schedules, lengths, padding, positional encodings."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import numpy as np

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import EncodedPairs, load_cached, load_or_encode
from transformer_jax.data.loader import plan_batches
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.model.positional import sinusoids
from transformer_jax.presets import load_recipe
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import check_writable, read_json_lines
from transformer_jax.training.optimizer import make_schedule
from transformer_jax.types import UserError
from transformer_jax.visualization.canvas import COLORS, drawing

if TYPE_CHECKING:  # an optional package
    from transformer_jax.visualization.canvas import Axes

Panel = Literal["loss", "valid_loss", "bleu", "learning_rate", "lengths", "padding", "positions"]

_NUM_POSITIONS = 100


class Curve(NamedTuple):
    """One curve of a run or recipe in a panel."""

    x: np.ndarray
    y: np.ndarray
    note: str
    """What distinguishes the curve from other curves of the same run; may be empty."""
    style: dict[str, Any]
    """Keyword arguments for matplotlib, in addition to the run's color."""


@dataclass(frozen=True)
class Subject:
    """A run or a recipe to plot."""

    name: str
    config: Config
    run: RunDir | None

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, without damaged lines."""
        if self.run is None or not self.run.metrics.is_file():
            return []
        return [row for row in read_json_lines(self.run.metrics) if "step" in row]

    @cached_property
    def encoded(self) -> EncodedPairs | None:
        """The run's training pairs. None for a recipe, an imported model, or a run without tokenizers."""
        if self.run is None or not self.run.tokenizer.is_dir() or self.run.imported.is_file():
            return None
        if self.run.data_sha256.is_file():
            sha256 = self.run.data_sha256.read_text(errors="replace").strip()
            cached = load_cached(self.run.cache, "train", sha256, self.config.model)
            if cached is not None:
                return cached
        pairs = read_split(self.config.data, "train")
        assert pairs is not None  # data.train is never empty
        return load_or_encode(self.config, "train", TokenizerPair.load(self.run.tokenizer), self.run.cache, pairs)


def load_subject(name: str) -> Subject:
    """Load a run folder, or a recipe given as FILE or FILE:NAME, for plotting."""
    if Path(name).is_dir():
        run = RunDir(Path(name))
        return Subject(name.rstrip("/"), run.load_config(), run)
    return Subject(name, load_recipe(name), None)


def logged(subject: Subject, value: str) -> list[Curve]:
    """Return a metric of `metrics.jsonl` by step. A null, which represents a non-finite number, becomes a gap."""
    rows = [row for row in subject.metrics if value in row]
    steps, values = ([row[name] for row in rows] for name in ("step", value))
    # Few points get markers, because a single point without a marker is invisible.
    style = {"marker": "o", "markersize": 3} if len(rows) <= 12 else {"linewidth": 1}
    return [Curve(np.array(steps), np.array(values, float), "", style)] if rows else []


def learning_rates(subject: Subject) -> list[Curve]:
    """Return the learning rate of every step of the recipe, starting with step 1."""
    training = subject.config.training
    warmup = min(training.warmup_steps, training.num_steps)
    steps = np.unique(np.concatenate([np.linspace(1, training.num_steps, 400), [warmup]]).astype(int))
    schedule = make_schedule(training, subject.config.model.d_model)
    return [Curve(steps, np.array(jax.vmap(schedule)(steps - 1)), "", {})]


def lengths(subject: Subject) -> list[Curve]:
    """Return the share of training pairs by number of tokens, which counts BOS and EOS."""
    if subject.encoded is None:
        return []
    curves = []
    sides = (("source", "-", subject.encoded.source_lengths), ("target", "--", subject.encoded.target_lengths))
    for note, linestyle, side in sides:
        shares = np.bincount(side) / len(side)
        style = {"drawstyle": "steps-mid", "linestyle": linestyle}
        curves.append(Curve(np.arange(len(shares)), 100 * shares, note, style))
    return curves


def padding(subject: Subject) -> list[Curve]:
    """Return the share of padding, with empty rows, in each batch of the first epoch by the longer side."""
    if subject.encoded is None:
        return []
    plan, encoded = plan_batches(subject.config, subject.encoded), subject.encoded
    tokens = encoded.source_lengths + encoded.target_lengths
    x, y = [], []
    for index in range(plan.batches_per_epoch):
        shape, pairs, _ = plan.rows(index)
        x.append(max(shape.src_length, shape.tgt_length))
        y.append(100 * (1 - tokens[pairs].sum() / (shape.rows * (shape.src_length + shape.tgt_length))))
    note = f"{plan.padding_share:.1%} of all positions"
    return [Curve(np.array(x), np.array(y), note, {"linestyle": "", "marker": "o", "markersize": 3, "alpha": 0.4})]


def positional_encoding(subject: Subject) -> np.ndarray:
    """Return the vectors of the first positions: [positions, d_model]."""
    model = subject.config.model
    if model.positions != "learned":
        return sinusoids(_NUM_POSITIONS, model.d_model, model.positions, model.position_exponent, model.position_offset)
    if subject.run is None:
        raise UserError(f"{subject.name}: model.positions is 'learned', so only a run has them: name a run")
    from transformer_jax.decoding.decode import run_params

    params = run_params(subject.run, subject.config)
    return np.asarray(params["source_positions"]["table"], np.float32)[model.position_offset :][:_NUM_POSITIONS]


_PLOTS: dict[Panel, tuple[str, str, Callable[[Subject], list[Curve]]]] = {
    "loss": ("step", "training loss", partial(logged, value="loss")),
    "valid_loss": ("step", "validation loss", partial(logged, value="valid_loss")),
    "bleu": ("step", "validation BLEU", partial(logged, value="valid_bleu")),
    "learning_rate": ("step", "learning rate", learning_rates),
    "lengths": ("tokens", "% of training pairs", lengths),
    "padding": ("longer side of the batch, tokens", "% padding of a batch", padding),
}
"""The labels of the x and the y axis of a panel, and the function that returns a subject's curves in it."""


def plot(names: Sequence[str], output: Path, panels: Sequence[Panel] = ()) -> list[str]:
    """Plot runs and recipes into one picture, with one panel for each quantity.

    Args:
        names: Folders of runs, and recipes: FILE or FILE:NAME.
        output: A .png, .svg or .pdf file.
        panels: The panels to draw. Empty draws every panel that has data, except `positions`.

    Returns:
        The names of the panels that were drawn.

    Raises:
        UserError: There is no such run, recipe or panel; there is nothing to plot; matplotlib is not installed; or the
            file cannot be written.
    """
    unknown = sorted(set(panels) - set(get_args(Panel)))
    require(not unknown, f"panels has {', '.join(unknown)}; legal: {', '.join(get_args(Panel))}")
    check_writable(output)
    subjects = [load_subject(name) for name in names]
    pictures: list[tuple[str, Callable[[Axes], None]]] = []
    for panel in panels or _PLOTS:
        if panel == "positions":
            pictures += [(f"positions of {one.name}", partial(_draw_positions, one)) for one in subjects]
            continue
        curves = [_curves(panel, subject, is_asked=bool(panels)) for subject in subjects]
        if any(curves):
            pictures.append((panel, partial(_draw_curves, panel, list(zip(subjects, curves, strict=True)))))
    nothing = f"{', '.join(names)}: nothing to plot: {', '.join(panels)} needs the metrics or the corpus of a run"
    require(pictures, nothing)
    columns = min(3, len(pictures))
    rows = math.ceil(len(pictures) / columns)
    with drawing(output, 4.4 * columns, 3.2 * rows) as figure:
        for place, (_, draw) in enumerate(pictures, 1):
            draw(figure.add_subplot(rows, columns, place))
    return [name for name, _ in pictures]


def _curves(panel: Panel, subject: Subject, *, is_asked: bool) -> list[Curve]:
    """Return a subject's curves. A corpus that cannot be read is an error only if the panel was asked for."""
    _, _, curves = _PLOTS[panel]
    try:
        return curves(subject)
    except UserError as error:
        if is_asked:
            raise
        warnings.warn(f"{subject.name} without lengths and padding: {error}", stacklevel=3)
        return []


def _draw_curves(panel: Panel, drawn: Sequence[tuple[Subject, list[Curve]]], axes: "Axes") -> None:
    x_label, y_label, _ = _PLOTS[panel]
    has_legend = sum(bool(curves) for _, curves in drawn) > 1
    for place, (subject, curves) in enumerate(drawn):
        for curve in curves:
            label = ", ".join(filter(None, [subject.name if len(drawn) > 1 else "", curve.note]))
            has_legend |= bool(curve.note)
            axes.plot(curve.x, curve.y, color=COLORS[place % len(COLORS)], label=label, **curve.style)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if panel in ("bleu", "learning_rate", "lengths", "padding"):
        axes.set_ylim(bottom=0)
    if panel == "valid_loss":
        _add_perplexity_axis(axes)
    if has_legend:
        axes.legend(fontsize=7)


def _add_perplexity_axis(axes: "Axes") -> None:
    right = axes.secondary_yaxis("right", functions=(np.exp, np.log))
    right.set_ylabel("perplexity")
    # The losses are evenly spaced, so ticks are logarithmic in perplexity. Where that gives few, matplotlib chooses.
    low, high = np.exp(axes.get_ylim())
    ticks = [first * 10**power for power in range(6) for first in (1, 2, 5) if low <= first * 10**power <= high]
    if len(ticks) >= 3:
        right.set_yticks(ticks, [f"{tick:,}" for tick in ticks])


def _draw_positions(subject: Subject, axes: "Axes") -> None:
    table, columns = positional_encoding(subject), "dimension"
    if subject.config.model.positions == "interleaved":  # alternating sines and cosines would be a blur
        table = np.concatenate([table[:, 0::2], table[:, 1::2]], axis=1)
        columns = "dimensions 0, 2, ..., then 1, 3, ..."
    largest = float(np.abs(table).max())
    image = axes.imshow(table, aspect="auto", cmap="RdBu", vmin=-largest, vmax=largest, interpolation="nearest")
    axes.set_xlabel(columns)
    axes.set_ylabel("position")
    axes.set_title(subject.name, fontsize=9)
    axes.figure.colorbar(image, ax=axes)
