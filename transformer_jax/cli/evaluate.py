"""The commands that score runs and choose parameters: evaluate, score, average."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from transformer_jax.cli.parsing import CheckpointFlag, DecodingFlags, Positional, RunFolder, arg, flag_of, given
from transformer_jax.cli.session import processes
from transformer_jax.data.files import read_lines
from transformer_jax.data.pairs import Pairs
from transformer_jax.runtime.distributed import Cluster, is_main_process
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import JsonObject, to_json


@dataclass(frozen=True)
class Evaluate:
    """Score runs: BLEU and chrF in several variants, exact match, loss, perplexity, speed, and differences."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...")]
    """Folders of the runs."""
    decoding: Annotated[DecodingFlags, arg(name="")] = field(default_factory=DecodingFlags)
    source: Path | None = None
    """Text file to translate instead of a split of the run's corpus."""
    reference: Path | None = None
    """Translations of --source, line by line."""
    split: Literal["test", "valid", "train"] | None = None
    """Split of the run's corpus. None uses test, or valid for a sweep."""
    tokenize: str | None = None
    """sacreBLEU's tokenization of the first BLEU. None uses 13a, or none for a corpus that is already tokenized."""
    lowercase: bool = False
    """Lowercase the text for the first BLEU."""
    language: str | None = None
    """Two-letter code of the language of Moses' tokenizer. None uses data.target_language of the run."""
    output: Path | None = None
    """File for the translations of one run, a line each, detokenized if the corpus is tokenized."""
    ensemble: tuple[Path, ...] = ()
    """More runs, whose token probabilities are averaged with those of RUN."""
    bootstrap: int = 1000
    """Number of bootstrap samples for intervals and for the comparison of each run with the first. 0 disables them."""
    sweep: tuple[str, ...] = ()
    """FIELD=VALUE,VALUE... of decoding settings: print the scores of each combination on the validation split."""
    json: bool = False
    """Print one JSON object per run and line, and nothing else on stdout."""
    cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        require(self.runs, "name a run")
        require((self.source is None) == (self.reference is None), "--source and --reference must be given together")
        is_one = len(self.runs) == 1 and not self.sweep
        require(is_one or self.output is None, "--output is for one run without --sweep")

    def run(self) -> None:
        """Evaluate the runs and print the results."""
        with processes(self.cluster):
            from transformer_jax.evaluation.evaluate import evaluate_runs, sweep

            pairs = None
            if self.source is not None and self.reference is not None:
                pairs = _read_pairs(self.source, self.reference)
            options = given(self.decoding)
            options |= {"tokenize": self.tokenize, "lowercase": self.lowercase, "ensemble": self.ensemble}
            if self.sweep:
                for run in self.runs:
                    self._print_sweep(sweep(run, self.sweep, pairs, self.split or "valid", **options))
                return
            options |= {"num_samples": self.bootstrap, "language": self.language, "output": self.output}
            self._print(evaluate_runs(self.runs, pairs, self.split or "test", **options))

    def _print(self, results: Iterable[JsonObject]) -> None:
        from transformer_jax.evaluation.evaluate import difference_lines, result_lines

        first = None
        for result in text_results(results, self.json):
            members = (result, *result.get("ensemble", ()))
            print(" + ".join(f"{member['run']}, checkpoint {member['checkpoint']}" for member in members))
            print(*result_lines(result), sep="\n")
            if first is not None and self.bootstrap:
                print(*difference_lines(result, first), sep="\n")
            first = first or result

    def _print_sweep(self, results: Iterable[JsonObject]) -> None:
        best: JsonObject = {}
        for result in text_results(results, self.json):
            if not best:
                runs = " + ".join(member["run"] for member in (result, *result.get("ensemble", ())))
                print(f"{runs}, {result['split']}  ({result['bleu_signature']})")
            setting = _flags(result["setting"])
            print(f"BLEU {result['bleu']:6.2f}  chrF {result['chrf']:6.2f}  {setting}", flush=True)
            if not best or result["bleu"] > best["bleu"]:
                best = result
        if best:
            print(f"best: {_flags(best['setting'])}")


@dataclass(frozen=True)
class Score:
    """Print the log-probability that a run assigns to each translation of a file."""

    run_folder: RunFolder
    source: Path
    """Text file of sentences."""
    target: Path
    """Translations of --source, line by line."""
    format: Literal["text", "jsonl"] = "text"
    """Format of a line. text: score, log-probability in nats and number of tokens (EOS included), separated by tabs.
    jsonl: a JSON object."""
    parameters: Annotated[CheckpointFlag, arg(name="")] = field(default_factory=CheckpointFlag)
    ensemble: tuple[Path, ...] = ()
    """More runs, whose token probabilities are averaged with those of RUN."""

    def run(self) -> None:
        """Score the pairs and print one line per pair."""
        from transformer_jax.decoding.translator import Translator
        from transformer_jax.evaluation.scoring import score_pairs

        translator = Translator.load(self.run_folder, ensemble=self.ensemble, **given(self.parameters))
        scores = score_pairs(translator, _read_pairs(self.source, self.target))
        for score in text_results((score._asdict() for score in scores), self.format == "jsonl"):
            print(f"{score['score']:.4f}\t{score['log_prob']:.4f}\t{score['num_tokens']}")


@dataclass(frozen=True)
class Average:
    """Average the parameters of checkpoints (paper section 6.1), for --checkpoint average."""

    run_folder: RunFolder
    last: int | None = None
    """Number of last checkpoints. None uses 5 if no other flag selects checkpoints."""
    minutes: float | None = None
    """Minutes before the last checkpoint in which the averaged ones were written. The paper wrote one every 10."""
    steps: tuple[int, ...] = ()
    """Steps of the checkpoints."""

    def __post_init__(self) -> None:
        number = sum((self.last is not None, self.minutes is not None, bool(self.steps)))
        require(number <= 1, "--last, --minutes and --steps exclude each other")

    def run(self) -> None:
        """Average the checkpoints and print their steps."""
        from transformer_jax.checkpoint.run_dir import RunDir
        from transformer_jax.evaluation.evaluate import average

        last = 5 if self.minutes is None and not self.steps and self.last is None else self.last
        steps = average(self.run_folder, last, minutes=self.minutes, steps=self.steps)
        print(f"{RunDir(self.run_folder).average}: the average of the steps {', '.join(map(str, steps))}")


def text_results(results: Iterable[JsonObject], as_json: bool) -> Iterator[JsonObject]:
    """Yield the results for process 0 to print as text. With `as_json`, print each as a JSON object, and yield none."""
    for result in results:  # every process computes them
        if not is_main_process():
            continue
        if as_json:
            print(to_json(result), flush=True)
        else:
            yield result


def _flags(setting: Mapping[str, object]) -> str:
    return " ".join(f"{flag_of(name)} {value}" for name, value in setting.items())


def _read_pairs(source: Path, target: Path) -> Pairs:
    return Pairs(read_lines(source), read_lines(target), f"{source} and {target}")
