"""Attention weights between the tokens of a sentence pair, as a page to explore (.html) or a figure for a paper."""

import base64
import json
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer, attention_maps
from transformer_jax.runtime.files import write_atomically
from transformer_jax.types import UserError
from transformer_jax.visualization.canvas import SUFFIXES, add_lines, drawing, head_colors

if TYPE_CHECKING:  # an optional package
    from transformer_jax.visualization.canvas import Axes, AxesImage

Kind = Literal["encoder", "decoder", "cross"]
Style = Literal["lines", "map"]

_maps = jax.jit(attention_maps, static_argnums=0)

_PLACES: dict[Kind, tuple[str, str, str]] = {
    "encoder": ("encoder", "self_attention", "Encoder self-attention"),
    "decoder": ("decoder", "self_attention", "Decoder self-attention"),
    "cross": ("decoder", "cross_attention", "Cross-attention"),
}
"""The stack and the module that compute the weights of each kind, and the title of a figure of them."""
_CELL = 0.19
"""Inches for a token in a figure."""
_FAINTEST = 0.01
"""Share of the largest weight below which a line is too faint to be seen."""
_MAX_WEIGHTS = 40_000_000
"""Weights in a page that a browser can still open; each takes 2 bytes, which base64 makes 8/3."""


class Maps(NamedTuple):
    """The attention weights of one kind, in all layers and heads."""

    queries: tuple[str, ...]
    """The tokens that attend. In cross-attention, each is the token that the decoder predicts."""
    keys: tuple[str, ...]
    weights: np.ndarray
    """float32 [layers, heads, queries, keys]; each row sums to 1."""


@dataclass(frozen=True)
class Attention:
    """The attention weights of a model over a sentence and its translation."""

    run: str
    source: str
    target: str
    is_given: bool
    """Whether the caller supplied the target. Otherwise it is the run's own translation."""
    maps: dict[Kind, Maps]


@dataclass(frozen=True)
class View:
    """Which attention weights a picture shows, or a page shows first."""

    kind: Kind = "cross"
    layer: int | None = None
    """Layer, counted from 1 as in the paper. None: the last layer."""
    head: int | Literal["all", "mean"] = "all"
    """Head, counted from 1; all heads; or the mean of all heads."""
    style: Style = "lines"
    """Lines between tokens as in the paper's Figures 3 to 5, or a heat map."""

    def layer_in(self, attention: Attention) -> int:
        """Return the number of the layer, counted from 1, after checking that the model has this view."""
        if self.kind not in attention.maps or self.style not in get_args(Style):
            kinds, styles = ", ".join(attention.maps), ", ".join(get_args(Style))
            raise UserError(f"kind is {self.kind!r} and style {self.style!r}; legal: {kinds}; {styles}")
        layers, heads = attention.maps[self.kind].weights.shape[:2]
        if self.layer is not None and not 1 <= self.layer <= layers:
            raise UserError(f"layer is {self.layer}; {self.kind} attention has layers 1 to {layers}")
        if self.head not in ("all", "mean", *range(1, heads + 1)):
            raise UserError(f"head is {self.head!r}; {self.kind} attention has heads 1 to {heads}, or all, or mean")
        return self.layer or layers


