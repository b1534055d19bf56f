"""Draw attention weights: a page to explore, or a figure for a paper with lines between tokens or heat maps."""

import base64
import json
import math
import unicodedata
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.types import UserError
from transformer_jax.visualization.attention import Attention, Maps, View
from transformer_jax.visualization.canvas import SUFFIXES, add_lines, drawing, head_colors

_CELL = 0.19
"""Inches for a token in a figure."""
_NAMES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
_FAINTEST = 0.01
"""Share of the largest weight below which a line is too faint to be seen."""
_MAX_WEIGHTS = 40_000_000
"""Weights in a page that a browser can still open; each takes 2 bytes, which base64 makes 8/3."""


def draw_attention(attention: Attention, output: Path, view: View | None = None) -> None:
    """Write a page to explore (.html), or a picture of one view (.png, .svg, .pdf).

    Args:
        attention: what `attention_of` returned.
        output: the file; its suffix decides the format.
        view: what a picture shows, or a page shows first. None: cross-attention of the last layer, all heads.

    Raises:
        UserError: the suffix is unknown, the model has no such view, the sentence is too long for a page, the file
            cannot be written, or a picture is wanted and matplotlib is not installed.
    """
    view = view or View()
    view.layer_in(attention)
    if output.suffix in SUFFIXES:
        _write_figure(attention, output, view)
        return
    if output.suffix not in (".html", ".htm"):
        raise UserError(f"{output}: the name must end with .html, {', '.join(SUFFIXES)}")
    page = attention_page(attention, view)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from error


def attention_page(attention: Attention, view: View) -> str:
    """Return an HTML page that shows the attention weights, rounded to multiples of 1/65535.

    The page contains everything it shows, and needs neither a network nor a server.

    Args:
        attention: the weights.
        view: what the page shows first.

    Raises:
        UserError: there are more weights than a browser can open.
    """
    count = sum(maps.weights.size for maps in attention.maps.values())
    if count > _MAX_WEIGHTS:
        longest = max(len(maps.queries) for maps in attention.maps.values())
        raise UserError(
            f"a page of {count:,} weights is too large (at most {_MAX_WEIGHTS:,}): the longer side has {longest} "
            "tokens. Use a shorter sentence or --target"
        )
    data = {
        "run": attention.run,
        "source": attention.source,
        "target": attention.target,
        "given": attention.is_given,
        "first": {
            "kind": view.kind,
            "layer": str(view.layer_in(attention)),
            "head": str(view.head),
            "style": view.style,
        },
        "kinds": {
            kind: {
                "queries": maps.queries,
                "keys": maps.keys,
                "layers": maps.weights.shape[0],
                "heads": maps.weights.shape[1],
                "weights": _encode(maps.weights),
            }
            for kind, maps in attention.maps.items()
        },
    }
    template = resources.files(__package__).joinpath("attention.html").read_text(encoding="utf-8")
    # ASCII without "<" cannot end the script element that holds the data, whatever the sentence contains.
    return template.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"), 1)


def _encode(weights: np.ndarray) -> str:
    """Return base64 of unsigned little-endian 16-bit numbers. 65535 stands for 1."""
    return base64.b64encode(np.round(weights * 65535).astype("<u2").tobytes()).decode("ascii")


def _write_figure(attention: Attention, output: Path, view: View) -> None:
    layer, maps = view.layer_in(attention), attention.maps[view.kind]
    named = heads_of(maps, layer, view.head)
    title = f"{_NAMES[view.kind]}, layer {layer} of {len(maps.weights)}"
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
        grid = figure.subplots(rows, columns, squeeze=False)
        largest = max(weights.max() for weights in named.values())
        for place, axes in enumerate(grid.flat):
            if place >= len(named):
                axes.set_axis_off()
                continue
            name, weights = list(named.items())[place]
            image = draw_map(axes, maps, weights, largest, has_keys=place < columns, has_queries=place % columns == 0)
            if len(named) > 1:
                axes.set_xlabel(name)
        figure.colorbar(image, ax=grid, shrink=0.6)


def heads_of(maps: Maps, layer: int, head: int | str) -> dict[str, np.ndarray]:
    """Return {"head 1": weights [queries, keys], ...}: the heads of a layer, counted from 1, that `View.head` names."""
    heads = maps.weights[layer - 1]
    if head == "mean":
        return {f"mean of {len(heads)} heads": heads.mean(0)}
    chosen = range(len(heads)) if head == "all" else [int(head) - 1]
    return {f"head {number + 1}": heads[number] for number in chosen}


def draw_lines(axes: Any, maps: Maps, named: dict[str, np.ndarray]) -> None:
    """Draw lines from the tokens that attend, above, to the tokens attended to, below, in one color for each head.

    Args:
        axes: matplotlib's axes.
        maps: the tokens, and all heads, which decide the colors.
        named: weights [queries, keys] by name, as `heads_of` returns them.
    """
    above, below = _places(maps.queries), _places(maps.keys)
    largest = max(weights.max() for weights in named.values())
    numbers = [int(name.removeprefix("head ")) - 1 if name.startswith("head ") else 0 for name in named]
    colors = head_colors(maps.weights.shape[1])  # a single head keeps the color that it has among all heads
    for (name, weights), number in zip(named.items(), numbers, strict=True):
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


def draw_map(axes: Any, maps: Maps, weights: np.ndarray, largest: float, *, has_keys: bool, has_queries: bool) -> Any:
    """Draw a heat map with one row for each token that attends.

    Args:
        axes: matplotlib's axes.
        maps: the tokens.
        weights: [queries, keys].
        largest: the weight that is darkest.
        has_keys: whether to label the columns.
        has_queries: whether to label the rows.

    Returns:
        matplotlib's image.
    """
    places = _places(maps.keys)
    image = axes.imshow(weights[:, np.argsort(places)], cmap="Blues", vmin=0, vmax=largest)
    axes.set_xticks(places if has_keys else [], maps.keys if has_keys else [], rotation=90)
    axes.set_yticks(range(len(maps.queries)) if has_queries else [], maps.queries if has_queries else [])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    return image


def _places(tokens: Sequence[str]) -> list[int]:
    """Return the columns of the tokens. In right-to-left scripts the first token is on the right."""
    count = len(tokens)
    return list(range(count))[::-1] if is_right_to_left(tokens) else list(range(count))


def is_right_to_left(tokens: Sequence[str]) -> bool:
    r"""Return whether most letters of the tokens belong to a right-to-left script.

    >>> is_right_to_left(["</s>", "\u05e9\u05dc\u05d5\u05dd\u05e2"]), is_right_to_left(["a", "1"])
    (True, False)
    """
    kinds = [unicodedata.bidirectional(letter) for token in tokens for letter in token]
    return sum(kind in ("R", "AL") for kind in kinds) > kinds.count("L")
