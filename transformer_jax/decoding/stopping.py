"""Length penalties, and the rules that decide when a beam search stops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from transformer_jax.decoding import stopping as scoring
from transformer_jax.decoding.search import SearchResult, divide

LengthPenalty = Literal["gnmt", "power", "none"]


def length_penalty(kind: LengthPenalty, length: ArrayLike, alpha: float) -> Float[Array, "..."]:
    """What log P(y | x) is divided by, so that longer hypotheses are not at a disadvantage.

        gnmt    ((5 + length) / 6)^alpha    Wu et al. 2016, equation 14, without its coverage term; the paper's
        power   length^alpha                fairseq, Hugging Face, CTranslate2: their 0.6 is another 0.6
        none    1

    Args:
        kind: which of the three.
        length: tokens of the hypothesis, its EOS counted and its start token not; any shape.
        alpha: the exponent; 0 makes every kind `none`.

    Returns:
        The penalty, of the shape of `length`, in JAX's default float type.

    >>> [round(float(length_penalty("gnmt", n, 0.6)), 4) for n in (1, 7)]
    [1.0, 1.5157]
    """
    length = jnp.asarray(length, float)
    match kind:
        case "gnmt":
            return ((5 + length) / 6) ** alpha
        case "power":
            return length**alpha
        case "none":
            return jnp.ones_like(length)
    raise ValueError(f"length_penalty is {kind!r}; it must be 'gnmt', 'power' or 'none'")


Stopping = Literal["paper", "huggingface", "ctranslate2"]


@dataclass(frozen=True)
class Setting:
    """The numbers of a beam search that the stopping rules look at."""

    beam_size: int
    n_best: int
    alpha: float
    length_penalty: LengthPenalty
    limits: Int[Array, " b"]

    def penalty(self, lengths: Int[Array, "..."]) -> Float[Array, "..."]:
        """The length penalty of this search."""
        return scoring.length_penalty(self.length_penalty, lengths, self.alpha)

    @property
    def unpenalised(self) -> bool:
        """Whether scores are log-probabilities."""
        return self.length_penalty == "none" or self.alpha == 0


class Progress(NamedTuple):
    """What is known of each sentence after a step."""

    live: SearchResult
    """The k best hypotheses that go on, best first."""
    finished: SearchResult
    """The k best that ended, best first; a score of -inf is a free place."""
    num_finished: Int[Array, " b"]
    """How many ended so far, kept or not."""
    top_finished: Bool[Array, " b"]
    """Whether the best continuation of some step was an end."""


def _paper_bound(progress: Progress, length: Int[Array, ""], setting: Setting) -> Float[Array, " b"]:
    """The most that a live hypothesis can still score.

    Log-probabilities only fall, so it is at most log-probability / penalty with the largest penalty ahead: the one at
    the limit, or, for a negative alpha, at the next token.
    """
    penalty = jnp.maximum(setting.penalty(length + 1), setting.penalty(setting.limits))
    return divide(progress.live.log_probs[:, 0], penalty)


def _paper_is_done(progress: Progress, length: Int[Array, ""], setting: Setting) -> Bool[Array, " b"]:
    """No live hypothesis can still enter the n best. What merely ties with the n-th best comes after it."""
    return progress.finished.scores[:, setting.n_best - 1] >= _paper_bound(progress, length, setting)


def _huggingface_bound(progress: Progress, length: Int[Array, ""], setting: Setting) -> Float[Array, " b"]:
    """The score of the best live hypothesis, were it to end as it is.

    A heuristic: with a penalty that grows with the length a live hypothesis may well get better later.
    """
    return divide(progress.live.log_probs[:, 0], setting.penalty(length))


def _huggingface_is_done(progress: Progress, length: Int[Array, ""], setting: Setting) -> Bool[Array, " b"]:
    """k have finished, and the best live hypothesis, were it to end as it is, is no better than the worst of them."""
    worst = progress.finished.scores[:, -1]
    return (worst > -jnp.inf) & (worst >= _huggingface_bound(progress, length, setting))


def _ctranslate2_is_done(progress: Progress, length: Int[Array, ""], setting: Setting) -> Bool[Array, " b"]:
    """k have finished, however they score. With no penalty: n have, and the best continuation of a step was an end."""
    if setting.unpenalised:
        return progress.top_finished & (progress.num_finished >= setting.n_best)
    return progress.num_finished >= setting.beam_size


class Rule(NamedTuple):
    """A stopping rule: when a sentence is done, and the small habits of the software it is named after."""

    is_done: Callable[[Progress, Int[Array, ""], Setting], Bool[Array, " b"]]
    only_best_k: bool
    """An end counts only among the k best continuations of a step, not among all 2k that are looked at."""
    ends_at_limit: bool
    """At the limit the k best count as ended, EOS or not. Otherwise they stand behind all that came to an EOS."""
    renormalize_logits: bool
    """The forbidden ids leave the softmax, rather than being struck out after it."""
    bound: Callable[[Progress, Int[Array, ""], Setting], Float[Array, " b"]] | None
    """What the best live hypothesis is taken to be able to score; None: the rule counts and does not compare scores."""


RULES: dict[Stopping, Rule] = {
    "paper": Rule(_paper_is_done, only_best_k=False, ends_at_limit=False, renormalize_logits=False, bound=_paper_bound),
    "huggingface": Rule(
        _huggingface_is_done, only_best_k=True, ends_at_limit=True, renormalize_logits=False, bound=_huggingface_bound
    ),
    "ctranslate2": Rule(
        _ctranslate2_is_done, only_best_k=True, ends_at_limit=True, renormalize_logits=True, bound=None
    ),
}
