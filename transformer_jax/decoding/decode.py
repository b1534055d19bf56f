"""Search over one model or an ensemble, with compiled encoder and decoder steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, DecodingConfig, ModelConfig, Sampling
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.beam_search import beam_search
from transformer_jax.decoding.search import SearchResult, StepFn, Watch, greedy_search, sample
from transformer_jax.model.incremental import (
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
from transformer_jax.types import Params, UserError

Quantization = Literal["none", "bfloat16", "int8"]

SPANS = (32, 128, 512)
"""Lengths at which the cache of keys and values grows; each has a loop of its own, and is compiled for itself."""


def _computing(config: ModelConfig, quantization: Quantization) -> ModelConfig:
    """The model with the dtype that it computes with."""
    return dataclasses.replace(config, dtype="bfloat16") if quantization == "bfloat16" else config


class Prepared(NamedTuple):
    """The parameters as a search computes with them."""

    params: Params
    """For the encoder."""
    decoder: DecoderWeights


@partial(jax.jit, static_argnames=("config", "quantization"))
def prepare(params: Params, config: ModelConfig, quantization: Quantization = "none") -> Prepared:
    """Lays the parameters out for `search`, once for all calls.

    Args:
        params: the model's parameters.
        config: of the model.
        weights: how the decoder's matrices are kept: `DecodingConfig.weights`.
    """
    config = _computing(config, quantization)
    if quantization == "bfloat16":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    encoder = {name: leaf for name, leaf in params.items() if name != "decoder"}
    return Prepared(encoder, decoder_weights(params, config, int8=quantization == "int8"))


@partial(jax.jit, static_argnames=("model", "decoding", "max_length", "n_best", "forbidden_ids", "sampling", "watch"))
def search(
    params: Params | Prepared | tuple[Prepared, ...],
    src: Int[Array, "b s"],
    limits: Int[Array, " b"],
    *,
    model: Transformer | tuple[Transformer, ...],
    decoding: DecodingConfig,
    max_length: int,
    n_best: int = 1,
    forbidden_ids: tuple[int, ...] = (),
    prefix: Int[Array, "b p"] | None = None,
    sampling: Sampling | None = None,
    keys: Key[Array, "b n"] | None = None,
    watch: Watch | None = None,
) -> SearchResult:
    """Encodes once, then greedy search (beam_size 1), beam search or sampling with a key-value cache.

    Args:
        params: the model's parameters, or what `prepare` made of them: then this is not done again in each call.
            Several, each prepared: an ensemble, whose probability of a token is the mean of its members'.
        src: source token ids.
        limits: most tokens of each output, EOS counted; 0 for a row that is only padding.
        model: the model, or those of the ensemble, with the same special ids and as many logits.
        decoding: beam, penalty and stopping rule.
        max_length: the largest limit possible: the width of the result.
        n_best: hypotheses wanted for each row; where they are drawn, `keys` says how many.
        forbidden_ids: ids that are never generated, besides padding.
        prefix: the tokens that each output begins with; below 0 after the last of them.
        sampling: draw tokens from this, rather than search for the most probable.
        keys: a random key for each draw.
        watch: is told what each step of a search did, not of draws; each function is compiled for itself.

    Raises:
        UserError: `max_length` is more than the learned position table has.
    """
    if isinstance(model, Transformer):
        model = (model,)
        params = (params if isinstance(params, Prepared) else prepare(params, model[0].config, decoding.quantization),)
    config, spans = model[0].config, tuple(span for span in SPANS if span < max_length)
    # Draws of a sentence share what the encoder says, and nothing else: they are no beam.
    beam_size, times = (decoding.beam_size, 1) if keys is None else (1, keys.shape[1])
    cache_options = {"max_length": max_length, "room": min((*spans, max_length)), "beam_size": beam_size}
    members = [
        _start(prepared, src, _computing(one.config, decoding.quantization), times, cache_options)
        for prepared, one in zip(params, model, strict=True)
    ]

    def step_fn(tokens: Int[Array, " rows"], caches: tuple[Cache, ...]) -> tuple[Float[Array, "rows v"], Any]:
        steps = [step(tokens, cache) for (step, _), cache in zip(members, caches, strict=True)]
        return mean_of_probabilities([logits for logits, _ in steps]), tuple(cache for _, cache in steps)

    caches = tuple(cache for _, cache in members)
    if decoding.renormalize_logits:
        forbidden_ids = (config.pad_id, *forbidden_ids)
    options: dict[str, Any] = {
        "max_lengths": limits,
        "max_length": max_length,
        "start_id": config.start_id,
        "eos_id": config.eos_id,
        "pad_id": config.pad_id,
        "forbidden_ids": forbidden_ids,
        "renormalize_logits": decoding.renormalize_logits,
        "prefix": prefix,
        "spans": spans,
        "grow_fn": _of_each(grow),
    }
    if sampling is not None:
        assert keys is not None  # they go together
        return sample(step_fn, caches, keys, sampling, **options)
    if decoding.beam_size == 1:
        return greedy_search(step_fn, caches, watch=watch, **options)
    return beam_search(
        step_fn,
        caches,
        _of_each(reorder),
        beam_size=decoding.beam_size,
        alpha=decoding.alpha,
        length_penalty=decoding.length_penalty,
        stopping=decoding.stopping,
        n_best=n_best,
        watch=watch,
        **options,
    )


def mean_of_probabilities(logits: Sequence[Float[Array, "rows v"]]) -> Float[Array, "rows v"]:
    """Logits of an ensemble: of one member its own, of several the logarithm of their mean probabilities."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(one) for one in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - math.log(len(logits))


