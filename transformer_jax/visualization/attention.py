"""Compute what a model attends to between the tokens of one sentence pair."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer, attention_maps
from transformer_jax.types import UserError

Kind = Literal["encoder", "decoder", "cross"]
Style = Literal["lines", "map"]

_maps = jax.jit(attention_maps, static_argnums=0)

_MODULES: dict[Kind, tuple[str, str]] = {
    "encoder": ("encoder", "self_attention"),
    "decoder": ("decoder", "self_attention"),
    "cross": ("decoder", "cross_attention"),
}


class Maps(NamedTuple):
    """The attention weights of one kind, in all layers and heads."""

    queries: tuple[str, ...]
    """The tokens that attend. In cross-attention, each is the token that the decoder predicts."""
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
        """Return the number of the layer, counted from 1.

        Raises:
            UserError: the model has no such kind, layer or head, or there is no such style.
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
    """Compute the attention weights over a sentence and a translation of it.

    Args:
        translator: the model with its tokenizers.
        sentence: the source sentence.
        target: the translation. None: the run's own translation.
        run: name of the run, for display.

    Returns:
        The weights of encoder, decoder and cross-attention. The source's tokens include the BOS and EOS that the model
        reads.

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
    weights = _maps(Transformer(model), translator.params, jnp.array([src], jnp.int32), jnp.array([tgt_in], jnp.int32))
    source_pieces = tuple(translator.tokenizers.source.pieces(src))
    read, written = (tuple(translator.tokenizers.target.pieces(ids)) for ids in (tgt_in, tgt_out))
    tokens = {"encoder": (source_pieces,) * 2, "decoder": (read, read), "cross": (written, source_pieces)}
    maps = {}
    for kind, (stack, module) in _MODULES.items():
        num_layers = getattr(model, stack).num_layers
        layers = [weights[f"{stack}/layer_{layer}/{module}"][0] for layer in range(num_layers)]
        maps[kind] = Maps(*tokens[kind], np.stack([np.asarray(layer, np.float32) for layer in layers]))
    return Attention(run, sentence, target_text, target is not None, maps)
