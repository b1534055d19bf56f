"""Rows of Table 3 as points, the paper's beside ours: whether they come in the same order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.pictures.canvas import COLOURS, drawing
from transformer_jax.table3 import PAPER, ROWS, perplexity_of


def plot_table3(results: Sequence[dict[str, Any]], output: Path) -> None:
    """Draws the perplexity of each row, the best of the paper's at the top; ours beside it, on an axis of its own.

    Args:
        results: of `ablation.run_table3`.
        output: a .png, .svg or .pdf file.

    Raises:
        UserError: as `canvas.drawing`.
    """
    results = sorted(results, key=lambda one: PAPER[one["row"]].perplexity)
    places, groups = np.arange(len(results)), list(dict.fromkeys(row[0] for row in ROWS))
    colours = [COLOURS[groups.index(one["row"][0])] for one in results]
    sides = [PAPER[one["row"]].perplexity for one in results], [perplexity_of(one) for one in results]
    with drawing(output, 7.2, 1.1 + 0.24 * len(results)) as figure:
        names = "the paper: newstest2013", "here: validation"
        for axes, values, name in zip(figure.subplots(1, 2, sharey=True), sides, names, strict=True):
            axes.scatter(values, places, c=colours, s=22)
            for one, value in zip(results, values, strict=True):
                if one["row"] == "base":
                    axes.axvline(value, color="#999999", linewidth=0.8, zorder=0)
            axes.set_title(name, fontsize=9)
            axes.set_xlabel("perplexity")
            axes.set_yticks(places, [f"{one['row']}  {one['change']}".strip() for one in results], fontsize=7)
            axes.grid(axis="y", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
