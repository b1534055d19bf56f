"""Set up matplotlib: files, fonts and colors. No other file imports it."""

import colorsys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from transformer_jax.types import UserError

if TYPE_CHECKING:  # an optional package
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.image import AxesImage as AxesImage

SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colors, which people with any kind of color vision can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")

# Characters that the first font lacks are taken from the next installed font that has them.
_FONTS = ("DejaVu Sans", "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans", "Noto Sans Devanagari", "Noto Sans Thai")


@contextmanager
def drawing(output: Path, width: float, height: float) -> Iterator["Figure"]:
    """Yield a figure of a size in inches, and write it when the block ends; equal drawings give equal bytes."""
    if output.suffix not in SUFFIXES:
        raise UserError(f"{output}: the name of a picture must end with one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.font_manager import fontManager
    except ImportError as error:
        raise UserError(
            f"{output.name} needs the package matplotlib: python -m pip install 'transformer-jax[plot]'"
        ) from error
    installed = set(fontManager.get_font_names())
    fonts = [*(font for font in _FONTS if font in installed), "sans-serif"]
    # Text stays text in SVG files: it can be searched and edited, and a viewer may have fonts for more characters.
    style = {"font.family": fonts, "svg.fonttype": "none", "svg.hashsalt": "transformer_jax", "font.size": 9}
    style["text.parse_math"] = False  # a dollar sign in a token is text
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
            f"{output}: {missing} characters are missing from the fonts {', '.join(fonts)} and are drawn as boxes. "
            "Install a Noto font, or write an .svg or .html file",
            stacklevel=3,
        )


def head_colors(count: int) -> list[tuple[float, float, float]]:
    """Return the colors of attention heads, as in the page: evenly spaced hues."""
    return [colorsys.hls_to_rgb(head / count, 0.42, 0.75) for head in range(count)]


def add_lines(
    axes: "Axes", segments: Sequence[Sequence[tuple[float, float]]], color: tuple[float, ...], weights: Sequence[float]
) -> None:
    """Draw straight lines whose opacity and width grow with their weights, which are 0 to 1."""
    from matplotlib.collections import LineCollection

    colors = [(*color, weight) for weight in weights]
    axes.add_collection(LineCollection(list(segments), colors=colors, linewidths=0.6 + 1.8 * np.asarray(weights)))
