"""The figures of a training run: read from the device, written to files, shown as progress; profiler traces."""

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
from transformer_jax.runtime.files import to_json
from transformer_jax.training.step import Metrics
from transformer_jax.types import Batch, UserError

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0  # between progress lines where stderr is not a terminal
FIRST_TRACED, LAST_TRACED = 3, 7  # steps of a call of `fit`; the first two are not typical


@dataclass(frozen=True)
class Evaluation:
    """What a validation found."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures such as `valid_loss` and `valid_bleu`."""
    samples: Sequence[Mapping[str, str]] = ()
    """Sample translations, each with `source`, `reference` and `translation`."""


class MetricsFetcher:
    """Fetch the metrics of each step one step late, so that the host never waits for the device, and check them.

    Args:
        on_nonfinite: Called with step, problem and batch of a step whose loss or gradient is not finite.
    """

    def __init__(self, on_nonfinite: Callable[[int, str, Batch], None]) -> None:
        self._on_nonfinite = on_nonfinite
        self._pending: list[tuple[int, Batch, Metrics, Array]] = []
        self._last: tuple[Metrics, float] | None = None
        self._tokens = 0
        self._since = time.monotonic()

    def add(self, step: int, batch: Batch, metrics: Metrics, learning_rate: Array) -> None:
        """Take the results of a dispatched step, and check the step before it."""
        self._pending.append((step, batch, metrics, learning_rate))
        while len(self._pending) > 1:
            self._check(*self._pending.pop(0))

    def check_all(self) -> None:
        """Wait for every dispatched step, and check it."""
        while self._pending:
            self._check(*self._pending.pop(0))

    def row(self) -> dict[str, float] | None:
        """Return the figures of the step that was added last, or None if it was skipped."""
        self.check_all()
        if self._last is None:
            return None
        now = time.monotonic()
        tokens_per_second = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        metrics, learning_rate = self._last
        return {
            "loss": float(metrics.loss),
            "learning_rate": learning_rate,
            "tokens_per_second": tokens_per_second,
            "grad_norm": float(metrics.grad_norm),
            "param_norm": float(metrics.param_norm),
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside the context from the training speed."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._since += time.monotonic() - start

    def _check(self, step: int, batch: Batch, metrics: Metrics, learning_rate: Array) -> None:
        metrics, learning_rate = jax.device_get((metrics, learning_rate))
        self._last = None
        for name, value in (("loss", metrics.loss), ("gradient's norm", metrics.grad_norm)):
            if not math.isfinite(value):
                with self.paused():
                    self._on_nonfinite(step, f"the {name} of step {step} is {float(value)}", batch)
                return
        self._tokens += int(metrics.num_tokens)
        self._last = (metrics, float(learning_rate))


class MetricsWriter:
    """Append to `metrics.jsonl` and `samples.jsonl`, and write the same numbers for TensorBoard.

    Args:
        run: The run's folder.
        step: The step that the run resumes from. Rows of later steps are dropped, so each step is logged once.
        enabled: False, as in every process but process 0, writes nothing.
        drop_validation: Whether to drop the rows of the validation at `step` too, because it is repeated.
    """

    def __init__(self, run: RunDir, step: int, enabled: bool = True, *, drop_validation: bool = False) -> None:
        self._enabled = enabled
        if not enabled:
            return
        for path in (run.metrics, run.samples):
            truncate_after(path, step, drop_validation=drop_validation)
        self._metrics = run.metrics.open("a", encoding="utf-8")
        self._samples = run.samples.open("a", encoding="utf-8")
        self._board = _Board(run.tensorboard, step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one row of numbers.

        Raises:
            UserError: The row cannot be written, for example because the disk is full.
        """
        if not self._enabled:
            return
        _append(self._metrics, {"step": step, **values})
        self._board.write(step, values)

    def write_samples(self, step: int, samples: Sequence[Mapping[str, str]]) -> None:
        """Write one row per sample translation.

        Raises:
            UserError: A row cannot be written.
        """
        for sample in samples if self._enabled else ():
            _append(self._samples, {"step": step, **sample})

    def close(self) -> None:
        """Close every file, even if another one cannot be closed."""
        if not self._enabled:
            return
        with ExitStack() as stack:
            for file in (self._metrics, self._samples, self._board):
                stack.callback(_close, file)


class _Board:
    """TensorBoard's event file, written synchronously.

    tensorboardX's own writer has a thread that a full disk ends, after which closing the writer never returns.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # Imported here because it imports torch where torch is installed, which takes seconds.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        self.name = str(folder)
        with _failures_named(self.name):
            folder.mkdir(exist_ok=True)
            self._file = EventsWriter(str(folder / "events"))
            # TensorBoard then hides what earlier files hold for later steps.
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
            f"cannot write {path}: {error.strerror}. Free disk space and run the same command again; it resumes from "
            "the last checkpoint"
        ) from error


class Progress:
    """Steps done, loss, tokens per second, learning rate and time left.

    On a terminal this is a bar on stderr, with log lines above it. Elsewhere it is a log line every ten seconds.

    Args:
        step: Number of steps done before.
        num_steps: Number of steps at the end.
        enabled: False, as in every process but process 0, shows nothing.
    """

    def __init__(self, step: int, num_steps: int, enabled: bool = True) -> None:
        self._enabled, self._has_bar = enabled, enabled and sys.stderr.isatty()
        self._bar = tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True, disable=not self._has_bar)
        self._start = (time.monotonic(), step)
        self._last_line = 0.0
        self._step, self._num_steps = step, num_steps
        self._stack = ExitStack()

    def __enter__(self) -> "Progress":
        if self._has_bar:
            loggers = [one for one in (logging.root, logging.getLogger("transformer_jax")) if one.handlers]
            self._stack.enter_context(logging_redirect_tqdm(loggers))
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
        self._stack.close()

    def restart(self) -> None:
        """Restart the clock of the estimated time left, so that the estimate excludes startup and compilation."""
        self._start = (time.monotonic(), self._step)
        self._bar.unpause()

    def advance(self) -> None:
        """Count one more step."""
        self._step += 1
        self._bar.update()

    def show(self, loss: float, tokens_per_second: float, learning_rate: float) -> None:
        """Show the figures of the step that was just logged."""
        figures = f"loss {loss:.3f}, {tokens_per_second:,.0f} tokens/s, learning rate {learning_rate:.2e}"
        self._bar.set_postfix_str(figures)
        now = time.monotonic()
        is_due = now - self._last_line >= SECONDS_BETWEEN_LINES or self._step == self._num_steps
        if not self._enabled or self._has_bar or not is_due:
            return
        self._last_line = now
        done = self._step - self._start[1]
        left = (now - self._start[0]) / max(done, 1) * (self._num_steps - self._step)
        interval = tqdm.format_interval(left)
        logger.info("step %d/%d: %s, %s left", self._step, self._num_steps, figures, interval)


class Profile:
    """Write a profiler trace of a few steps to a folder. `close` ends a trace that is still open.

    Args:
        folder: Where to write the trace. None traces nothing.
        first_step: The first step of this call of `fit`.
    """

    def __init__(self, folder: Path | None, first_step: int) -> None:
        self._folder, self._first_step = folder, first_step
        self._is_open = False

    def before(self, step: int) -> None:
        """Start the trace if it starts with this step."""
        if self._folder and step == self._first_step + FIRST_TRACED - 1:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._is_open = True

    def after(self, step: int, result: object) -> None:
        """End the trace if it ends with this step, whose result is waited for."""
        if self._is_open and step == self._first_step + LAST_TRACED - 1:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Write the trace."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
            logger.info(
                "wrote a trace of steps %d to %d into %s. Open it with tensorboard --logdir, or open its "
                "perfetto_trace.json.gz at ui.perfetto.dev",
                self._first_step + FIRST_TRACED - 1,
                self._first_step + LAST_TRACED - 1,
                self._folder,
            )
