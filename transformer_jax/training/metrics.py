"""Metrics of a training run: fetching from the device, writing to files, the progress line; profiler traces."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import jax
from jaxtyping import Array
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from transformer_jax.checkpoint.run_dir import RunDir, truncate_after
from transformer_jax.runtime.distributed import is_main_process, main_process_logger, on_main_process
from transformer_jax.runtime.files import to_json
from transformer_jax.training.step import Metrics
from transformer_jax.types import Batch, UserError

logger = main_process_logger(__name__)

SECONDS_BETWEEN_LINES = 10.0  # between progress lines where stderr is not a terminal
FIRST_TRACED, LAST_TRACED = 3, 7  # steps of a call of `fit`; the first two are not typical


@dataclass(frozen=True)
class Evaluation:
    """Result of a validation: metrics such as `valid_loss`, and samples (`source`, `reference`, `translation`)."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Mapping[str, str]] = ()


class MetricsFetcher:
    """Fetch the metrics of each step one step late, so that the host never waits for the device, and check them."""

    def __init__(self, on_nonfinite: Callable[[int, str, Batch], None]) -> None:
        self._on_nonfinite = on_nonfinite  # called with step, problem and batch
        self._pending: tuple[int, Batch, Metrics, Array] | None = None
        self._last: tuple[Metrics, float] | None = None
        self._tokens = 0
        self._since = time.monotonic()

    def add(self, step: int, batch: Batch, metrics: Metrics, learning_rate: Array) -> None:
        """Store the results of a dispatched step, after checking those of the previous step."""
        self.check()
        self._pending = step, batch, metrics, learning_rate

    def check(self) -> None:
        """Wait for the last dispatched step and check that its results are finite, if not done yet."""
        if self._pending is None:
            return
        step, batch, *results = self._pending
        self._pending, self._last = None, None
        metrics, learning_rate = jax.device_get(results)
        for name, value in (("loss", metrics.loss), ("gradient's norm", metrics.grad_norm)):
            if not math.isfinite(value):
                with self.paused():
                    self._on_nonfinite(step, f"the {name} of step {step} is {float(value)}", batch)
                return
        self._tokens += int(metrics.num_tokens)
        self._last = metrics, float(learning_rate)

    def row(self) -> dict[str, float] | None:
        """Return the metrics of the last added step, or None if the step was skipped because it was not finite."""
        self.check()
        if self._last is None:
            return None
        (metrics, learning_rate), now = self._last, time.monotonic()
        row = {
            "loss": float(metrics.loss),
            "learning_rate": learning_rate,
            "tokens_per_second": self._tokens / max(now - self._since, 1e-9),
            "grad_norm": float(metrics.grad_norm),
            "param_norm": float(metrics.param_norm),
        }
        self._tokens, self._since = 0, now
        return row

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context from the training speed."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - start


class MetricsWriter:
    """Append to `metrics.jsonl` and `samples.jsonl`, and write the same numbers for TensorBoard, in process 0.

    Rows after `step`, from which the run resumes, are removed. `drop_validation` also removes its validation rows.

    After a row cannot be written, for example because the disk is full, no more rows are written. `check` raises the
    error in every process, so the processes communicate once per checkpoint and not once per row.
    """

    def __init__(self, run: RunDir, step: int, *, drop_validation: bool = False) -> None:
        self.failure: UserError | None = None
        self._files = ExitStack()
        on_main_process(self._open)(run, step, drop_validation)

    def _open(self, run: RunDir, step: int, drop_validation: bool) -> None:
        for path in (run.metrics, run.samples):
            truncate_after(path, step, drop_validation=drop_validation)
        self._metrics, self._samples = (path.open("a", encoding="utf-8") for path in (run.metrics, run.samples))
        self._board = _Board(run.tensorboard, step)
        for file in (self._metrics, self._samples, self._board):
            self._files.callback(_close, file)

    def write(self, step: int, values: Mapping[str, float], samples: Sequence[Mapping[str, str]] = ()) -> None:
        """Write one row of numbers, and one row per sample translation."""
        if not is_main_process() or self.failure is not None:
            return
        try:
            _append(self._metrics, {"step": step, **values})
            self._board.write(step, values)
            for sample in samples:
                _append(self._samples, {"step": step, **sample})
        except UserError as error:
            self.failure = error

    @on_main_process
    def check(self) -> None:
        """Raise the error of a row that could not be written. All processes must call this function."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Close every file, even if another one cannot be closed. Calling it again does nothing."""
        self._files.close()


