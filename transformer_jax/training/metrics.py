"""Metrics files, progress output and profiler traces of a training run."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import jax
from tqdm import tqdm

from transformer_jax.checkpoint.run_dir import RunDir, truncate_after
from transformer_jax.runtime.files import to_json
from transformer_jax.types import UserError

SECONDS_BETWEEN_LINES = 10.0  # on a stream that is no terminal


class MetricsWriter:
    """Appends to `metrics.jsonl` and `samples.jsonl`, and writes the same numbers for TensorBoard.

    Opened at the step a run goes on from, it drops the rows after that step: each logged step is there once. One that
    is not `enabled`, as in all processes but the first, does nothing.
    """

    def __init__(self, run: RunDir, step: int, enabled: bool = True) -> None:
        self._enabled = enabled
        if not enabled:
            return
        for path in (run.metrics, run.samples):
            truncate_after(path, step)
        self._metrics = run.metrics.open("a", encoding="utf-8")
        self._samples = run.samples.open("a", encoding="utf-8")
        self._board = _Board(run.tensorboard, step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One row of numbers.

        Raises:
            UserError: the disk is full, say.
        """
        if not self._enabled:
            return
        _append(self._metrics, {"step": step, **values})
        self._board.write(step, values)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """One row for each sample translation; errors as for `write`."""
        for sample in samples if self._enabled else ():
            _append(self._samples, {"step": step, **sample})

    def close(self) -> None:
        """Writes out what is pending."""
        if not self._enabled:
            return
        with ExitStack() as stack:  # each of them, whatever happens to another
            for file in (self._metrics, self._samples, self._board):
                stack.callback(_close, file)


class _Board:
    """TensorBoard's event file, written at once: tensorboardX's own writer has a thread, which a full disk ends and
    which is then waited for without end."""

    def __init__(self, folder: Path, step: int) -> None:
        # Imported here, as it imports torch where there is one: seconds that only a training should wait.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        self.name = str(folder)
        with _failures_named(self.name):
            folder.mkdir(exist_ok=True)
            self._file = EventsWriter(str(folder / "events"))
            # What stands in earlier files for later steps is hidden.
            for event in (
                Event(step=step + 1, file_version="brain.Event:2"),
                Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)),
            ):
                self._file.write_event(event)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with _failures_named(self.name):
            for name, value in values.items():
                summary = self._scalar(name, value)
                self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _append(file: TextIO, row: Mapping[str, Any]) -> None:
    with _failures_named(file.name):
        file.write(to_json(row) + "\n")
        file.flush()


def _close(file: TextIO | _Board) -> None:
    with _failures_named(file.name):
        file.close()


@contextmanager
def _failures_named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}. Make room, and the same command goes on from the last checkpoint"
        ) from error


class Progress:
    """Steps done, loss, tokens per second, learning rate and time left, on stderr.

    A bar on a terminal; elsewhere a line every ten seconds. Nothing if it is not `enabled`.
    """

    def __init__(self, step: int, num_steps: int, enabled: bool = True) -> None:
        self._enabled, self._is_terminal = enabled, enabled and sys.stderr.isatty()
        self._bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True, disable=not self._is_terminal)
        self._start = (time.monotonic(), step)
        self._last_line = 0.0
        self._step, self._num_steps = step, num_steps

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def restart(self) -> None:
        """The steps begin now: what was before does not count for the time left."""
        self._start = (time.monotonic(), self._step)
        self._bar.unpause()

    def advance(self) -> None:
        """One more step is done."""
        self._step += 1
        self._bar.update()

    def show(self, loss: float, tokens_per_second: float, learning_rate: float) -> None:
        """The figures of the step just logged."""
        figures = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, learning rate {learning_rate:.2e}"
        self._bar.set_postfix_str(figures)
        now = time.monotonic()
        if not self._enabled:
            return
        if not self._is_terminal and (now - self._last_line >= SECONDS_BETWEEN_LINES or self._step == self._num_steps):
            self._last_line = now
            done = self._step - self._start[1]
            left = (now - self._start[0]) / max(done, 1) * (self._num_steps - self._step)
            print(
                f"step {self._step}/{self._num_steps}: {figures}, {tqdm.format_interval(left)} left",
                file=sys.stderr,
                flush=True,
            )

    def say(self, message: str) -> None:
        """A line of its own, above the bar."""
        if self._is_terminal:
            self._bar.write(message, file=sys.stderr)
        elif self._enabled:
            print(message, file=sys.stderr, flush=True)


FIRST, LAST = 3, 7  # steps of this call of `fit` that are traced: the first ones are not typical


class Profile:
    """Traces some steps into a folder. Closing it ends a trace that is still open.

    Args:
        folder: where to; None: nothing is traced.
        first_step: the first step of this call of `fit`.
        say: called with a line for the user when the trace is written.
    """

    def __init__(self, folder: Path | None, first_step: int, say: Callable[[str], None]) -> None:
        self._folder, self._first_step, self._say = folder, first_step, say
        self._is_open = False

    def before(self, step: int) -> None:
        """Called before a step is started."""
        if self._folder and step == self._first_step + FIRST - 1:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._is_open = True

    def after(self, step: int, result: object) -> None:
        """Called with what a step gave."""
        if self._is_open and step == self._first_step + LAST - 1:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Writes the trace."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
            self._say(
                f"trace of some steps in {self._folder}: tensorboard --logdir {self._folder}, or open its "
                "perfetto_trace.json.gz at ui.perfetto.dev"
            )
