"""What a model attends to between the tokens of one sentence pair, as a page to explore or a picture for a paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer, attention_maps
from transformer_jax.types import UserError
from transformer_jax.visualization.canvas import SUFFIXES

Kind = Literal["encoder", "decoder", "cross"]
Style = Literal["lines", "map"]

_maps = jax.jit(attention_maps, static_argnums=0)

_MODULES: dict[Kind, tuple[str, str]] = {
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross": ("decoder", "cross_attention"),
}


class Maps(NamedTuple):
    """The attention of one kind, in all its layers and heads."""

    queries: tuple[str, ...]
    """The tokens that attend. In cross-attention each is the token that is being written."""
    keys: tuple[str, ...]
    """The tokens that are attended to."""
    weights: np.ndarray
    """float32 [layers, heads, queries, keys]; each row sums to 1."""


@dataclass(frozen=True)
class Attention:
    """The attention weights of a model over a sentence and its translation."""

    run: str
    source: str
    target: str
    is_given: bool
    """Whether the target was given; else it is the run's own translation."""
    maps: dict[Kind, Maps]


@dataclass(frozen=True)
class View:
    """What is shown of it, first or only."""

    kind: Kind = "cross"
    layer: int | None = None
    """From 1 on, as the paper counts; None: the last."""
    head: int | Literal["all", "mean"] = "all"
    """From 1 on; all of them, or their mean."""
    style: Style = "lines"
    """Lines between tokens as in the paper's Figures 3 to 5, or a heat map."""

    def layer_in(self, attention: Attention) -> int:
        """The layer's number, from 1 on.

        Raises:
            UserError: the model has no such kind, layer or head.
        """
        if self.kind not in attention.maps or self.style not in get_args(Style):
            kinds, styles = ", ".join(attention.maps), ", ".join(get_args(Style))
            raise UserError(f"kind is {self.kind!r} and style {self.style!r}; legal: {kinds}; {styles}")
        layers, heads = attention.maps[self.kind].weights.shape[:2]
        if self.layer is not None and not 1 <= self.layer <= layers:
            raise UserError(f"layer is {self.layer}; {self.kind} attention has layers 1 to {layers}")
        if self.head not in ("all", "mean") and self.head not in range(1, heads + 1):
            raise UserError(f"head is {self.head!r}; {self.kind} attention has heads 1 to {heads}, or all, or mean")
        return self.layer or layers


def attention_of(translator: Translator, sentence: str, target: str | None = None, *, run: str = "") -> Attention:
    """The attention weights over a sentence and a translation of it.

    Args:
        translator: the model with its tokenizers.
        sentence: the source.
        target: the translation to look at; None: the run's own.
        run: its name, to be shown.

    Raises:
        UserError: the sentence is empty, or too long for the model's positions.
    """
    model = translator.config.model
    (src,) = translator.encode([sentence])
    if not src:
        raise UserError("the sentence is empty: attention is between tokens")
    if target is None:
        ((best,),) = translator.translate_n_best([sentence], 1)
        target_text, tgt_out = best.text, list(best.token_ids)
    else:
        target_text, tgt_out = target, [*translator.tokenizers.target.encode([target])[0], model.eos_id]
    tgt_out = tgt_out or [model.eos_id]
    tgt_in = [model.start_id, *tgt_out[:-1]]
    found = _maps(Transformer(model), translator.params, jnp.array([src], jnp.int32), jnp.array([tgt_in], jnp.int32))
    source_pieces = tuple(translator.tokenizers.source.pieces(src))
    read, written = (tuple(translator.tokenizers.target.pieces(ids)) for ids in (tgt_in, tgt_out))
    tokens = {"encoder": (source_pieces,) * 2, "decoder": (read, read), "cross": (written, source_pieces)}
    maps = {}
    for kind, (stack, module) in _MODULES.items():
        num_layers = getattr(model, stack).num_layers
        layers = [found[f"{stack}/layer_{layer}/{module}"][0] for layer in range(num_layers)]
        maps[kind] = Maps(*tokens[kind], np.stack([np.asarray(layer, np.float32) for layer in layers]))
    return Attention(run, sentence, target_text, target is not None, maps)


def draw_attention(attention: Attention, output: Path, view: View | None = None) -> None:
    """Writes a page to explore (.html), or a picture of the view alone (.png, .svg, .pdf).

    Raises:
        UserError: another suffix, a view that the model does not have, a sentence too long for a page, a file that
            cannot be written, or a picture without matplotlib.
    """
    view = view or View()
    view.layer_in(attention)
    if output.suffix in SUFFIXES:
        from transformer_jax.visualization.attention_figure import draw_figure

        draw_figure(attention, output, view)
        return
    if output.suffix not in (".html", ".htm"):
        raise UserError(f"{output}: the name ends with one of .html, {', '.join(SUFFIXES)}")
    from transformer_jax.visualization.page import attention_page

    page = attention_page(attention, view)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}") from error
