"""The command `translate`: a line out for each line in, or a conversation."""

import codecs
import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from transformer_jax.cli.parsing import DecodingFlags, Positional, SamplingFlags, arg, flag_of, given, usage_error
from transformer_jax.cli.session import processes
from transformer_jax.config import Sampling
from transformer_jax.runtime.distributed import Cluster, is_main_process, on_main_process
from transformer_jax.runtime.files import to_json
from transformer_jax.types import UserError

if TYPE_CHECKING:
    from transformer_jax.decoding.alignment import Alignment
    from transformer_jax.decoding.translator import Hypothesis, Translator

SECONDS_BETWEEN_REPORTS = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Translate:
    """Read lines from stdin and write a translation of each to stdout. On a terminal, answer each line at once."""

    run_folder: Annotated[Positional[Path], arg(metavar="RUN")]
    """Folder of the run."""
    n_best: int = 1
    """Number of translations per line: at most the beam size, or the number of samples. As text they are written as
    `LINE ||| TEXT ||| SCORE`."""
    format: Literal["text", "jsonl"] = "text"
    """Output format. jsonl: an object per line with its translations, their scores and log-probabilities."""
    alignment: bool = False
    """With --format jsonl: add the tokens, and the source token that each target token comes from, by
    cross-attention."""
    prefix: str | None = None
    """Text that every translation starts with."""
    prefixes: Path | None = None
    """File with the text that each translation starts with, a line per line of stdin. Empty lines leave it free."""
    ensemble: tuple[Path, ...] = ()
    """More runs with equal tokenizers, whose token probabilities are averaged with those of RUN."""
    decoding: Annotated[DecodingFlags, arg(name="")] = field(default_factory=DecodingFlags)
    sample: bool = False
    """Sample each token at random instead of searching for the most probable translation."""
    sampling: Annotated[SamplingFlags, arg(name="")] = field(default_factory=SamplingFlags)
    seed: int | None = None
    """Seed of --sample. A seed gives equal samples for equal lines at equal places. None takes 0."""
    cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        """Reject flags that have no effect together."""
        for_sampling = [*given(self.sampling), *(["seed"] if self.seed is not None else [])]
        search_only = ("beam_size", "alpha", "length_penalty", "stopping")
        for_search = [name for name in given(self.decoding) if name in search_only]
        if for_sampling and not self.sample:
            raise UserError(f"{flag_of(for_sampling[0])} needs --sample")
        if for_search and self.sample:
            raise UserError(f"{flag_of(for_search[0])} configures the search, and --sample does not search")
        if self.alignment and self.format != "jsonl":
            raise UserError("--alignment needs --format jsonl")
        if self.prefix is not None and self.prefixes is not None:
            raise UserError("--prefix and --prefixes exclude each other")

    def run(self) -> None:
        """Translate."""
        with processes(self.cluster) as shared:
            if sys.stdin is None and is_main_process():
                raise UserError("standard input is closed. translate reads sentences from it, such as with < FILE")
            if sys.stdout is None:
                raise UserError("standard output is closed. translate writes translations to it, such as with > FILE")
            is_typed = not shared and sys.stdin.isatty()
            if self.prefixes is not None and is_typed:
                usage_error("translate", "--prefixes needs lines from a file on stdin; use --prefix in a conversation")
            from transformer_jax.data.files import read_lines
            from transformer_jax.decoding.translator import Translator

            listed = None if self.prefixes is None else read_lines(self.prefixes)
            translator = Translator.load(self.run_folder, ensemble=self.ensemble, **given(self.decoding))
            if is_typed:
                self._converse(translator)
            else:
                self._translate(translator, listed, shared)

    def _converse(self, translator: "Translator") -> None:
        """Answer each line as it is typed."""
        for number, line in enumerate(_typed_lines()):
            options = self._options(1, None) | {"first_line": number}
            found = translator.translate_n_best([line], self.n_best, **options)
            self._write(number, line, found[0], _alignments(translator, [line], found, self.alignment)[0])
            sys.stdout.buffer.flush()

    def _translate(self, translator: "Translator", listed: Sequence[str] | None, shared: bool) -> None:
        """Translate stdin; with `shared`, several processes do it together."""
        lines = on_main_process(lambda: _stdin_lines(sys.stdin.buffer))()
        progress = _Progress(len(lines), enabled=is_main_process() and not shared)
        options = self._options(len(lines), listed) | {"shared": shared, "progress": progress}
        found = translator.translate_n_best(lines, self.n_best, **options)
        if is_main_process():
            aligned = _alignments(translator, lines, found, self.alignment)
            for number, (line, hypotheses, alignments) in enumerate(zip(lines, found, aligned, strict=True)):
                self._write(number, line, hypotheses, alignments)
        sys.stdout.buffer.flush()

    def _options(self, count: int, listed: Sequence[str] | None) -> dict[str, Any]:
        sampling = Sampling(**given(self.sampling)) if self.sample else None
        return {"prefixes": self._prefixes(count, listed), "sampling": sampling, "seed": self.seed or 0}

    def _prefixes(self, count: int, listed: Sequence[str] | None) -> Sequence[str] | None:
        return listed if self.prefix is None else [self.prefix] * count

    def _write(self, number: int, line: str, found: "Sequence[Hypothesis]", alignments: "Sequence[Alignment]") -> None:
        """Write the translations of a line to stdout."""
        if self.format == "jsonl":
            names = ("text", "score", "log_prob", "num_tokens")
            translations = [{name: getattr(hypothesis, name) for name in names} for hypothesis in found]
            row: dict[str, Any] = {"line": number, "source": line}
            if alignments:
                row["source_tokens"] = alignments[0].source_tokens
                for translation, alignment in zip(translations, alignments, strict=True):
                    translation |= {"tokens": alignment.target_tokens, "alignment": alignment.pairs}
            rows = [to_json(row | {"translations": translations})]
        elif self.n_best == 1:
            rows = [found[0].text]
        else:
            rows = [f"{number} ||| {hypothesis.text} ||| {hypothesis.score:.4f}" for hypothesis in found]
        for text in rows:
            sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")