def attention_of(translator: Translator, sentence: str, target: str | None = None, *, run: str = "") -> Attention:
    """Compute the attention weights over a sentence and a translation of it.

    Args:
        translator: The model with its tokenizers.
        sentence: The source sentence.
        target: The translation. None: the run's own translation.
        run: Name of the run, for display.

    Returns:
        The weights of encoder, decoder and cross-attention. The source's tokens include the BOS and EOS that the model
        reads.

    Raises:
        UserError: The sentence is empty, or too long for the model's positions.
    """
    model, tokenizers = translator.config.model, translator.tokenizers
    (src,) = translator.encode([sentence])
    if not src:
        raise UserError("the sentence is empty: attention is between tokens")
    if target is None:
        ((best,),) = translator.translate_n_best([sentence], 1)
        text, tgt_out = best.text, list(best.token_ids) or [model.eos_id]
    else:
        text, tgt_out = target, [*tokenizers.target.encode([target])[0], model.eos_id]
    tgt_in = [model.start_id, *tgt_out[:-1]]
    weights = _maps(Transformer(model), translator.params, jnp.array([src], jnp.int32), jnp.array([tgt_in], jnp.int32))
    source = tuple(tokenizers.source.pieces(src))
    read, written = (tuple(tokenizers.target.pieces(ids)) for ids in (tgt_in, tgt_out))
    tokens = {"encoder": (source, source), "decoder": (read, read), "cross": (written, source)}
    maps = {}
    for kind, (stack, module, _) in _PLACES.items():
        layers = range(getattr(model, stack).num_layers)
        found = [np.asarray(weights[f"{stack}/layer_{i}/{module}"][0], np.float32) for i in layers]
        maps[kind] = Maps(*tokens[kind], np.stack(found))
    return Attention(run, sentence, text, target is not None, maps)


def draw_attention(attention: Attention, output: Path, view: View | None = None) -> None:
    """Write a page to explore (.html), or a picture of one view (.png, .svg, .pdf).

    Args:
        attention: What `attention_of` returned.
        output: The file; its suffix decides the format.
        view: What a picture shows, or a page shows first. None: cross-attention of the last layer, all heads.

    Raises:
        UserError: The suffix is unknown, the model has no such view, the sentence is too long for a page, the file
            cannot be written, or a picture is wanted and matplotlib is not installed.
    """
    view = view or View()
    view.layer_in(attention)
    if output.suffix in (".html", ".htm"):
        write_atomically(output, attention_page(attention, view))
    elif output.suffix in SUFFIXES:
        _write_figure(attention, output, view)
    else:
        raise UserError(f"{output}: the name must end with .html, {', '.join(SUFFIXES)}")


def attention_page(attention: Attention, view: View) -> str:
    """Return a self-contained HTML page of the attention weights, which shows `view` first."""
    count = sum(maps.weights.size for maps in attention.maps.values())
    if count > _MAX_WEIGHTS:
        longest = max(len(maps.queries) for maps in attention.maps.values())
        raise UserError(
            f"a page of {count:,} weights is too large (at most {_MAX_WEIGHTS:,}): the longer side has {longest} "
            "tokens. Use a shorter sentence or --target"
        )
    first = vars(view) | {"layer": view.layer_in(attention)}
    kinds = {}
    for kind, maps in attention.maps.items():
        layers, heads = maps.weights.shape[:2]
        # Base64 of unsigned little-endian 16-bit numbers. 65535 stands for 1.
        weights = base64.b64encode(np.round(maps.weights * 65535).astype("<u2").tobytes()).decode("ascii")
        kinds[kind] = maps._asdict() | {"layers": layers, "heads": heads, "weights": weights}
    data = {
        "run": attention.run,
        "source": attention.source,
        "target": attention.target,
        "given": attention.is_given,
        "first": {name: str(value) for name, value in first.items()},
        "kinds": kinds,
    }
    template = resources.files(__package__).joinpath("attention.html").read_text(encoding="utf-8")
    # ASCII without "<" cannot end the script element that holds the data, whatever the sentence contains.
    return template.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"), 1)


def _write_figure(attention: Attention, output: Path, view: View) -> None:
    layer, maps = view.layer_in(attention), attention.maps[view.kind]
    named = heads_of(maps, layer, view.head)
    title = f"{_PLACES[view.kind][2]}, layer {layer} of {len(maps.weights)}"
    if len(named) == 1:
        title += f", {next(iter(named))}"
    queries, keys = len(maps.queries), len(maps.keys)
    if view.style == "lines":
        width = max(4.0, _CELL * max(queries, keys) + 0.6)
        with drawing(output, width, max(3.6, width / 4)) as figure:
            axes = figure.subplots()
            axes.set_title(title)
            draw_lines(axes, maps, named)
        return
    columns = math.ceil(math.sqrt(len(named)))
    rows = math.ceil(len(named) / columns)
    # The outer labels take about an inch for any number of cells.
    width, height = 1.2 + columns * max(1.2, _CELL * keys), 1.2 + rows * max(1.2, _CELL * queries)
    with drawing(output, width, height) as figure:
        figure.suptitle(title)
        largest = max(weights.max() for weights in named.values())
        for place, (name, weights) in enumerate(named.items()):
            axes = figure.add_subplot(rows, columns, place + 1)
            image = draw_map(axes, maps, weights, largest, has_keys=place < columns, has_queries=place % columns == 0)
            if len(named) > 1:
                axes.set_xlabel(name)
        figure.colorbar(image, ax=figure.axes, shrink=0.6)


