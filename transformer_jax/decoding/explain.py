"""A search that can be watched: what each step looked at, what lived, ended or was pruned, and what stopped it.

The search itself tells (`search_loop.Watched`), so this is what it did and no second account of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import numpy as np

from transformer_jax.config import DecodingConfig
from transformer_jax.decoding.search import SearchResult, Watched
from transformer_jax.decoding.translator import Hypothesis, Translator, check_prefixes
from transformer_jax.types import UserError

Fate = Literal["lives", "ended", "pruned", "dropped"]
"""lives: it is continued in the next step. ended: it is among the k best that ended. pruned: others were better, or it
is an end that the stopping rule does not count. dropped: it ended, and k that ended are better."""


class Candidate(NamedTuple):
    """A hypothesis that a step looked at."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """The tokens as people read them."""
    parent: int
    """Which of the live hypotheses of the step before it continues, from 1, best first."""
    log_prob: float
    """log P(target | source) so far, in nats."""
    score: float
    """log-probability / length penalty, were it to end here."""
    fate: Fate


class Ended(NamedTuple):
    """One of the best hypotheses that ended so far."""

    pieces: tuple[str, ...]
    score: float


@dataclass(frozen=True)
class Step:
    """One step of the search."""

    length: int
    """Tokens of each hypothesis, from 1 on."""
    candidates: tuple[Candidate, ...]
    """What was looked at, best first: at most 2k."""
    ended: tuple[Ended, ...]
    """The best that ended in this step or before, best first: at most k."""
    bound: float | None
    """What the best live hypothesis is taken to be able to score. None: there is none, or no score is compared."""
    stopped_by: str
    """Why the search ended here; empty: it goes on."""


@dataclass(frozen=True)
class Explanation:
    """The search for one sentence. As a string, a report to read."""

    source_pieces: tuple[str, ...]
    decoding: DecodingConfig
    steps: tuple[Step, ...]
    hypotheses: tuple[Hypothesis, ...]
    """What the search returned, best first."""

    def __str__(self) -> str:
        return "\n".join(_report(self))


def explain(
    translator: Translator, texts: Sequence[str], n_best: int = 1, prefixes: Sequence[str] | None = None
) -> list[Explanation]:
    """Translates the texts one by one, and tells how.

    Each call compiles the search anew, so a few sentences together take less time than one by one.

    Raises:
        UserError: as `Translator.translate_n_best`.
    """
    if isinstance(texts, str):
        raise UserError(f"texts is the string {texts!r:.80}; a list of strings is needed")
    seen: list[Watched] = []

    def watch(watched: Watched) -> None:
        seen.append(watched)

    explanations = []
    if prefixes is not None:
        check_prefixes(prefixes, texts)
    for number, text in enumerate(texts):
        seen.clear()
        prefix = None if prefixes is None else [prefixes[number]]
        (hypotheses,) = translator.translate_n_best([text], n_best, prefixes=prefix, watch=watch)
        jax.effects_barrier()
        (source,) = translator.encode([text], warn=False)  # it was said above
        steps = tuple(_step(watched, translator, n_best) for watched in seen)
        pieces = tuple(translator.tokenizers.source.pieces(source))
        explanations.append(Explanation(pieces, translator.config.decoding, steps, tuple(hypotheses)))
    seen.clear()  # the compiled search keeps `watch`
    return explanations


def _step(watched: Watched, translator: Translator, n_best: int) -> Step:
    """What the search did with the first sentence of its batch."""
    live, finished = _rows(watched.live), _rows(watched.finished)
    candidates = []
    rows = _rows(watched.candidates)
    # Those that are none stand last, and are not among the rows.
    for (ids, (log_prob, score)), parent, finishes in zip(
        rows.items(), watched.parents[0], watched.finishes[0], strict=False
    ):
        fate: Fate = "lives" if ids in live else "pruned"
        if finishes:
            fate = "ended" if ids in finished else "dropped"
        pieces = tuple(translator.tokenizers.target.pieces(ids))
        candidates.append(Candidate(ids, pieces, int(parent) + 1, log_prob, score, fate))
    ended = [Ended(tuple(translator.tokenizers.target.pieces(ids)), score) for ids, (_, score) in finished.items()]
    bound = float(watched.bound[0]) if np.isfinite(watched.bound[0]) else None
    stopped_by = _reason(watched, len(ended), bound, translator.config.decoding, n_best) if watched.done[0] else ""
    return Step(int(watched.length), tuple(candidates), tuple(ended), bound, stopped_by)


def _rows(found: SearchResult) -> dict[tuple[int, ...], tuple[float, float]]:
    """{tokens: (log-probability, score)} of the first sentence's hypotheses, in their order."""
    return {
        tuple(int(token) for token in found.tokens[0, place, : found.lengths[0, place]]): (
            float(found.log_probs[0, place]),
            float(found.scores[0, place]),
        )
        for place in range(found.scores.shape[1])
        if found.log_probs[0, place] > -math.inf and found.scores[0, place] > -math.inf
    }


def _reason(watched: Watched, num_ended: int, bound: float | None, decoding: DecodingConfig, n_best: int) -> str:
    """Why the sentence is done."""
    if decoding.beam_size == 1 and num_ended:
        return "it ended"
    if watched.at_limit[0]:
        return f"{watched.length} tokens are the limit"
    if not watched.live.log_probs[0, 0] > -math.inf:
        return "no hypothesis can be continued"
    if decoding.stopping == "paper":
        best = "the best that ended" if n_best == 1 else f"the {n_best} best that ended"
        return f"a live one can score {bound:.4f} at most, which is no better than {best}"
    if decoding.stopping == "huggingface":
        return f"{num_ended} ended, none of which is worse than {bound:.4f}, the best live one scored as it is"
    return f"{num_ended} ended"


def _report(explanation: Explanation) -> list[str]:
    decoding = explanation.decoding
    penalty = {
        "gnmt": f"((5 + length) / 6)^{decoding.alpha:g}",
        "power": f"length^{decoding.alpha:g}",
        "none": "1",
    }[decoding.length_penalty]
    is_greedy = decoding.beam_size == 1
    how = (
        "greedy search" if is_greedy else f"beam {decoding.beam_size}, penalty {penalty}, stopping {decoding.stopping}"
    )
    lines = [f"source  {' '.join(explanation.source_pieces)}", f"search  {how}"]
    for step in explanation.steps:
        lines += ["", f"step {step.length}", f"  {'from':>4} {'log P':>9} {'score':>9}  fate"]
        lines += [
            f"  {one.parent:>4} {one.log_prob:9.4f} {one.score:9.4f}  {one.fate:7}  {' '.join(one.pieces)}"
            for one in step.candidates
        ]
        if step.ended and not is_greedy:
            lines.append("  ended so far")
            lines += [f"  {'':>14} {one.score:9.4f}  {'':7}  {' '.join(one.pieces)}" for one in step.ended]
        if step.bound is not None:
            lines.append(f"  bound  {step.bound:.4f}: {_BOUNDS[decoding.stopping]}")
        if step.stopped_by:
            lines.append(f"  stops: {step.stopped_by}")
    lines += ["", "result"]
    lines += [
        f"  score {one.score:.4f}, log P {one.log_prob:.4f}, {one.num_tokens} tokens: {one.text}"
        for one in explanation.hypotheses
    ]
    return lines


_BOUNDS = {
    "paper": "the most that a live hypothesis can still score",
    "huggingface": "the score of the best live hypothesis as it is",
}
