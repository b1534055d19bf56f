"""The parser of `translate`: lines in, lines out, or a conversation."""

import codecs
import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from transformer_jax.cli.parsing import MISSING, Positional, arg, parse, usage_error
from transformer_jax.cli.runs import decoding_of, given_fields, given_names, join_processes
from transformer_jax.config import DecodingConfig, Sampling
from transformer_jax.runtime.distributed import Cluster, broadcast_from_main, is_main_process
from transformer_jax.runtime.files import to_json

if TYPE_CHECKING:
    from transformer_jax.decoding.alignment import Alignment
    from transformer_jax.decoding.translator import Hypothesis, Translator

SECONDS_BETWEEN_REPORTS = 10.0


def translate(args: list[str]) -> None:
    """`transformer-jax translate`."""

    @dataclass(frozen=True)
    class Translate:
        run: Positional[Path]
        """The run's folder."""
        n_best: int = 1
        """So many translations of each line, at most the beam, or so many draws; as text they are written
        `LINE ||| TEXT ||| SCORE`."""
        format: Literal["text", "jsonl"] = "text"
        """jsonl: an object for each line, with its translations, their scores and log-probabilities."""
        alignment: bool = False
        """In JSON lines: the tokens too, and which of the source each of a translation comes from, by
        cross-attention."""
        prefix: str | None = None
        """What every translation begins with, as far as the vocabulary knows it."""
        prefixes: Path | None = None
        """A file with what each line's translation begins with; an empty line leaves it free."""
        ensemble: tuple[Path, ...] = ()
        """More runs with the same tokenizers, to translate together: the mean of their probabilities."""
        decoding: Annotated[DecodingConfig, arg(name="")] = field(default_factory=DecodingConfig)
        sample: bool = False
        """Draw each token at random, rather than search for the most probable; `n_best` draws of each line."""
        sampling: Annotated[Sampling, arg(name="")] = field(default_factory=Sampling)
        seed: int = 0
        """Of the draws: the same seed draws the same for the same line at the same place."""
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    parsed = parse(
        Translate,
        "translate",
        args,
        default=Translate(MISSING, decoding=decoding_of(args)),
        description="Reads lines on stdin and writes one translation for each on stdout. On a terminal each line is "
        "answered at once. Defaults are the run's own.",
    )
    _check_usage(parsed, args)
    with_others = join_processes(parsed.cluster)
    from transformer_jax.data.files import read_lines
    from transformer_jax.decoding.translator import Translator

    if parsed.prefixes is not None and not with_others and sys.stdin.isatty():
        usage_error("translate", "--prefixes needs the lines on stdin; in a conversation --prefix is the same for all")
    given = None if parsed.prefixes is None else read_lines(parsed.prefixes)
    translator = Translator.load(parsed.run, ensemble=parsed.ensemble, **given_fields(parsed.decoding, args))

    def prefixes(count: int) -> Sequence[str] | None:
        return given if parsed.prefix is None else [parsed.prefix] * count

    options: dict[str, Any] = {"sampling": parsed.sampling if parsed.sample else None}
    if not with_others and sys.stdin.isatty():
        for number, line in enumerate(_conversation()):
            options |= {"prefixes": prefixes(1), "seed": parsed.seed, "first_line": number}
            found = translator.translate_n_best([line], parsed.n_best, **options)
            _write(number, line, found[0], _alignments(translator, [line], found, parsed.alignment)[0], parsed)
            sys.stdout.buffer.flush()
        return
    lines = broadcast_from_main(_stdin_lines() if is_main_process() else None) if with_others else _stdin_lines()
    progress = _Progress(len(lines), enabled=is_main_process() and not with_others)
    options |= {"prefixes": prefixes(len(lines)), "seed": parsed.seed, "shared": with_others, "progress": progress}
    found = translator.translate_n_best(lines, parsed.n_best, **options)
    if is_main_process():
        aligned = _alignments(translator, lines, found, parsed.alignment)
        for number, (line, hypotheses, alignments) in enumerate(zip(lines, found, aligned, strict=True)):
            _write(number, line, hypotheses, alignments, parsed)
    sys.stdout.buffer.flush()


def _check_usage(parsed: Any, args: Sequence[str]) -> None:
    """Flags that mean nothing together are refused, rather than ignored."""
    drawing = ("temperature", "top_k", "top_p", "seed")
    searching = ("beam_size", "alpha", "length_penalty", "stopping")
    given = given_names(args)
    for name in searching if parsed.sample else drawing:
        if name in given:
            needed = "is for a search; with --sample there is none" if parsed.sample else "goes with --sample"
            usage_error("translate", f"--{name.replace('_', '-')} {needed}")
    if parsed.alignment and parsed.format != "jsonl":
        usage_error("translate", "--alignment goes with --format jsonl")
    if parsed.prefix is not None and parsed.prefixes is not None:
        usage_error("translate", "--prefix and --prefixes exclude each other")


def _alignments(
    translator: "Translator", lines: Sequence[str], found: "Sequence[Sequence[Hypothesis]]", wanted: bool
) -> "list[list[Alignment]]":
    """Of each translation of each line; none if they are not wanted."""
    if not wanted:
        return [[] for _ in lines]
    from transformer_jax.decoding.alignment import align

    return align(translator, lines, found)


def _write(
    number: int, line: str, found: "Sequence[Hypothesis]", alignments: "Sequence[Alignment]", parsed: Any
) -> None:
    """The translations of one line, on stdout."""
    if parsed.format == "jsonl":
        names = ("text", "score", "log_prob", "num_tokens")
        translations = [{name: getattr(one, name) for name in names} for one in found]
        told: dict[str, Any] = {"line": number, "source": line}
        if alignments:
            told["source_tokens"] = alignments[0].source_tokens
            for translation, alignment in zip(translations, alignments, strict=True):
                translation |= {"tokens": alignment.target_tokens, "alignment": alignment.pairs}
        rows = [to_json(told | {"translations": translations})]
    elif parsed.n_best == 1:
        rows = [found[0].text]
    else:
        rows = [f"{number} ||| {one.text} ||| {one.score:.4f}" for one in found]
    for row in rows:
        sys.stdout.buffer.write(row.encode("utf-8", "replace") + b"\n")


def _conversation() -> Iterator[str]:
    """Lines as they are typed, with a history behind the arrow keys."""
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
    """Lines done, their rate and the time left, on stderr, every ten seconds; nothing for what takes less."""

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
        print(f"{self._done:,} of {self._total:,} lines, {figures}", file=sys.stderr, flush=True)


def _stdin_lines() -> list[str]:
    """Lines end at `\\n` alone. A `\\r` before it and a byte-order mark are dropped; what is not UTF-8: U+FFFD."""
    data = sys.stdin.buffer.read()
    lines = data.removeprefix(codecs.BOM_UTF8).split(b"\n")
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
