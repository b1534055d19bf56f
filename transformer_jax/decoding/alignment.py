"""Which word of the source each word of a translation comes from, as cross-attention has it."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from transformer_jax.decoding.translator import Hypothesis, Translator, pad, pair_batches
from transformer_jax.model.transformer import Transformer, attention_maps
from transformer_jax.types import Params, UserError

_MOST_WEIGHTS = 2**24  # of a batch, 64 MB in float32 for each layer


class Alignment(NamedTuple):
    """A translation's tokens and the source's; BOS and EOS are not part of it."""

    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]
    """(place of a source token, place of a target token), from 0: one for each target token."""


def align(
    translator: Translator,
    texts: Sequence[str],
    translations: Sequence[Sequence[Hypothesis]],
    layer: int | None = None,
) -> list[list[Alignment]]:
    """The source token that each target token attends to most, by the mean over the heads of one layer.

    The decoder reads the translations once more. What counts is the attention of the position that writes a token. Of
    an ensemble the mean over its members is taken.

    Args:
        translator: the model.
        texts: the sources.
        translations: those of each source, as `translate_n_best` gives them.
        layer: of the decoder, from 1; None: the last but one, whose attention is most like an alignment by hand (Garg
            et al. 2019), or the only one.

    Returns:
        As many for each text as it has translations.

    Raises:
        UserError: a model without such a layer.
    """
    depths = [member.config.decoder.num_layers for member in translator.members]
    if layer is not None and not 1 <= layer <= min(depths):
        raise UserError(f"layer is {layer}; the decoder has layers 1 to {min(depths)}")
    model = translator.config.model
    sources = translator.encode(texts, warn=False)  # it was said when they were translated
    places = [(text, rank) for text, found in enumerate(translations) for rank in range(len(found))]
    src = [sources[text] for text, _ in places]
    tgt = [list(translations[text][rank].token_ids) for text, rank in places]
    results: list[list[Alignment]] = [[] for _ in texts]
    weights: list[np.ndarray] = [np.zeros((0, 0))] * len(places)
    heads = max(member.config.decoder.num_heads for member in translator.members)
    lengths = [len(ids) for ids in src], [len(ids) for ids in tgt]
    for chosen, (size, source_length, target_length) in pair_batches(
        *lengths, translator.max_sequence_length, lambda source, target: _MOST_WEIGHTS // (heads * source * target)
    ):
        src_ids = pad([src[index] for index in chosen], (size, source_length), model.pad_id)
        tgt_in = pad([[model.start_id, *tgt[index][:-1]] for index in chosen], (size, target_length), model.pad_id)
        found = []
        for member, depth in zip(translator.members, depths, strict=True):
            place = (layer or max(depth - 1, 1)) - 1
            found.append(_cross_attention(Transformer(member.config), member.params, src_ids, tgt_in, place))
        mean = np.mean(jax.device_get(found), axis=0)
        for row, index in enumerate(chosen):
            weights[index] = mean[row]
    for (text, _), source_ids, target_ids, one in zip(places, src, tgt, weights, strict=True):
        words = slice(int(model.source_bos), len(source_ids) - model.source_eos)
        source = source_ids[words]
        target = target_ids[: len(target_ids) - (target_ids[-1:] == [model.eos_id])]
        best = one[: len(target), words].argmax(axis=1) if source and target else []
        results[text].append(
            Alignment(
                tuple(translator.tokenizers.source.pieces(source)),
                tuple(translator.tokenizers.target.pieces(target)),
                tuple((int(place), number) for number, place in enumerate(best)),
            )
        )
    return results


@partial(jax.jit, static_argnums=(0, 4))
def _cross_attention(
    model: Transformer, params: Params, src: Int[Array, "b s"], tgt_in: Int[Array, "b t"], layer: int
) -> Float[Array, "b t s"]:
    """The mean over the heads of a decoder layer."""
    return attention_maps(model, params, src, tgt_in)[f"decoder/layer_{layer}/cross_attention"].mean(axis=1)
