"""The parser of `translate`: lines in, lines out, or a conversation."""

import codecs
import contextlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from transformer_jax.cli.parsing import MISSING, Positional, arg, parse
from transformer_jax.cli.runs import decoding_of, given_fields, join_processes
from transformer_jax.config import DecodingConfig
from transformer_jax.distributed import Cluster, from_first, is_first
from transformer_jax.strict_json import to_json

if TYPE_CHECKING:
    from transformer_jax.decoding.translator import Hypothesis

SECONDS_BETWEEN_REPORTS = 10.0


def translate(args: list[str]) -> None:
    """`transformer-jax translate`."""

    @dataclass(frozen=True)
    class Translate:
        run: Positional[Path]
        """The run's folder."""
        n_best: int = 1
        """So many translations of each line, at most the beam; as text they are written `LINE ||| TEXT ||| SCORE`."""
        format: Literal["text", "jsonl"] = "text"
        """jsonl: an object for each line, with its translations, their scores and log-probabilities."""
        decoding: Annotated[DecodingConfig, arg(name="")] = field(default_factory=DecodingConfig)
        explain: bool = False
        """In place of translations, tell step by step how they are found; for a few lines."""
        cluster: Annotated[Cluster, arg(name="")] = field(default_factory=Cluster)

    parsed = parse(
        Translate,
        "translate",
        args,
        default=Translate(MISSING, decoding=decoding_of(args)),
        description="Reads lines on stdin and writes one translation for each on stdout. On a terminal each line is "
        "answered at once. Defaults are the run's own.",
    )
    with_others = join_processes(parsed.cluster)
    from transformer_jax.decoding.translator import Translator

    translator = Translator.load(parsed.run, **given_fields(parsed.decoding, args))
    if parsed.explain:
        from transformer_jax.decoding.explain import explain

        told = explain(translator, _stdin_lines()) if is_first() else []
        sys.stdout.buffer.write("\n".join(f"{one}\n" for one in told).encode("utf-8", "replace"))
        return
    if not with_others and sys.stdin.isatty():
        for number, line in enumerate(_conversation()):
            _write(number, line, translator.translate_n_best([line], parsed.n_best)[0], parsed.n_best, parsed.format)
            sys.stdout.buffer.flush()
        return
    lines = from_first(_stdin_lines() if is_first() else None) if with_others else _stdin_lines()
    progress = _Progress(len(lines), enabled=is_first() and not with_others)
    found = translator.translate_n_best(lines, parsed.n_best, shared=with_others, progress=progress)
    for number, (line, hypotheses) in enumerate(zip(lines, found, strict=True)) if is_first() else ():
        _write(number, line, hypotheses, parsed.n_best, parsed.format)
    sys.stdout.buffer.flush()


def _write(number: int, line: str, found: "Sequence[Hypothesis]", n_best: int, form: str) -> None:
    """The translations of one line, on stdout."""
    if form == "jsonl":
        names = ("text", "score", "log_prob", "num_tokens")
        translations = [{name: getattr(one, name) for name in names} for one in found]
        rows = [to_json({"line": number, "source": line, "translations": translations})]
    elif n_best == 1:
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
    while True:
        try:
            yield input("> ").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
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
