"""Score finished runs, compare them, try decoding settings, and average checkpoints."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.checkpoint.averaging import average_checkpoints, choose_steps
from transformer_jax.checkpoint.run_dir import RunDir, locked
from transformer_jax.config import DecodingConfig
from transformer_jax.data.corpus import read_split
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import bleu_variants, moses_detokenize, resample, score_corpus, tokenization_of
from transformer_jax.evaluation.validation import (
    CorpusEvaluation,
    check_complete,
    check_direction,
    evaluate_pairs,
    reference_texts,
)
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.distributed import is_main_process, on_main_process
from transformer_jax.runtime.files import JsonObject, check_writable, write_atomically
from transformer_jax.types import UserError


def evaluate(run: str | Path, pairs: Pairs | None = None, split: str = "test", **options: Any) -> JsonObject:
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
    **decoding: object,
) -> Iterator[JsonObject]:
    """Score runs on sentence pairs, or on a split of their own corpora.

    Args:
        runs: Folders of the runs.
        pairs: Sources and references. None uses the split.
        split: Split of each run's corpus.
        tokenize: SacreBLEU's tokenization of the main score. None selects it as `tokenization_of` does.
        lowercase: Whether to compute the main score without case.
        num_samples: Number of bootstrap samples. 0 disables intervals.
        ensemble: Other runs, which translate together with each of `runs`.
        language: Two-letter code of the language of Moses' rules. None uses each run's `data.target_language`.
        output: File for the translations of the last run, one per line, detokenized if the corpus is tokenized.
        decoding: Replacements for fields of the runs' `decoding` sections.

    Yields:
        The result of each run, with the significance of its difference to the first one if they are comparable.

    Raises:
        UserError: A run, checkpoint or split does not exist, or the output cannot be written.
    """
    if output is not None:
        on_main_process(check_writable)(Path(output))
    first: CorpusEvaluation | None = None
    for run in runs:
        translator, chosen = _load(run, pairs, split, ensemble, decoding)
        config = translator.config
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
            result["resampled"] = _resampled(evaluation, first, kind, lowercase, num_samples) if num_samples else []
            if output is not None:
                lines = moses_detokenize(sides[0], code) if is_tokenized else sides[0]
                write_atomically(Path(output), "".join(line + "\n" for line in lines))
        first = first or evaluation
        yield result


def _load(
    run: str | Path, pairs: Pairs | None, split: str, ensemble: Sequence[str | Path], decoding: Mapping[str, object]
) -> tuple[Translator, Pairs]:
    translator = Translator.load(run, ensemble=ensemble, **decoding)
    if pairs is not None:
        check_direction(translator, pairs)
        return translator, pairs
    if split not in ("train", "valid", "test"):
        raise UserError(f"split is {split!r}; legal: train, valid, test")
    pairs = read_split(translator.config.data, split)  # type: ignore[arg-type]  # the line above checks the name
    if pairs is None:
        raise UserError(f"{run}: data.{split} is empty in its configuration; give --source and --reference")
    return translator, pairs


def _resampled(
    evaluation: CorpusEvaluation, first: CorpusEvaluation | None, tokenize: str, lowercase: bool, num_samples: int
) -> list[JsonObject]:
    """Return the intervals of a run's scores, and the significance of the difference to a comparable first run."""
    systems = {"this": evaluation.translations}
    if first is not None:
        one, other = ((run.references, run.scores.bleu_signature) for run in (first, evaluation))
        systems = {"first": first.translations, **systems} if one == other else systems
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
        *(f"    {one['bleu']:6.2f}  {one['name']}  ({one['signature']})" for one in result.get("variants", ())),
        f"chrF {result['chrf']:.2f}{_interval(resampled.get('chrF2'))}  ({result['chrf_signature']})",
        f"loss {loss:.4f}, perplexity {perplexity:.3f} per token",
        f"{result['num_sentences']} sentences, {result['sentences_per_second']:.1f} sentences/s, "
        f"{result['tokens_per_second']:.0f} tokens/s",
        f"exact match {result['exact_match']:.2f} %",
    ]


def difference_lines(result: JsonObject, first: JsonObject) -> list[str]:
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


def _interval(resampled: JsonObject | None) -> str:
    return f" (95 %: {resampled['mean']:.2f} \u00b1 {resampled['interval']:.2f})" if resampled else ""


def sweep(
    run: str | Path,
    settings: Sequence[str],
    pairs: Pairs | None = None,
    split: str = "valid",
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    ensemble: Sequence[str | Path] = (),
    **decoding: object,
) -> Iterator[JsonObject]:
    """Score a run with each combination of decoding settings, as the paper chose beam size and alpha (section 6.1).

    Each of the `settings` is `FIELD=VALUE,VALUE...`; the last field changes fastest. The other arguments are those of
    `evaluate_runs`.
    """
    grid = parse_grid(settings)
    combinations: list[JsonObject] = [dict(zip(grid, row, strict=True)) for row in itertools.product(*grid.values())]
    for setting in combinations:
        DecodingConfig(**setting)  # raises before the work starts
    names = {"run": str(run)} | ({"ensemble": [{"run": str(member)} for member in ensemble]} if ensemble else {})
    translator, chosen = _load(run, pairs, split, ensemble, decoding | combinations[0])
    for setting in combinations:
        checkpoint = translator.config.decoding.checkpoint
        if setting.get("checkpoint", checkpoint) != checkpoint:  # nothing else needs other files
            translator = Translator.load(run, ensemble=ensemble, **(decoding | setting))
        translator = translator.with_decoding(**setting)
        translations = translator.translate(list(chosen.source), shared=True)
        check_complete(translations, chosen)
        references = reference_texts(chosen, translator.tokenizers)
        scores = score_corpus(translations, references, tokenize or tokenization_of(translator.config), lowercase)
        yield {**names, "split": chosen.origin, "setting": setting, **dataclasses.asdict(scores)}


def parse_grid(items: Sequence[str]) -> dict[str, list[int | float | str]]:
    """Return fields of `DecodingConfig` and their values from items such as `beam-size=1,4,8`.

    >>> parse_grid(["beam-size=1,4", "alpha=0,0.6"])
    {'beam_size': [1, 4], 'alpha': [0.0, 0.6]}
    """
    defaults = {field.name: field.default for field in dataclasses.fields(DecodingConfig)}
    grid: dict[str, list[int | float | str]] = {}
    for item in items:
        name, equals, values = item.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not equals or name not in defaults or name in grid:
            raise UserError(f"sweep has {item!r}; it must be FIELD=VALUE,VALUE..., each once, of {', '.join(defaults)}")
        default = defaults[name]
        if not isinstance(default, int | float | str) or isinstance(default, bool):
            raise UserError(f"sweep has {item!r}; {name} is neither a number nor a word, and cannot be swept")
        try:
            grid[name] = [type(default)(value) for value in values.split(",")]
        except ValueError:
            raise UserError(f"sweep has {item!r}; every value must be like {default!r}") from None
    return grid


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
