"""Search over one model or an ensemble, with a compiled encoder and compiled decoder steps."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, DecodingConfig, ModelConfig, Sampling
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.beam_search import beam_search
from transformer_jax.decoding.search import SearchResult, SearchSpec, StepFn, greedy_search, sample
from transformer_jax.model.cache import Cache, reorder_cache, resize_cache
from transformer_jax.model.masks import padding_mask
from transformer_jax.model.transformer import Transformer, abstract_params, prepare_for_decoding
from transformer_jax.types import Params, UserError

Quantization = Literal["none", "bfloat16", "int8"]

Caches = tuple[Cache, ...]

CACHE_SIZES = (32, 128, 512)
"""KV-cache capacities in positions. Decoding moves to the next one when full; each compiles its own loop."""


def search_spec(
    config: ModelConfig,
    decoding: DecodingConfig,
    *,
    max_lengths: Int[Array | np.ndarray, " b"],
    max_length: int,
    n_best: int = 1,
    forbidden_ids: Sequence[int] = (),
    prefix: Int[Array | np.ndarray, "b p"] | None = None,
) -> SearchSpec:
    """Return the search specification of a model and its decoding settings; see `SearchSpec` for the other fields."""
    return SearchSpec(
        max_lengths=max_lengths,
        max_length=max_length,
        start_id=config.start_id,
        eos_id=config.eos_id,
        pad_id=config.pad_id,
        beam_size=decoding.beam_size,
        n_best=n_best,
        alpha=decoding.alpha,
        length_penalty=decoding.length_penalty,
        stopping=decoding.stopping,
        min_length=decoding.min_length,
        forbidden_ids=((config.pad_id,) if decoding.renormalize_logits else ()) + tuple(forbidden_ids),
        renormalize_logits=decoding.renormalize_logits,
        prefix=prefix,
        cache_sizes=tuple(size for size in CACHE_SIZES if size < max_length),
    )


def _compute_config(config: ModelConfig, quantization: Quantization) -> ModelConfig:
    """Return the model's configuration with the dtype that decoding computes in."""
    return dataclasses.replace(config, dtype="bfloat16") if quantization == "bfloat16" else config


@partial(jax.jit, static_argnames=("config", "quantization"))
def prepare(params: Params, config: ModelConfig, quantization: Quantization = "none") -> Params:
    """Convert parameters to the layout that `search` uses. Convert once, then pass the result to every call."""
    config = _compute_config(config, quantization)
    if quantization == "bfloat16":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    return prepare_for_decoding(params, config, int8=quantization == "int8")


@partial(jax.jit, static_argnames=("models", "quantization", "sampling"))
def search(
    params: tuple[Params, ...],
    src: Int[Array, "b s"],
    spec: SearchSpec,
    *,
    models: tuple[Transformer, ...],
    quantization: Quantization = "none",
    sampling: Sampling | None = None,
    keys: Key[Array, "b n"] | None = None,
) -> SearchResult:
    """Encode the sources once, then run greedy search (beam size 1), beam search or sampling with a key-value cache.

    `params` are those of each model, converted by `prepare`. Several models are an ensemble: the probability of a token
    is the mean of its members' probabilities. With `sampling` and one random key per sample, hypotheses are sampled
    from that distribution. Raises UserError if `spec.max_length` exceeds the learned position table.
    """
    # The samples of a sentence share its memory but are independent rows; the hypotheses of a beam share a cache.
    beam_size, num_samples = (spec.beam_size, 1) if keys is None else (1, keys.shape[1])
    capacity = min((*spec.cache_sizes, spec.max_length))
    cache_options = {"max_length": spec.max_length, "capacity": capacity, "beam_size": beam_size}
    members = [
        _start(prepared, src, _compute_config(member.config, quantization), num_samples, cache_options)
        for prepared, member in zip(params, models, strict=True)
    ]
    step_fns, caches = zip(*members, strict=True)

    def step_fn(tokens: Int[Array, " rows"], caches: Caches) -> tuple[Float[Array, "rows v"], Caches]:
        steps = [step(tokens, cache) for step, cache in zip(step_fns, caches, strict=True)]
        return mean_of_probabilities([logits for logits, _ in steps]), tuple(cache for _, cache in steps)

    if sampling is not None:
        assert keys is not None  # the caller's contract; for the type checker
        return sample(step_fn, caches, spec, sampling, keys, resize_fn=_for_each(resize_cache))
    if spec.beam_size == 1:
        return greedy_search(step_fn, caches, spec, resize_fn=_for_each(resize_cache))
    return beam_search(step_fn, caches, spec, reorder_fn=_for_each(reorder_cache), resize_fn=_for_each(resize_cache))


def mean_of_probabilities(logits: Sequence[Float[Array, "rows v"]]) -> Float[Array, "rows v"]:
    """Return the logarithm of the members' mean probabilities as logits; those of one member stay unchanged."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(member) for member in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - math.log(len(logits))


def _start(
    params: Params, src: Int[Array, "b s"], config: ModelConfig, num_samples: int, cache_options: dict[str, int]
) -> tuple[StepFn, Cache]:
    """Encode the sources, and return one model's step function and its empty cache for `num_samples` rows a source."""
    apply: Any = partial(Transformer(config).apply, {"params": params})
    src_mask = padding_mask(src, config.pad_id)
    memory = apply(src, src_mask=src_mask, method="encode")
    if num_samples > 1:
        memory, src_mask = (jnp.repeat(leaf, num_samples, axis=0) for leaf in (memory, src_mask))
    return partial(apply, method="decode_step"), apply(memory, src_mask, method="init_cache", **cache_options)


def _for_each(change: Callable[[Cache, Any], Cache]) -> Callable[[Caches, Any], Caches]:
    """Return a function that applies the same change to the cache of every member."""
    return lambda caches, argument: tuple(change(cache, argument) for cache in caches)


# What the members of an ensemble must have in common.
_SPECIAL_IDS = ("pad_id", "bos_id", "eos_id", "unk_id", "start_id")
_SHARED_FIELDS = ("vocab_size", "source_rows", *_SPECIAL_IDS, "source_bos", "source_eos")


class Member(NamedTuple):
    """A model of an ensemble."""

    config: ModelConfig
    params: Params
    checkpoint: str = ""
    """Which parameters of its run these are: last, best, average or a step."""


def run_params(run_dir: RunDir, config: Config) -> Params:
    """Return the parameters of a run's checkpoint that `decoding.checkpoint` names."""
    checkpoint = resolve_checkpoint(run_dir, config.decoding.checkpoint, config.training.best_by)
    return load_params(checkpoint, abstract_params(config.model))


def load_member(
    run: str | Path, first: RunDir, config: Config, tokenizers: TokenizerPair, checkpoint: str | None
) -> Member:
    """Load a run for the ensemble of the run `first`. `checkpoint` None selects the one that its config names."""
    run_dir, refusal = RunDir(Path(run)), f"{run} cannot be in an ensemble with {first.path}: "
    own = run_dir.load_config()
    for name in _SHARED_FIELDS:
        there, here = getattr(own.model, name), getattr(config.model, name)
        if there != here:
            raise UserError(f"{refusal}model.{name} is {there} there and {here} here")
    if TokenizerPair.load(run_dir.tokenizer) != tokenizers:
        raise UserError(f"{refusal}their tokenizers are not the same")
    if checkpoint is not None:
        own = dataclasses.replace(own, decoding=dataclasses.replace(own.decoding, checkpoint=checkpoint))
    return Member(own.model, run_params(run_dir, own), own.decoding.checkpoint)
