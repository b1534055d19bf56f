"""What the commands that score runs and choose among checkpoints do, as functions: `evaluate`, `average`."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.checkpoint.averaging import average_checkpoints, choose_steps
from transformer_jax.checkpoint.run_dir import RunDir, locked
from transformer_jax.config import Config
from transformer_jax.data.corpus import read_split
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import Moses, bleu_variants, tokenization_of
from transformer_jax.evaluation.report import compared, result_of
from transformer_jax.evaluation.sweep import parse_grid
from transformer_jax.evaluation.sweep import sweep as try_settings
from transformer_jax.evaluation.validation import Report, check_complete, check_direction, evaluate_pairs
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.distributed import is_main_process
from transformer_jax.runtime.files import write_atomically
from transformer_jax.types import UserError


def evaluate(run: str | Path, pairs: Pairs | None = None, split: str = "test", **options: Any) -> dict[str, Any]:
    """Scores one run: the result that `evaluate_runs` gives for it, under the same options."""
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
    """Scores runs on given pairs, or on a split of their own corpora.

    Keyword arguments after `output` replace fields of the runs' `decoding` sections.

    Args:
        runs: their folders.
        pairs: sources and references; None: the split.
        split: of each run's corpus.
        tokenize: sacreBLEU's tokenization of the main figure; None: as `tokenization_of` says.
        lowercase: the main figure without case.
        num_samples: of the bootstrap; 0: no intervals.
        ensemble: more runs, which each of `runs` is scored together with.
        language: whose rules Moses' tokens follow, as a two-letter code; None: `data.target_language` of each run.
        output: a file for the translations, a line each, detokenized where the corpus is tokenized; of several runs
            those of the last.

    Yields:
        A result for each run; where it was scored on the same references and tokens as the first, with the significance
        of the difference.

    Raises:
        UserError: no such run, checkpoint or split, or the output cannot be written.
    """
    if output is not None and not Path(output).parent.is_dir():  # before the work
        raise UserError(f"{output}: cannot be written: there is no folder {Path(output).parent}")
    first: Report | None = None
    for run in runs:
        translator = Translator.load(run, ensemble=ensemble, **decoding)
        config = translator.config
        if pairs is not None:
            check_direction(translator, pairs)
        given = pairs or split_of(config, split, run)
        kind = tokenize or tokenization_of(config)
        report = evaluate_pairs(translator, given, tokenize=kind, lowercase=lowercase)
        check_complete(report.translations, given)
        result = {"run": str(run), "checkpoint": config.decoding.checkpoint, **result_of(report)}
        if ensemble:
            others = zip(ensemble, translator.members[1:], strict=True)
            result["ensemble"] = [{"run": str(other), "checkpoint": member.checkpoint} for other, member in others]
        if is_main_process():
            is_tokenized, spoken = config.tokenizer.kind == "pretokenized", language or config.data.target_language
            sides = report.translations, report.references
            variants = bleu_variants(*sides, language=spoken, is_tokenized=is_tokenized)
            result["variants"] = [dataclasses.asdict(variant) for variant in variants]
            result["resampled"] = compared(report, first, kind, lowercase, num_samples) if num_samples else []
            if output is not None:
                lines = Moses(spoken).detokenize(sides[0]) if is_tokenized else sides[0]
                write_atomically(Path(output), "".join(line + "\n" for line in lines))
        first = first or report
        yield result


def sweep(
    run: str | Path, settings: Sequence[str], pairs: Pairs | None = None, split: str = "valid", **options: Any
) -> Iterator[dict[str, Any]]:
    """Scores a run under each combination of decoding settings, each `FIELD=VALUE,VALUE...`; the rest as `evaluate`.

    Raises:
        UserError: no such run, split, field or value.
    """
    grid = parse_grid(settings)
    is_given = pairs is not None
    pairs = pairs or split_of(RunDir(Path(run)).load_config(), split, run)
    runs: dict[str, Any] = {"run": str(run)}
    if options.get("ensemble"):
        runs["ensemble"] = [{"run": str(other)} for other in options["ensemble"]]
    for setting, scores in try_settings(run, pairs, grid, is_given=is_given, **options):
        yield {**runs, "split": pairs.origin, "setting": setting, **dataclasses.asdict(scores)}


def split_of(config: Config, split: str, run: str | Path) -> Pairs:
    """A split of a run's corpus.

    Raises:
        UserError: there is no such split.
    """
    if split not in ("train", "valid", "test"):
        raise UserError(f"split is {split!r}; legal: train, valid, test")
    pairs = read_split(config.data, split)  # type: ignore[arg-type]
    if pairs is None:
        raise UserError(f"{run}: data.{split} is empty in its configuration; give --source and --reference")
    return pairs


def average(
    run: str | Path, last: int | None = None, *, minutes: float | None = None, steps: Sequence[int] = ()
) -> list[int]:
    """Averages checkpoints of a run into its `average/`, which `--checkpoint average` then means.

    Args:
        run: its folder.
        last: so many of the last ones.
        minutes: those written in so many minutes before the last one, and the last one.
        steps: those of these steps.

    Returns:
        Their steps.

    Raises:
        UserError: there are no such checkpoints.
    """
    folder = RunDir(Path(run))
    config = folder.load_config()
    with locked(folder) as can_write:
        if not can_write:
            raise UserError(f"{folder.average}: cannot be written: the run is read-only")
        chosen = steps or choose_steps(folder, last=last, minutes=minutes)
        return average_checkpoints(folder, abstract_params(config.model), chosen)
