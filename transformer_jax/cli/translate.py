"""The command `translate`: one line of output for each line of input, or a conversation."""

import codecs
import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

from transformer_jax.cli.parsing import DecodingFlags, RunFolder, SamplingFlags, UsageError, arg, flag_of, given
from transformer_jax.cli.session import processes
from transformer_jax.config import Sampling
from transformer_jax.data.files import read_lines
from transformer_jax.runtime.distributed import Cluster, is_main_process, on_main_process
from transformer_jax.runtime.fields import require
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

    run_folder: RunFolder
    n_best: int = 1
    """Number of translations per line, at most the beam size, or number of samples. Several are written as
    `LINE ||| TEXT ||| SCORE`."""
    format: Literal["text", "jsonl"] = "text"
    """Output format. jsonl: a JSON object per line with its translations, their scores and log-probabilities."""
    alignment: bool = False
    """With --format jsonl: add the tokens, and the source token to which each target token attends most."""
    prefix: str | None = None
    """Text that every translation starts with."""
    prefixes: Path | None = None
    """File with the start of each translation, one line per line of stdin. Empty lines set no start."""
    ensemble: tuple[Path, ...] = ()
    """More runs with equal tokenizers. The token probabilities are averaged with those of RUN."""
    decoding: Annotated[DecodingFlags, arg(name="")] = field(default_factory=DecodingFlags)
    sample: bool = False
    """Sample each token instead of searching for the most probable translation."""
    sampling: Annotated[SamplingFlags, arg(name="")] = field(default_factory=SamplingFlags)
    seed: int | None = None
    """Seed of --sample. Samples depend on the seed, the line and its number. None uses 0."""
    cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    def __post_init__(self) -> None:
        for_sampling = [*given(self.sampling), *(["seed"] if self.seed is not None else [])]
        for_search = given(self.decoding).keys() & {"beam_size", "alpha", "length_penalty", "stopping"}
        if for_sampling and not self.sample:
            raise UserError(f"{flag_of(for_sampling[0])} needs --sample")
        if for_search and self.sample:
            raise UserError(f"{flag_of(min(for_search))} configures the search, and --sample does not search")
        require(self.format == "jsonl" or not self.alignment, "--alignment needs --format jsonl")
        require(self.prefix is None or self.prefixes is None, "--prefix and --prefixes exclude each other")

    def run(self) -> None:
        """Translate."""
        with processes(self.cluster) as shared:
            if sys.stdin is None and is_main_process():
                raise UserError("standard input is closed. translate reads sentences from it, such as with < FILE")
            if sys.stdout is None:
                raise UserError("standard output is closed. translate writes translations to it, such as with > FILE")
            is_typed = not shared and sys.stdin.isatty()
            if self.prefixes is not None and is_typed:
                raise UsageError("--prefixes needs lines from a file on stdin; use --prefix in a conversation")
            from transformer_jax.decoding.translator import Translator

            prefixes = None if self.prefixes is None else read_lines(self.prefixes)
            translator = Translator.load(self.run_folder, ensemble=self.ensemble, **given(self.decoding))
            if is_typed:
                for number, line in enumerate(_typed_lines()):
                    self._translate(translator, [line], first_line=number)
                return
            lines = on_main_process(lambda: _stdin_lines(sys.stdin.buffer))()
            self._translate(translator, lines, prefixes, shared=shared)

    def _translate(
        self,
        translator: "Translator",
        lines: Sequence[str],
        prefixes: Sequence[str] | None = None,
        *,
        first_line: int = 0,
        shared: bool = False,
    ) -> None:
        """Write the translations of lines to stdout. With `shared`, several processes translate them."""
        found = translator.translate_n_best(
            lines,
            self.n_best,
            prefixes=prefixes if self.prefix is None else [self.prefix] * len(lines),
            sampling=Sampling(**given(self.sampling)) if self.sample else None,
            seed=self.seed or 0,
            first_line=first_line,
            shared=shared,
            progress=_Progress(len(lines), enabled=len(lines) > 1 and is_main_process() and not shared),
        )
        if is_main_process():
            aligned: Sequence[Sequence[Alignment]] = [[]] * len(lines)
            if self.alignment:
                from transformer_jax.decoding.alignment import align

                aligned = align(translator, lines, found)
            for number, line in enumerate(zip(lines, found, aligned, strict=True), first_line):
                for text in self._output_lines(number, *line):
                    sys.stdout.buffer.write(text.encode("utf-8", "replace") + b"\n")
        sys.stdout.buffer.flush()

    def _output_lines(
        self, number: int, line: str, found: "Sequence[Hypothesis]", alignments: "Sequence[Alignment]"
    ) -> list[str]:
        """Return the lines of output for one line of input."""
        if self.format == "text":
            if self.n_best == 1:
                return [found[0].text]
            return [f"{number} ||| {hypothesis.text} ||| {hypothesis.score:.4f}" for hypothesis in found]
        row: dict[str, object] = {"line": number, "source": line}
        translations: list[dict[str, object]] = [
            {name: getattr(hypothesis, name) for name in ("text", "score", "log_prob", "num_tokens")}
            for hypothesis in found
        ]
        if alignments:
            row["source_tokens"] = alignments[0].source_tokens
            for translation, alignment in zip(translations, alignments, strict=True):
                translation |= {"tokens": alignment.target_tokens, "alignment": alignment.pairs}
        return [to_json(row | {"translations": translations})]


def _typed_lines() -> Iterator[str]:
    """Yield lines as they are typed, with a history on the arrow keys."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  with it `input` edits lines
    print("Type a line to translate it; Ctrl-D ends.", file=sys.stderr)
    prompt = "> " if sys.stdout.isatty() else ""  # `input` writes it to stdout, which may be a file
    while True:
        try:
            yield input(prompt).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        except EOFError:
            print(file=sys.stderr)
            return


class _Progress:
    """Log the number of translated lines, the rate and the remaining time, at most every ten seconds."""

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
    """Read lines without a byte-order mark and carriage returns before newlines; invalid bytes become U+FFFD."""
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
