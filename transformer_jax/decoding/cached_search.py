"""The search over the model: encode once, then one position after the other with a cache (paper section 6.1)."""

import dataclasses
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from transformer_jax.config import DecodingConfig, ModelConfig
from transformer_jax.decoding.hypotheses import SearchResult
from transformer_jax.decoding.search import Watch, beam_search, greedy_search
from transformer_jax.model.decoding_step import (
    Cache,
    DecoderWeights,
    decode_step,
    decoder_weights,
    grow,
    init_cache,
    reorder,
)
from transformer_jax.model.masks import padding_mask
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import Params

Weights = Literal["model", "bfloat16", "int8"]

SPANS = (32, 128, 512)
"""Lengths at which the cache of keys and values grows; each has a loop of its own, and is compiled for itself."""


def _computing(config: ModelConfig, weights: Weights) -> ModelConfig:
    """The model with the dtype that it computes with."""
    return dataclasses.replace(config, dtype="bfloat16") if weights == "bfloat16" else config


class Prepared(NamedTuple):
    """The parameters as a search computes with them."""

    params: Params
    """For the encoder."""
    decoder: DecoderWeights


@partial(jax.jit, static_argnames=("config", "weights"))
def prepare(params: Params, config: ModelConfig, weights: Weights = "model") -> Prepared:
    """Lays the parameters out for `search`, once for all calls.

    Args:
        params: the model's parameters.
        config: of the model.
        weights: how the decoder's matrices are kept: `DecodingConfig.weights`.
    """
    config = _computing(config, weights)
    if weights == "bfloat16":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    encoder = {name: leaf for name, leaf in params.items() if name != "decoder"}
    return Prepared(encoder, decoder_weights(params, config, int8=weights == "int8"))


@partial(jax.jit, static_argnames=("model", "decoding", "max_length", "n_best", "forbidden_ids", "watch"))
def search(
    params: Params | Prepared,
    src: Int[Array, "b s"],
    limits: Int[Array, "b"],
    *,
    model: Transformer,
    decoding: DecodingConfig,
    max_length: int,
    n_best: int = 1,
    forbidden_ids: tuple[int, ...] = (),
    watch: Watch | None = None,
) -> SearchResult:
    """Encodes once, then greedy search (beam_size 1) or beam search with a key-value cache.

    Args:
        params: the model's parameters, or what `prepare` made of them: then this is not done again in each call.
        src: source token ids.
        limits: most tokens of each output, EOS counted; 0 for a row that is only padding.
        model: the model.
        decoding: beam, penalty and stopping rule.
        max_length: the largest limit possible: the width of the result.
        n_best: hypotheses wanted for each row.
        forbidden_ids: ids that are never generated, besides padding.
        watch: is told what each step did; each function is compiled for itself.

    Raises:
        UserError: `max_length` is more than the learned position table has.
    """
    prepared = params if isinstance(params, Prepared) else prepare(params, model.config, decoding.weights)
    config, beam_size = _computing(model.config, decoding.weights), decoding.beam_size
    src_mask = padding_mask(src, config.pad_id)
    memory = Transformer(config).apply({"params": prepared.params}, src, src_mask=src_mask, method="encode")
    spans = tuple(span for span in SPANS if span < max_length)
    cache = init_cache(
        prepared.decoder,
        memory,
        src_mask,
        config=config,
        max_length=max_length,
        beam_size=beam_size,
        room=min((*spans, max_length)),
    )

    def step_fn(tokens: Int[Array, "rows"], cache: Cache) -> tuple[Float[Array, "rows v"], Cache]:
        return decode_step(prepared.decoder, tokens, cache, config=config)

    if decoding.renormalise:
        forbidden_ids = (config.pad_id, *forbidden_ids)
    options: dict[str, Any] = {
        "max_lengths": limits,
        "max_length": max_length,
        "start_id": config.start_id,
        "eos_id": config.eos_id,
        "pad_id": config.pad_id,
        "forbidden_ids": forbidden_ids,
        "renormalise": decoding.renormalise,
        "spans": spans,
        "grow_fn": grow,
        "watch": watch,
    }
    if beam_size == 1:
        return greedy_search(step_fn, cache, **options)
    return beam_search(
        step_fn,
        cache,
        reorder,
        beam_size=beam_size,
        alpha=decoding.alpha,
        length_penalty=decoding.length_penalty,
        stopping=decoding.stopping,
        n_best=n_best,
        **options,
    )
