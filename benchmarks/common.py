"""Run sides in alternation, and write one JSON line for each measurement."""

import argparse
import contextlib
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "optax", "torch", "transformers", "ctranslate2")


class SideError(RuntimeError):
    """Reports that a side's process ended or timed out, with its last output."""


class Side:
    """A process that answers commands (see `child.py`).

    Args:
        target: MODULE:FUNCTION, what the process runs.
        spec: what the function gets. `malloc`: tune the allocator first. `device`: cpu or gpu.
        timeout: seconds until it must be ready, and again for each answer.

    It starts at once; whoever asks for `info`, or for anything, waits until it is ready. So sides get ready together.
    """

    def __init__(self, target: str, spec: Mapping[str, Any], timeout: float = 900) -> None:
        self.name, self._timeout = target, timeout
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.child", target, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=ROOT,
            env=child_environment(spec.get("device", "cpu")),
        )
        self._info: dict[str, Any] | None = None

    @property
    def info(self) -> dict[str, Any]:
        """Return the description of the side.

        Raises:
            SideError: it does not become ready.
        """
        if self._info is None:
            self._info = self._answer()
        return self._info

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and return its answer.

        Raises:
            SideError: there is none.
        """
        assert self.info is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise SideError(f"{self.name} has ended: {self._last_words()}") from error
        return self._answer()

    def close(self) -> None:
        """Stop the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], self._timeout)[0]:
            self._process.kill()
            raise SideError(f"{self.name} did not answer in {self._timeout:g} s: {self._last_words()}")
        line = stdout.readline()
        if not line:
            raise SideError(f"{self.name} has ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise SideError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-400:].strip().replace("\n", " | ")

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def child_environment(device: str) -> dict[str, str]:
    """The environment of a side: this checkout first on the path, one device and its memory not taken in advance."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        return environment | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("JAX_PLATFORMS", None)
    return environment | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the peer needs memory too


def take_turns(sides: Mapping[str, Side], rounds: int, turn_seconds: float, **command: Any) -> dict[str, list[float]]:
    """Measure the sides in alternation (A B A B), `rounds` times each, while the others wait.

    Each side first takes a turn that does not count: it warms up, and says how many units of work fill `turn_seconds`.

    Returns:
        The sides' answers `seconds`, of a unit of work (a step, a call) unless the side says otherwise with
        `unit_seconds`; for each side one figure a round.
    """
    units = {}
    for name, side in sides.items():
        answer = side.ask(**command, units=1)
        seconds = answer.get("unit_seconds", answer["seconds"])
        units[name] = max(1, round(turn_seconds / max(seconds, 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            found[name].append(side.ask(**command, units=units[name])["seconds"])
    return found


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the range and the quartiles.

    >>> summary([1.0, 3.0, 2.0])
    {'median': 2.0, 'min': 1.0, 'q1': 1.5, 'q3': 2.5, 'max': 3.0}
    """
    if len(values) > 1:
        q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive")
    else:
        q1 = q3 = values[0]
    figures = {"median": statistics.median(values), "min": min(values), "q1": q1, "q3": q3, "max": max(values)}
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def comparison(ours: Sequence[float], peer: Sequence[float]) -> dict[str, Any]:
    """The ratio peer / ours of each pair of turns (above 1: ours is faster), and the seconds of both."""
    ratios = [theirs / own for own, theirs in zip(ours, peer, strict=True)]
    return {"ratio": summary(ratios), "seconds": {"ours": summary(ours), "peer": summary(peer)}, "rounds": len(ratios)}


class Output:
    """Prints measurements as JSON lines, and appends them to a file if one is set."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, benchmark: str, name: str, figures: Mapping[str, Any]) -> None:
        """Write one line. `benchmark` and `name` together identify the measurement."""
        line = json.dumps({"benchmark": benchmark, "name": name, **figures, **environment()})
        print(line, flush=True)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def skip(self, benchmark: str, name: str, reason: object) -> None:
        """Write the reason why a measurement failed."""
        self.write(benchmark, name, {"skipped": str(reason)})


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """Add the flags that all benchmarks share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    made.add_argument("--rounds", type=int, default=rounds, help="turns of each side (default %(default)s)")
    made.add_argument("--turn-seconds", type=float, default=2.0, help="length of a turn (default %(default)s)")
    made.add_argument("--output", type=Path, help="a file that the JSON lines are appended to")
    made.add_argument("--no-malloc-tuning", action="store_true", help="glibc's default allocator, on all sides")
    return made


def comma_list(text: str) -> list[str]:
    """`a,b` as ["a", "b"], for flags."""
    return [item for item in text.split(",") if item]


def environment() -> dict[str, Any]:
    """Describe the machine and the versions of a measurement."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "versions": versions,
        "threads": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        fields = dict(_fields(file))
        return f"{fields.get('model name', 'unknown')} (family {fields.get('cpu family')}, model {fields.get('model')})"
    return platform.processor() or "unknown"


def _fields(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if not line.strip():
            return  # the first core stands for all
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def _commit() -> str | None:
    """Return the commit of this checkout, followed by + if files differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results", ":!docs"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")
