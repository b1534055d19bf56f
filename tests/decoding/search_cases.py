"""A random model whose next token depends on the complete prefix, and the stopping rules as plain loops."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decoding.beam_search import beam_search, reorder_rows
from transformer_jax.decoding.search import SearchResult, SearchSpec

PAD, EOS, START, UNK = 0, 1, 2, 3
STOPPINGS = ("paper", "huggingface", "ctranslate2")
PENALTIES = (("gnmt", 0.6), ("gnmt", 1.5), ("power", 1.0), ("none", 0.6))


# ------------------------------------------------------------------------------------------------------------ a model


def extend(prefix, tokens):
    """Return the hash (uint32) of a prefix and one more token, bit-identical in NumPy and JAX."""
    return (prefix ^ (tokens + 1).astype(prefix.dtype)) * np.uint32(2654435761) + np.uint32(12345)


def random_logits(prefix, v, eos_bonus, xp):
    """Return pseudo-random logits `rows v`, a hash of the prefix's hash and of the token id."""
    x = prefix[:, None] + xp.arange(v, dtype=xp.uint32)[None] * np.uint32(40503)
    for shift, factor in ((15, 2246822519), (13, 3266489917), (16, 668265263)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    logits = (x >> np.uint32(8)).astype(xp.float32) / np.float32(2**22)  # 0 to 4, exact
    return logits + eos_bonus * (xp.arange(v) == EOS).astype(xp.float32)[None]


class Model:
    """`step` for the searches, `log_probs(prefix)` for the references. A sentence is a number."""

    def __init__(self, v, eos_bonus=0.0, dtype=jnp.float32):
        self.v, self.eos_bonus, self.dtype = v, eos_bonus, dtype
        self.traces = self.steps = 0

    def state(self, sentences, k=1):
        rows = np.repeat(np.asarray(sentences, np.uint32), k)
        return {"prefix": jnp.asarray(rows), "position": jnp.int32(0)}

    def step(self, tokens, state):
        self.traces += 1
        jax.debug.callback(self._count)
        prefix = extend(state["prefix"], tokens)
        logits = random_logits(prefix, self.v, self.eos_bonus, jnp).astype(self.dtype)
        return logits, {"prefix": prefix, "position": state["position"] + 1}

    def _count(self):
        self.steps += 1

    def log_probs(self, sentence, prefix):
        """Return log-probabilities of the token after START and `prefix`, by NumPy in float64."""
        value = np.array([sentence], np.uint32)
        for token in (START, *prefix):
            value = extend(value, np.array([token]))
        logits = random_logits(value, self.v, self.eos_bonus, np)[0].astype(np.float64)
        return list(logits - np.log(np.sum(np.exp(logits))))


def quick_jit(function):
    """Compile a small program with few optimizations, which halves the compilation time."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def spec(limits, width, **options) -> SearchSpec:
    """Return a `SearchSpec` with the special ids of these tests."""
    ids = {"start_id": START, "eos_id": EOS, "pad_id": PAD}
    return SearchSpec(max_lengths=jnp.asarray(limits, jnp.int32), max_length=width, **ids, **options)


@functools.lru_cache
def compiled(model, k, width, reorder_fn, options):
    """Return the jitted `beam_search` over a model, cached per options."""
    options = dict(options)
    if "prefix" in options:
        options["prefix"] = jnp.array(options["prefix"], jnp.int32)

    def run(state, limits):
        return beam_search(model.step, state, spec(limits, width, beam_size=k, **options), reorder_fn=reorder_fn)

    return quick_jit(run)


def beams(model, sentences, limits, *, k, width=None, reorder_fn=reorder_rows, **options) -> SearchResult:
    """Run the jitted `beam_search`, and return NumPy arrays."""
    run = compiled(model, k, width or max(limits), reorder_fn, tuple(options.items()))
    return jax.tree.map(np.asarray, run(model.state(sentences, k), jnp.asarray(limits)))


def penalty(kind, length, alpha):
    return {"gnmt": ((5 + length) / 6) ** alpha, "power": length**alpha, "none": 1.0}[kind]


def check(result: SearchResult, row: int, expected: list[tuple[float, list[int], float]], width: int) -> None:
    """Check that a row of the result equals a list of (score, tokens, log-probability)."""
    assert result.tokens.shape[1:] == (len(expected), width)
    for place, (score, tokens, log_prob) in enumerate(expected):
        assert result.tokens[row, place].tolist() == tokens + [PAD] * (width - len(tokens))
        assert result.lengths[row, place] == len(tokens)
        assert result.scores[row, place] == pytest.approx(score, rel=2e-5)
        assert result.log_probs[row, place] == pytest.approx(log_prob, rel=2e-5)


# --------------------------------------------------------------------------------------------------------- references


def enumerate_all(model, sentence, limit, kind, alpha, forbidden=(PAD,), prefix=(), min_length=0):
    """Return every hypothesis that ends within the limit, best first, then the truncated ones, best first.

    With a prefix: of those that begin with it. With `min_length`: EOS has at least that number of tokens before it.
    """
    allowed = [token for token in range(model.v) if token not in forbidden]
    ended, cut = [], []
    for length in range(1, limit + 1):
        for tokens in itertools.product(allowed, repeat=length):
            if EOS in tokens[:-1] or (tokens[-1] != EOS and length < limit) or tokens[: len(prefix)] != tuple(prefix):
                continue
            if tokens[-1] == EOS and length <= min_length:
                continue
            log_prob = sum(model.log_probs(sentence, tokens[:i])[token] for i, token in enumerate(tokens))
            hypothesis = (log_prob / penalty(kind, length, alpha), list(tokens), log_prob)
            (ended if tokens[-1] == EOS else cut).append(hypothesis)
    return sorted(ended, reverse=True) + sorted(cut, reverse=True)


def continuations(model, sentence, live, k, prefix=(), min_length=0, renormalize_logits=False):
    """Return the 2k best one-token extensions as (log-probability, tokens), best first, without PAD and UNK.

    Within the prefix there is one way, and its probability is that among all tokens.
    """
    found = []
    for log_prob, tokens in live:
        log_probs = model.log_probs(sentence, tokens)
        if len(tokens) < len(prefix):
            token = prefix[len(tokens)]
            found.append((log_prob + log_probs[token], [*tokens, token]))
            continue
        forbidden = (UNK, EOS) if len(tokens) < min_length else (UNK,)
        rest = math.log(1 - sum(math.exp(log_probs[t]) for t in forbidden)) if renormalize_logits else 0.0
        allowed = [t for t in range(model.v) if t not in (PAD, *forbidden)]
        found += [(log_prob + log_probs[t] - rest, [*tokens, t]) for t in allowed]
    return sorted(found, reverse=True)[: 2 * k]


def reference_paper(model, sentence, limit, k, n, kind, alpha, prefix=(), min_length=0):
    """Search without early stopping, and keep every finished hypothesis."""
    live, ended = [(0.0, [])], []
    for length in range(1, limit + 1):
        found = continuations(model, sentence, live, k, prefix, min_length)
        ended += [(p / penalty(kind, length, alpha), y, p) for p, y in found if y[-1] == EOS]
        live = [(p, y) for p, y in found if y[-1] != EOS][:k]
    return (sorted(ended, reverse=True) + [(p / penalty(kind, limit, alpha), y, p) for p, y in live])[:n]


def reference_huggingface(model, sentence, limit, k, n, kind, alpha, prefix=(), min_length=0):
    """Search until k hypotheses have finished and no live one can improve them at the current length."""
    live, ended = [(0.0, [])], []
    for length in range(1, limit + 1):
        found = continuations(model, sentence, live, k, prefix, min_length)
        for log_prob, tokens in found[:k]:
            if tokens[-1] == EOS or length == limit:
                ended.append((log_prob / penalty(kind, length, alpha), tokens, log_prob))
        ended = sorted(ended, reverse=True)[:k]
        live = [(p, y) for p, y in found if y[-1] != EOS][:k]
        if len(ended) == k and not live[0][0] / penalty(kind, length, alpha) > ended[-1][0]:
            break
    return ended[:n]


def reference_ctranslate2(model, sentence, limit, k, n, kind, alpha, prefix=(), min_length=0):
    """Refill each of the k slots whose hypothesis ends with the next unfinished one of the other k candidates."""
    live, ended, top_ended = [(0.0, [])], [], False
    for length in range(1, limit + 1):
        found = continuations(model, sentence, live, k, prefix, min_length, renormalize_logits=True)
        spare = [candidate for candidate in found[k:] if candidate[1][-1] != EOS]
        live = []
        for place, (log_prob, tokens) in enumerate(found[:k]):
            if tokens[-1] != EOS and length < limit:
                live.append((log_prob, tokens))
                continue
            top_ended = top_ended or place == 0
            ended.append((log_prob, tokens))
            if spare:
                live.append(spare.pop(0))
        if kind == "none" or alpha == 0:
            if top_ended and len(ended) >= n:
                break
        elif len(ended) >= k:
            break
    return sorted(((p / penalty(kind, len(y), alpha), y, p) for p, y in ended), reverse=True)[:n]


REFERENCES = {
    "paper": reference_paper,
    "huggingface": reference_huggingface,
    "ctranslate2": reference_ctranslate2,
}
