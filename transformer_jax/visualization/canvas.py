"""matplotlib behind the pictures: the only file that imports it."""

import colorsys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.types import UserError

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colors, which people with any kind of color vision tell apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")

# Letters that the first one lacks are looked for in those of the others that are installed.
_FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans", "Noto Sans Devanagari", "Noto Sans Thai")


@contextmanager
def drawing(output: Path, width: float, height: float) -> Iterator[Any]:
    """A `matplotlib.figure.Figure` to draw on, which is then written; the same drawing gives the same file.

    Args:
        output: the file; its suffix says which of `SUFFIXES` it is.
        width, height: in inches.

    Raises:
        UserError: matplotlib is not installed, another suffix, or the file cannot be written.
    """
    if output.suffix not in SUFFIXES:
        raise UserError(f"{output}: a picture's name ends with one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise UserError(
            f"{output.name} needs the package matplotlib: python -m pip install 'transformer-jax[plot]'"
        ) from error
    there = set(fontManager.get_font_names())
    fonts = [*(font for font in _FONTS if font in there), "sans-serif"]
    # Text stays text in SVG files: it can be searched and edited, and the reader's program has more letters.
    style = {"font.family": fonts, "svg.fonttype": "none", "svg.hashsalt": "transformer_jax", "font.size": 9}
    style["text.parse_math"] = False  # a dollar sign is one
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        date = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[output.suffix]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                figure.savefig(output, dpi=200, metadata=date)
            except OSError as error:
                raise UserError(f"{output} cannot be written: {error.strerror}") from error
    missing = sum("missing from font" in str(warning.message) for warning in caught)
    if missing and output.suffix != ".svg":
        warnings.warn(
            f"{output}: {missing} letters are in none of the fonts {', '.join(fonts)} and are drawn as boxes: install "
            "a font of the family Noto, or write an .svg file or a page",
            stacklevel=3,
        )


def head_colors(count: int) -> list[tuple[float, float, float]]:
    """Colors of attention heads, as the page has them: hues around the circle."""
    return [colorsys.hls_to_rgb(head / count, 0.42, 0.75) for head in range(count)]


def add_lines(
    axes: Any, segments: Sequence[Sequence[tuple[float, float]]], color: tuple[float, ...], weights: Sequence[float]
) -> None:
    """Straight lines, as opaque and wide as their weights from 0 to 1 say."""
    from matplotlib.collections import LineCollection

    colors = [(*color, weight) for weight in weights]
    axes.add_collection(LineCollection(list(segments), colors=colors, linewidths=0.6 + 1.8 * np.asarray(weights)))
