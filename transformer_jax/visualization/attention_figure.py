"""Attention as a figure for a paper: lines between two rows of tokens, or heat maps."""

import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.visualization.attention import Attention, Maps, View
from transformer_jax.visualization.canvas import add_lines, drawing, head_colors

_CELL = 0.19  # inches for a token
_NAMES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}
_FAINTEST = 0.01  # of the largest weight: fainter lines cannot be seen


def draw_figure(attention: Attention, output: Path, view: View) -> None:
    """Writes the view as a picture.

    Raises:
        UserError: as `canvas.drawing`, or a view that the model does not have.
    """
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
    # The outer labels take about an inch, whatever the number of cells.
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
    """{"head 1": [queries, keys], ...}: what `View.head` chooses of a layer (from 1 on)."""
    heads = maps.weights[layer - 1]
    if head == "mean":
        return {f"mean of {len(heads)} heads": heads.mean(0)}
    chosen = range(len(heads)) if head == "all" else [int(head) - 1]
    return {f"head {number + 1}": heads[number] for number in chosen}


def draw_lines(axes: Any, maps: Maps, named: dict[str, np.ndarray]) -> None:
    """The tokens that attend above, those attended to below, a color for each head."""
    above, below = _places(maps.queries), _places(maps.keys)
    largest = max(weights.max() for weights in named.values())
    numbers = [int(name.removeprefix("head ")) - 1 if name.startswith("head ") else 0 for name in named]
    colors = head_colors(maps.weights.shape[1])  # a head alone has the color that it has among all
    for (name, weights), number in zip(named.items(), numbers, strict=True):
        shares = weights / largest
        pairs = np.argwhere(shares >= _FAINTEST)
        # Heads stand beside each other, so that one does not hide another.
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
    """A heat map, `largest` darkest: a row for each token that attends. Returns matplotlib's image."""
    places = _places(maps.keys)
    image = axes.imshow(weights[:, np.argsort(places)], cmap="Blues", vmin=0, vmax=largest)
    axes.set_xticks(places if has_keys else [], maps.keys if has_keys else [], rotation=90)
    axes.set_yticks(range(len(maps.queries)) if has_queries else [], maps.queries if has_queries else [])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    return image


def _places(tokens: Sequence[str]) -> list[int]:
    """Columns of the tokens, the first on the right in scripts that are written so."""
    count = len(tokens)
    return list(range(count))[::-1] if is_right_to_left(tokens) else list(range(count))


def is_right_to_left(tokens: Sequence[str]) -> bool:
    """Whether most letters are of such a script.

    >>> is_right_to_left(["</s>", "\\u05e9\\u05dc\\u05d5\\u05dd\\u05e2"]), is_right_to_left(["a", "1"])
    (True, False)
    """
    kinds = [unicodedata.bidirectional(letter) for token in tokens for letter in token]
    return sum(kind in ("R", "AL") for kind in kinds) > kinds.count("L")
