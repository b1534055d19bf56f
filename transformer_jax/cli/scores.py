"""Parsers of the commands that score and choose: evaluate, score, average."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.cli.parsing import MISSING, Positional, arg, parse, usage_error
from transformer_jax.cli.runs import decoding_of, given_fields, join_processes
from transformer_jax.config import DecodingConfig
from transformer_jax.runtime.distributed import Cluster, is_main_process
from transformer_jax.runtime.files import to_json

if TYPE_CHECKING:
    from transformer_jax.data.pairs import Pairs


def evaluate(args: list[str]) -> None:
    """`transformer-jax evaluate`."""

    @dataclass(frozen=True)
    class Evaluate:
        runs: Positional[tuple[Path, ...]]
        """One run's folder or more."""
        decoding: Annotated[DecodingConfig, arg(name="")] = field(default_factory=DecodingConfig)
        source: Path | None = None
        """A text file to translate, in place of a split of the run's corpus."""
        reference: Path | None = None
        """Its translation, line by line."""
        split: Literal["test", "valid", "train"] | None = None
        """Which split of the run's corpus; None: test, and valid for a sweep."""
        tokenize: str | None = None
        """sacreBLEU's tokenization of the first figure; None: 13a, or none where the corpus is tokenized already."""
        lowercase: bool = False
        """The first figure without case."""
        language: str | None = None
        """Two letters, for Moses' tokens; None: data.target_language of the run."""
        output: Path | None = None
        """A file for the translations of one run, a line each, detokenized where the corpus is tokenized."""
        ensemble: tuple[Path, ...] = ()
        """More runs, to score RUN together with: the mean of their probabilities."""
        bootstrap: int = 1000
        """Samples of the sentences for intervals and significance; 0: none."""
        sweep: tuple[str, ...] = ()
        """FIELD=VALUE,VALUE... and more of them, in place of a report: the scores under each combination of these
        decoding settings, on the validation split."""
        json: bool = False
        """One JSON object a run, one a line, and nothing else on stdout."""
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    parsed = parse(
        Evaluate,
        "evaluate",
        args,
        default=Evaluate(MISSING, decoding_of(args)),
        description="The usual variants of BLEU and chrF with sacreBLEU's signatures, exact match, loss, perplexity "
        "and speed. Of several runs all but the first are compared with it, by the paired bootstrap test.",
    )
    if not parsed.runs:
        usage_error("evaluate", "name a run")
    if (parsed.source is None) != (parsed.reference is None):
        usage_error("evaluate", "--source and --reference go together")
    if parsed.output is not None and (len(parsed.runs) > 1 or parsed.sweep):
        usage_error("evaluate", "--output is for one run without --sweep")
    join_processes(parsed.cluster)
    from transformer_jax.evaluation import evaluate as score_commands
    from transformer_jax.evaluation.sweep import sweep

    pairs = None if parsed.source is None else _read_pairs(parsed.source, parsed.reference)
    given = given_fields(parsed.decoding, args)
    options = {"tokenize": parsed.tokenize, "lowercase": parsed.lowercase, "ensemble": parsed.ensemble}
    if parsed.sweep:
        for run in parsed.runs:
            results = sweep(run, parsed.sweep, pairs, parsed.split or "valid", **options, **given)
            _print_sweep(results, parsed.json)
        return
    options |= {"num_samples": parsed.bootstrap, "language": parsed.language, "output": parsed.output}
    results = score_commands.evaluate_runs(parsed.runs, pairs, parsed.split or "test", **options, **given)
    first = None
    for result in results:
        if not is_main_process():
            continue
        if parsed.json:
            print(to_json(result), flush=True)
            continue
        members = (result, *result.get("ensemble", ()))
        print(" + ".join(f"{one['run']}, checkpoint {one['checkpoint']}" for one in members))
        print(*score_commands.result_lines(result), sep="\n")
        if first is not None and parsed.bootstrap:
            print(*score_commands.difference_lines(result, first), sep="\n")
        first = first or result


def _print_sweep(results: Iterable[dict[str, Any]], as_json: bool) -> None:
    best: dict[str, Any] = {}
    for result in results:
        if not is_main_process():
            continue
        if as_json:
            print(to_json(result), flush=True)
            continue
        if not best:
            runs = " + ".join(one["run"] for one in (result, *result.get("ensemble", ())))
            print(f"{runs}, {result['split']}  ({result['bleu_signature']})")
        line = f"BLEU {result['bleu']:6.2f}  chrF {result['chrf']:6.2f}  " + _setting(result["setting"])
        print(line, flush=True)
        if not best or result["bleu"] > best["bleu"]:
            best = result
    if best:
        print(f"best: {_setting(best['setting'])}")


def _setting(setting: dict[str, Any]) -> str:
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in setting.items())


def score(args: list[str]) -> None:
    """`transformer-jax score`."""

    @dataclass(frozen=True)
    class Score:
        run: Positional[Path]
        """The run's folder."""
        source: Path
        """A text file of sentences."""
        target: Path
        """Their translations, line by line."""
        format: Literal["text", "jsonl"] = "text"
        """text: score, log-probability in nats, number of tokens (EOS counted), with tabs. jsonl: an object a line."""
        checkpoint: str | None = None
        """last, best, average or the number of a step; None: as the run says."""
        ensemble: tuple[Path, ...] = ()
        """More runs: the mean of their probabilities."""

    parsed = parse(
        Score, "score", args, default=None, description="How likely a run finds given translations, line by line."
    )
    from transformer_jax.decoding.translator import Translator
    from transformer_jax.evaluation.scoring import score_pairs

    pairs = _read_pairs(parsed.source, parsed.target)
    chosen = {} if parsed.checkpoint is None else {"checkpoint": parsed.checkpoint}
    for one in score_pairs(Translator.load(parsed.run, ensemble=parsed.ensemble, **chosen), pairs):
        plain = f"{one.score:.4f}\t{one.log_prob:.4f}\t{one.num_tokens}"
        print(to_json(one._asdict()) if parsed.format == "jsonl" else plain)


def _read_pairs(source: Path, target: Path) -> "Pairs":
    from transformer_jax.data.files import read_lines
    from transformer_jax.data.pairs import Pairs

    return Pairs(read_lines(source), read_lines(target), f"{source} and {target}")


def average(args: list[str]) -> None:
    """`transformer-jax average`."""

    @dataclass(frozen=True)
    class Average:
        run: Positional[Path]
        """The run's folder."""
        last: int | None = None
        """How many of its last checkpoints; None, and nothing else given: 5."""
        minutes: float | None = None
        """Those of so many minutes before the last one, as the paper's were written every 10."""
        steps: tuple[int, ...] = ()
        """Those of these steps."""

    parsed = parse(
        Average,
        "average",
        args,
        default=None,
        description="Averages parameters of checkpoints (paper section 6.1), for --checkpoint average.",
    )
    if sum((parsed.last is not None, parsed.minutes is not None, bool(parsed.steps))) > 1:
        usage_error("average", "--last, --minutes and --steps exclude each other")
    from transformer_jax.evaluation import evaluate as score_commands

    last = 5 if parsed.minutes is None and not parsed.steps and parsed.last is None else parsed.last
    steps = score_commands.average(parsed.run, last, minutes=parsed.minutes, steps=parsed.steps)
    print(f"{RunDir(parsed.run).average}: the average of the steps {', '.join(map(str, steps))}")