class _Board:
    """TensorBoard's event file, written synchronously.

    tensorboardX's own writer has a thread that a full disk ends, after which closing the writer never returns.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # Imported here because it imports torch where torch is installed, which takes seconds.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self.name, self._event, self._summary = str(folder), Event, Summary
        with _failures_named(self.name):
            folder.mkdir(exist_ok=True)
            self._file = EventsWriter(str(folder / "events"))
            # TensorBoard then hides what earlier files hold for later steps.
            self._file.write_event(Event(step=step + 1, file_version="brain.Event:2"))
            self._file.write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        with _failures_named(self.name):
            summary = self._summary(value=[{"tag": name, "simple_value": value} for name, value in values.items()])
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
        fix = "Free disk space and run the same command again; it resumes from the last checkpoint"
        raise UserError(f"cannot write {path}: {error.strerror}. {fix}") from error


class Progress:
    """Steps done, loss, tokens per second, learning rate and time left, shown by process 0.

    On a terminal this is a bar on stderr, with log lines above it. Elsewhere it is a log line every ten seconds.
    """

    def __init__(self, step: int, num_steps: int) -> None:
        self._step, self._num_steps = step, num_steps
        self._start = time.monotonic(), step
        self._last_line = 0.0
        self._has_bar = is_main_process() and sys.stderr.isatty()
        self._bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True, disable=not self._has_bar)
        self._stack = ExitStack()
        self._stack.callback(self._bar.close)
        if self._has_bar:
            loggers = [one for one in (logging.root, logging.getLogger("transformer_jax")) if one.handlers]
            self._stack.enter_context(logging_redirect_tqdm(loggers))

    def close(self) -> None:
        """Remove the bar, and send log lines to where they went before."""
        self._stack.close()

    def restart(self) -> None:
        """Restart the clock of the estimated time left, so that the estimate excludes startup and compilation."""
        self._start = time.monotonic(), self._step
        self._bar.unpause()

    def advance(self) -> None:
        """Count one more step."""
        self._step += 1
        self._bar.update()

    def show(self, loss: float, tokens_per_second: float, learning_rate: float) -> None:
        """Show the figures of the step that was just logged."""
        figures = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, learning rate {learning_rate:.2e}"
        self._bar.set_postfix_str(figures)
        now, (started, first_step) = time.monotonic(), self._start
        is_due = now - self._last_line >= SECONDS_BETWEEN_LINES or self._step == self._num_steps
        if is_due and not self._has_bar:
            self._last_line = now
            seconds_left = (now - started) / max(self._step - first_step, 1) * (self._num_steps - self._step)
            left = tqdm.format_interval(seconds_left)
            logger.info("step %d/%d: %s, %s left", self._step, self._num_steps, figures, left)


class Profile:
    """Write a profiler trace of a few steps to a folder, if there is one, in process 0."""

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self._folder, self._is_open = folder, False
        self._first, self._last = (first_step + number - 1 for number in (FIRST_TRACED, LAST_TRACED))

    def before(self, step: int) -> None:
        """Start the trace if it starts with this step."""
        if self._folder and step == self._first:
            on_main_process(jax.profiler.start_trace)(str(self._folder), create_perfetto_trace=True)
            self._is_open = is_main_process()

    def after(self, step: int, result: object) -> None:
        """End the trace if it ends with this step, whose result is waited for."""
        if self._folder and step == self._last:
            jax.block_until_ready(result)
            on_main_process(self.close)()

    def close(self) -> None:
        """Write a trace that is still open."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
            logger.info(
                f"wrote a trace of steps {self._first} to {self._last} into {self._folder}. Open it with tensorboard "
                "--logdir, or open its perfetto_trace.json.gz at ui.perfetto.dev"
            )
