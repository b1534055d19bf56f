"""Score finished runs, compare them, and average their checkpoints: the commands `evaluate` and `average`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.checkpoint.averaging import average_checkpoints, choose_steps
from transformer_jax.checkpoint.run_dir import RunDir, locked
from transformer_jax.config import Config
from transformer_jax.data.corpus import read_split
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import Moses, bleu_variants, resample, tokenization_of
from transformer_jax.evaluation.validation import CorpusEvaluation, check_complete, check_direction, evaluate_pairs
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.distributed import is_main_process, on_main_process
from transformer_jax.runtime.files import check_writable, write_atomically
from transformer_jax.types import UserError


def evaluate(run: str | Path, pairs: Pairs | None = None, split: str = "test", **options: Any) -> dict[str, Any]:
    """Score one run: return the result that `evaluate_runs` yields for it with these options."""
    return next(evaluate_runs([run], pairs, split, **options))


def evaluate_runs(
    runs: Sequence[str | Path],
    pairs: Pairs | None = None,
    split: str = "test",
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    num_samples: int = 1000,
    ensemble: Sequence[str | Path] = (),
    language: str | None = None,
    output: str | Path | None = None,
    **decoding: Any,
) -> Iterator[dict[str, Any]]:
    """Score runs on sentence pairs, or on a split of their own corpora.

    Args:
        runs: Folders of the runs.
        pairs: Sources and references. None uses the split.
        split: Split of each run's corpus.
        tokenize: SacreBLEU's tokenization of the main score. None selects it as `tokenization_of` does.
        lowercase: Whether to compute the main score without case.
        num_samples: Number of bootstrap samples. 0 disables intervals.
        ensemble: Other runs, which translate together with each of `runs`.
        language: Two-letter code of the language whose Moses rules tokenize. None uses each run's
            `data.target_language`.
        output: File for the translations, one per line, detokenized if the corpus is tokenized. With several runs, the
            last one's translations remain.
        decoding: Replacements for fields of the runs' `decoding` sections.

    Yields:
        The result of each run. If it was scored on the references and the tokenization of the first run, the result
        includes the significance of the difference.

    Raises:
        UserError: A run, checkpoint or split does not exist, or the output cannot be written.
    """
    if output is not None:
        on_main_process(check_writable)(Path(output))
    first: CorpusEvaluation | None = None
    for run in runs:
        translator = Translator.load(run, ensemble=ensemble, **decoding)
        config = translator.config
        if pairs is not None:
            check_direction(translator, pairs)
        chosen = pairs or split_of(config, split, run)
        kind = tokenize or tokenization_of(config)
        evaluation = evaluate_pairs(translator, chosen, tokenize=kind, lowercase=lowercase)
        check_complete(evaluation.translations, chosen)
        result = {"run": str(run), "checkpoint": config.decoding.checkpoint, **evaluation.to_dict()}
        if ensemble:
            members = zip(ensemble, translator.members[1:], strict=True)
            result["ensemble"] = [{"run": str(path), "checkpoint": member.checkpoint} for path, member in members]
        if is_main_process():
            is_tokenized, code = config.tokenizer.kind == "pretokenized", language or config.data.target_language
            sides = evaluation.translations, evaluation.references
            variants = bleu_variants(*sides, language=code, is_tokenized=is_tokenized)
            result["variants"] = [dataclasses.asdict(variant) for variant in variants]
            result["resampled"] = (
                bootstrap_intervals(evaluation, first, kind, lowercase, num_samples) if num_samples else []
            )
            if output is not None:
                lines = Moses(code).detokenize(sides[0]) if is_tokenized else sides[0]
                write_atomically(Path(output), "".join(line + "\n" for line in lines))
        first = first or evaluation
        yield result


def bootstrap_intervals(
    evaluation: CorpusEvaluation, first: CorpusEvaluation | None, tokenize: str, lowercase: bool, num_samples: int
) -> list[dict[str, Any]]:
    """Return the intervals of a run's scores and the significance of the difference to another run.

    Args:
        evaluation: Evaluation of the run.
        first: Evaluation of another run. None, or other references or tokenization, gives no significance.
        tokenize: SacreBLEU's tokenization.
        lowercase: Whether to score without case.
        num_samples: Number of bootstrap samples.
    """
    systems = {"this": evaluation.translations}
    if (
        first is not None
        and first.references == evaluation.references
        and first.scores.bleu_signature == evaluation.scores.bleu_signature
    ):
        systems = {"first": first.translations, **systems}
    scores = resample(systems, evaluation.references, tokenize, lowercase, num_samples)["this"]
    return [dataclasses.asdict(score) for score in scores]


def result_lines(result: Mapping[str, Any]) -> list[str]:
    """Format a result as lines of text. The last line reports exact matches: `exact match 99.62 %`."""
    if "bleu" not in result:
        return []
    resampled = {score["metric"]: score for score in result.get("resampled", ())}
    # JSON has null for numbers that are not finite.
    loss, perplexity = (math.inf if result[name] is None else result[name] for name in ("loss", "perplexity"))
    return [
        f"BLEU {result['bleu']:.2f}{_interval(resampled.get('BLEU'))}  ({result['bleu_signature']})",
        *(
            f"    {variant['bleu']:6.2f}  {variant['name']}  ({variant['signature']})"
            for variant in result.get("variants", ())
        ),
        f"chrF {result['chrf']:.2f}{_interval(resampled.get('chrF2'))}  ({result['chrf_signature']})",
        f"loss {loss:.4f}, perplexity {perplexity:.3f} per token",
        f"{result['num_sentences']} sentences, {result['sentences_per_second']:.1f} sentences/s, "
        f"{result['tokens_per_second']:.0f} tokens/s",
        f"exact match {result['exact_match']:.2f} %",
    ]


def difference_lines(result: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """Return the paired bootstrap tests of a run against the first one, one line per metric."""
    lines = []
    for ours, theirs in zip(result["resampled"], first["resampled"], strict=True):
        if ours["p_value"] is None:
            return [f"no significance test against {first['run']}: different references or tokenization"]
        lines.append(
            f"against {first['run']}: {theirs['metric']} {ours['score'] - theirs['score']:+.2f}, "
            f"p = {ours['p_value']:.4f}  ({ours['signature']})"
        )
    return lines


def _interval(resampled: Mapping[str, Any] | None) -> str:
    return f" (95 %: {resampled['mean']:.2f} \u00b1 {resampled['interval']:.2f})" if resampled else ""


def split_of(config: Config, split: str, run: str | Path) -> Pairs:
    """Return a split of a run's corpus.

    Raises:
        UserError: The split does not exist.
    """
    if split not in ("train", "valid", "test"):
        raise UserError(f"split is {split!r}; legal: train, valid, test")
    pairs = read_split(config.data, split)  # type: ignore[arg-type]  # the line above checks the name
    if pairs is None:
        raise UserError(f"{run}: data.{split} is empty in its configuration; give --source and --reference")
    return pairs


def average(
    run: str | Path, last: int | None = None, *, minutes: float | None = None, steps: Sequence[int] = ()
) -> list[int]:
    """Average checkpoints of a run into its `average/`, which `--checkpoint average` selects.

    Args:
        run: Folder of the run.
        last: Number of most recent checkpoints.
        minutes: Maximum age of the checkpoints relative to the newest one, in minutes.
        steps: Steps of the checkpoints. If given, `last` and `minutes` are not used.

    Returns:
        The steps that were averaged.

    Raises:
        UserError: A checkpoint does not exist, or the run cannot be written.
    """
    folder = RunDir(Path(run))
    config = folder.load_config()
    with locked(folder) as can_write:
        if not can_write:
            raise UserError(f"{folder.average}: cannot be written: the run is read-only")
        chosen = steps or choose_steps(folder, last=last, minutes=minutes)
        return average_checkpoints(folder, abstract_params(config.model), chosen)