def _alignments(
    translator: "Translator", lines: Sequence[str], found: "Sequence[Sequence[Hypothesis]]", wanted: bool
) -> "list[list[Alignment]]":
    """Return the alignments of each translation of each line; empty lists if they are not wanted."""
    if not wanted:
        return [[] for _ in lines]
    from transformer_jax.decoding.alignment import align

    return align(translator, lines, found)


def _typed_lines() -> Iterator[str]:
    """Yield lines as they are typed, with a history on the arrow keys."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  what `input` edits lines with
    print("Type a line to translate it; Ctrl-D ends.", file=sys.stderr)
    prompt = "> " if sys.stdout.isatty() else ""  # `input` writes it to stdout, which may be a file
    while True:
        try:
            yield input(prompt).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except EOFError:
            print(file=sys.stderr)
            return


class _Progress:
    """Logs the number of lines done, their rate and the time left, at most every ten seconds."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._total, self._enabled, self._done = total, enabled, 0
        self._start = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if not self._enabled or now - self._last < SECONDS_BETWEEN_REPORTS:
            return
        self._last = now
        rate = self._done / (now - self._start)
        figures = f"{rate:,.0f} lines/s, {(self._total - self._done) / rate:,.0f} s left"
        logger.info("%s of %s lines, %s", f"{self._done:,}", f"{self._total:,}", figures)


def _stdin_lines(stdin: BinaryIO) -> list[str]:
    """Read the lines of stdin, which end at a newline alone.

    A carriage return before the newline and a byte-order mark are dropped. Bytes that are not UTF-8 become U+FFFD.
    """
    lines = stdin.read().removeprefix(codecs.BOM_UTF8).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    texts = []
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            warnings.warn(f"line {number} is not UTF-8 at byte {error.start + 1}: read as U+FFFD", stacklevel=2)
            text = line.decode("utf-8", "replace")
        texts.append(text.removesuffix("\r"))
    return texts
