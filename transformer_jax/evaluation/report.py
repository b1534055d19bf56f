"""Figures of an evaluation, as JSON has them and as lines."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from transformer_jax.evaluation.bleu import resample
from transformer_jax.evaluation.validation import Report

Say = Callable[[str], None]


def result_of(report: Report) -> dict[str, Any]:
    """A report's figures as JSON has them."""
    scores = dataclasses.asdict(report.scores)
    others = {item.name: getattr(report, item.name) for item in dataclasses.fields(report)}
    lists = ("scores", "translations", "references")
    return {**scores, **{name: value for name, value in others.items() if name not in lists}}


def say_result(result: Mapping[str, Any], say: Say) -> None:
    """A result as lines, the last of them `exact match 99.62 %`."""
    if "bleu" not in result:
        return
    resampled = {one["metric"]: one for one in result.get("resampled", ())}
    say(f"BLEU {result['bleu']:.2f}{_interval(resampled.get('BLEU'))}  ({result['bleu_signature']})")
    for variant in result.get("variants", ()):
        say(f"    {variant['bleu']:6.2f}  {variant['name']}  ({variant['signature']})")
    say(f"chrF {result['chrf']:.2f}{_interval(resampled.get('chrF2'))}  ({result['chrf_signature']})")
    # JSON has null for what is not finite.
    loss, perplexity = (math.inf if result[name] is None else result[name] for name in ("loss", "perplexity"))
    say(f"loss {loss:.4f}, perplexity {perplexity:.3f} per token")
    say(
        f"{result['num_sentences']} sentences, {result['sentences_per_second']:.1f} sentences/s, "
        f"{result['tokens_per_second']:.0f} tokens/s"
    )
    say(f"exact match {result['exact_match']:.2f} %")


def compared(
    report: Report, first: Report | None, tokenize: str, lowercase: bool, num_samples: int
) -> list[dict[str, Any]]:
    """Intervals of a report's scores, and the significance of the difference to the first one, as JSON has them.

    Args:
        report: of a run.
        first: of another run; None: there is none.
        tokenize, lowercase, num_samples: as for `resample`.
    """
    systems = {"this": report.translations}
    if (
        first is not None
        and first.references == report.references
        and first.scores.bleu_signature == report.scores.bleu_signature  # of the same kind of tokens
    ):
        systems = {"first": first.translations, **systems}
    found = resample(systems, report.references, tokenize, lowercase, num_samples)["this"]
    return [dataclasses.asdict(one) for one in found]


def say_difference(result: Mapping[str, Any], first: Mapping[str, Any], say: Say) -> None:
    """The paired tests of a run against the first one, a line each."""
    for one, other in zip(first["resampled"], result["resampled"], strict=True):
        if other["p_value"] is None:
            say(f"not compared with {first['run']}: its references or tokens are others")
            return
        say(
            f"against {first['run']}: {one['metric']} {other['score'] - one['score']:+.2f}, "
            f"p = {other['p_value']:.4f}  ({other['signature']})"
        )


def _interval(resampled: Mapping[str, Any] | None) -> str:
    return f" (95 %: {resampled['mean']:.2f} \u00b1 {resampled['interval']:.2f})" if resampled else ""