def heads_of(maps: Maps, layer: int, head: int | str) -> dict[str, np.ndarray]:
    """Return {"head 1": weights [queries, keys], ...}: the heads of a layer, counted from 1, that `View.head` names."""
    heads = maps.weights[layer - 1]
    if head == "mean":
        return {f"mean of {len(heads)} heads": heads.mean(0)}
    chosen = range(len(heads)) if head == "all" else [int(head) - 1]
    return {f"head {number + 1}": heads[number] for number in chosen}


def draw_lines(axes: "Axes", maps: Maps, named: dict[str, np.ndarray]) -> None:
    """Draw lines from the tokens that attend, above, to the tokens attended to, below, in one color for each head."""
    above, below = _places(maps.queries), _places(maps.keys)
    largest = max(weights.max() for weights in named.values())
    colors = head_colors(maps.weights.shape[1])  # a single head keeps the color that it has among all heads
    for name, weights in named.items():
        number = int(name.removeprefix("head ")) - 1 if name.startswith("head ") else 0
        shares = weights / largest
        pairs = np.argwhere(shares >= _FAINTEST)
        # The lines of different heads are shifted, so that none hides another.
        shift = 0.5 * (number / len(named) - 0.5) if len(named) > 1 else 0.0
        segments = [[(above[query] + shift, 1.0), (below[key] + shift, 0.0)] for query, key in pairs]
        add_lines(axes, segments, colors[number], shares[tuple(pairs.T)])
        if len(named) > 1:
            axes.plot([], [], color=colors[number], label=name)
    if len(named) > 1:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=7)
    axes.set_xlim(-0.7, max(len(above), len(below)) - 0.3)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 1], ["to", "from"])
    axes.set_xticks(below, maps.keys, rotation=90)
    upper = axes.secondary_xaxis("top")
    upper.set_xticks(above, maps.queries, rotation=90)
    for ticks in (axes, upper):
        ticks.tick_params(length=0)
        ticks.spines[:].set_visible(False)


def draw_map(
    axes: "Axes", maps: Maps, weights: np.ndarray, largest: float, *, has_keys: bool, has_queries: bool
) -> "AxesImage":
    """Draw a heat map of weights [queries, keys], where `largest` is darkest, and return matplotlib's image."""
    places = _places(maps.keys)
    image = axes.imshow(weights[:, np.argsort(places)], cmap="Blues", vmin=0, vmax=largest)
    axes.set_xticks(places if has_keys else [], maps.keys if has_keys else [], rotation=90)
    axes.set_yticks(range(len(maps.queries)) if has_queries else [], maps.queries if has_queries else [])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    return image


def _places(tokens: Sequence[str]) -> range:
    """Return the columns of the tokens. In right-to-left scripts the first token is on the right."""
    return range(len(tokens))[:: -1 if is_right_to_left(tokens) else 1]


def is_right_to_left(tokens: Sequence[str]) -> bool:
    r"""Return whether most letters of the tokens belong to a right-to-left script.

    >>> is_right_to_left(["</s>", "\u05e9\u05dc\u05d5\u05dd\u05e2"]), is_right_to_left(["a", "1"])
    (True, False)
    """
    kinds = [unicodedata.bidirectional(letter) for token in tokens for letter in token]
    return sum(kind in ("R", "AL") for kind in kinds) > kinds.count("L")