def _start(
    prepared: Prepared, src: Int[Array, "b s"], config: ModelConfig, times: int, cache_options: dict[str, int]
) -> tuple[StepFn, Cache]:
    """One model's callback and its cache, after the source was encoded; each sentence so many times."""
    src_mask = padding_mask(src, config.pad_id)
    memory = Transformer(config).apply({"params": prepared.params}, src, src_mask=src_mask, method="encode")
    memory, src_mask = (jnp.repeat(leaf, times, axis=0) if times > 1 else leaf for leaf in (memory, src_mask))
    cache = init_cache(prepared.decoder, memory, src_mask, config=config, **cache_options)
    return partial(decode_step, prepared.decoder, config=config), cache


def _of_each(change: Callable[[Cache, Any], Cache]) -> Callable[[tuple[Cache, ...], Any], tuple[Cache, ...]]:
    """The same change to the caches of all members."""
    return lambda caches, how: tuple(change(cache, how) for cache in caches)


_SAME = ("vocab_size", "source_rows", "pad_id", "bos_id", "eos_id", "unk_id", "start_id", "source_bos", "source_eos")


class Member(NamedTuple):
    """A model of an ensemble."""

    config: ModelConfig
    params: Params
    checkpoint: str = ""
    """Which parameters of its run these are: last, best, average or a step."""


def run_params(folder: RunDir, config: Config) -> Params:
    """The parameters of a run's checkpoint, as `decoding.checkpoint` says.

    Raises:
        UserError: there is no such checkpoint.
    """
    checkpoint = resolve_checkpoint(folder, config.decoding.checkpoint, config.training.best_by)
    return load_params(checkpoint, config.model)


def load_member(
    run: str | Path, first: Path, config: Config, tokenizers: TokenizerPair, checkpoint: str | None
) -> Member:
    """Another run, for an ensemble with the first.

    Args:
        run: its folder.
        first: the first run's.
        config, tokenizers: of that.
        checkpoint: which parameters; None: as the other run says.

    Raises:
        UserError: no such run or checkpoint, or its tokens are others.
    """
    folder, refusal = RunDir(Path(run)), f"{run} cannot be in an ensemble with {first}: "
    own = folder.load_config()
    for name in _SAME:
        if getattr(own.model, name) != getattr(config.model, name):
            there, here = getattr(own.model, name), getattr(config.model, name)
            raise UserError(f"{refusal}model.{name} is {there} there and {here} here")
    if not TokenizerPair.load(folder.tokenizer).is_like(tokenizers):
        raise UserError(f"{refusal}their tokenizers are not the same")
    if checkpoint is not None:
        own = dataclasses.replace(own, decoding=dataclasses.replace(own.decoding, checkpoint=checkpoint))
    return Member(own.model, run_params(folder, own), own.decoding.checkpoint)
