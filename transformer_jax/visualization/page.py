"""The attention page: one HTML file with everything in it, which asks no network and no server."""

import base64
import json
from importlib import resources

import numpy as np

from transformer_jax.types import UserError
from transformer_jax.visualization.attention import Attention, View

_MOST_WEIGHTS = 40_000_000  # two bytes each, four thirds of that in base64: what a browser still opens


def attention_page(attention: Attention, view: View) -> str:
    """The page that `attention.html` becomes with these weights, which are rounded to 1 / 65535.

    Raises:
        UserError: so many tokens that no browser would open the page.
    """
    count = sum(maps.weights.size for maps in attention.maps.values())
    if count > _MOST_WEIGHTS:
        longest = max(len(maps.queries) for maps in attention.maps.values())
        raise UserError(
            f"a page of {count:,} weights is too large (at most {_MOST_WEIGHTS:,}): the longer side has {longest} "
            "tokens; give a shorter sentence or --target"
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
    # In ASCII and without "<" nothing in it can end the script element that holds it, whatever the sentence says.
    return template.replace("{{data}}", json.dumps(data).replace("<", "\\u003c"), 1)


def _encode(weights: np.ndarray) -> str:
    """Base64 of unsigned 16-bit numbers, little-endian, 65535 for 1."""
    return base64.b64encode(np.round(weights * 65535).astype("<u2").tobytes()).decode("ascii")
