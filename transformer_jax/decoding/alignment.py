"""Alignment of target tokens with source tokens by cross-attention."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.decoding.translator import Hypothesis, Translator, pad, pair_batches
from transformer_jax.model.transformer import Transformer, attention_maps
from transformer_jax.types import Params, UserError

_MAX_WEIGHTS = 2**24  # attention weights of a batch, 64 MB in float32 for each layer


class Alignment(NamedTuple):
    """A translation's tokens and the source's; BOS and EOS are not part of it."""

    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    """(source index, target index) for each target token."""


def align(
    translator: Translator,
    texts: Sequence[str],
    translations: Sequence[Sequence[Hypothesis]],
    layer: int | None = None,
) -> list[list[Alignment]]:
    """Align each target token with the source token that it attends to most, by one layer's mean over its heads.

    The attention of a target token is that of the position that generates it. An ensemble takes its members' mean.

    Args:
        translator: The model.
        texts: The sources.
        translations: Translations of each source, as `translate_n_best` returns them.
        layer: Layer of the decoder, from 1. None: the second to last layer, whose attention agrees best with alignments
            by hand (Garg et al. 2019), or the only layer.

    Returns:
        One alignment per translation of each text.

    Raises:
        UserError: The model has no such layer.
    """
    depths = [member.config.decoder.num_layers for member in translator.members]
    if layer is not None and not 1 <= layer <= min(depths):
        raise UserError(f"layer is {layer}; the decoder has layers 1 to {min(depths)}")
    model = translator.config.model
    sources = translator.encode(texts, warn=False)  # `translate_n_best` has warned of truncated lines
    texts_of = [text for text, hypotheses in enumerate(translations) for _ in hypotheses]
    src = [sources[text] for text in texts_of]
    tgt = [list(hypothesis.token_ids) for hypotheses in translations for hypothesis in hypotheses]
    weights: list[np.ndarray] = [np.zeros((0, 0))] * len(tgt)
    heads = max(member.config.decoder.num_heads for member in translator.members)
    lengths = [len(ids) for ids in src], [len(ids) for ids in tgt]
    for chosen, (size, source_length, target_length) in pair_batches(
        *lengths, translator.max_sequence_length, lambda source, target: _MAX_WEIGHTS // (heads * source * target)
    ):
        src_ids = pad([src[index] for index in chosen], (size, source_length), model.pad_id)
        tgt_in = pad([[model.start_id, *tgt[index][:-1]] for index in chosen], (size, target_length), model.pad_id)
        attention = [
            _cross_attention(Transformer(one.config), one.params, src_ids, tgt_in, (layer or max(depth - 1, 1)) - 1)
            for one, depth in zip(translator.members, depths, strict=True)
        ]
        for index, mean in zip(chosen, np.mean(jax.device_get(attention), axis=0), strict=False):
            weights[index] = mean
    results: list[list[Alignment]] = [[] for _ in texts]
    for text, source_ids, target_ids, attended in zip(texts_of, src, tgt, weights, strict=True):
        words = slice(int(model.source_bos), len(source_ids) - model.source_eos)
        source = source_ids[words]
        target = target_ids[: len(target_ids) - (target_ids[-1:] == [model.eos_id])]
        best = attended[: len(target), words].argmax(axis=1).tolist() if source and target else []
        tokens = translator.tokenizers.source.pieces(source), translator.tokenizers.target.pieces(target)
        pairs = tuple((source_index, target_index) for target_index, source_index in enumerate(best))
        results[text].append(Alignment(tuple(tokens[0]), tuple(tokens[1]), pairs))
    return results


@partial(jax.jit, static_argnums=(0, 4))
def _cross_attention(
    model: Transformer, params: Params, src: Int[Array, "b s"], tgt_in: Int[Array, "b t"], layer: int
) -> Float[Array, "b t s"]:
    """Return the cross-attention of a decoder layer, the mean over its heads."""
    return attention_maps(model, params, src, tgt_in)[f"decoder/layer_{layer}/cross_attention"].mean(axis=1)
