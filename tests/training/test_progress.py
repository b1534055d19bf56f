"""Progress of a training run on a terminal, in log files and in TensorBoard."""

import io
import logging
import struct
import sys
from contextlib import closing

import pytest
from tensorboardX.proto.event_pb2 import Event

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.testing import log_lines
from transformer_jax.training import metrics
from transformer_jax.training.metrics import MetricsWriter, Progress
from transformer_jax.types import UserError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_a_bar_below_the_log(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    logger = logging.getLogger("transformer_jax")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(terminal)])  # as the command line configures it
    with closing(Progress(2, 4)) as progress:
        progress.advance()
        progress.show(3.25, 12345.6, 7e-4)
        logging.getLogger("transformer_jax.training").warning("a line of its own")
        progress.advance()
    seen = terminal.getvalue()
    assert "a line of its own\n" in seen
    for figure in ("4/4", "loss 3.250", "12,346 tokens/s", "learning rate 7.00e-04"):
        assert figure in seen.rpartition("\r")[2]


def test_time_left_excludes_compilation(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    with log_lines() as lines, closing(Progress(2, 12)) as progress:
        now[0] = 1000.0
        progress.restart()
        now[0] += 20.0
        progress.advance()
        progress.advance()
        progress.show(1.0, 1.0, 1.0)
    assert "01:20 left" in lines[0]  # 8 steps of 10 s


def test_without_a_terminal_progress_is_logged_every_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    with log_lines() as lines, closing(Progress(0, 4)) as progress:
        for seconds in (10.0, 12.0, 20.0, 21.0):
            now[0] = seconds
            progress.advance()
            progress.show(1.0, 2.0, 3.0)
    assert [line.split(":")[0] for line in lines] == ["step 1/4", "step 3/4", "step 4/4"]
    assert lines[0].endswith("00:30 left")


def events(run):
    """Yield TensorBoard's events in the order of writing. A record is length, checksum, event, checksum."""
    for path in sorted(run.tensorboard.glob("events.out.tfevents*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_tensorboard_rows_are_flushed_and_a_resume_hides_later_ones(tmp_path):
    run = RunDir(tmp_path)
    writer = MetricsWriter(run, 7)
    writer.write(8, {"loss": 2.5, "learning_rate": 0.125})
    found = list(events(run))  # not closed: a kill would lose nothing
    assert [event.step for event in found if event.HasField("session_log")] == [8]
    values = [(event.step, value.tag, value.simple_value) for event in found for value in event.summary.value]
    assert values == [(8, "loss", 2.5), (8, "learning_rate", 0.125)]
    writer.close()


def test_full_disk_raises_and_never_blocks(tmp_path, monkeypatch):
    message = r"cannot write \S+: No space left on device. Free disk space and run the same command again"
    full = open("/dev/full", "a")  # noqa: SIM115  it cannot be closed without an error either
    with pytest.raises(UserError, match=message):
        metrics._append(full, {"step": 1})
    with pytest.raises(OSError, match="No space left"):
        full.close()

    def fail():
        raise OSError(28, "No space left on device")

    board = metrics._Board(tmp_path / "tensorboard", 0)
    monkeypatch.setattr(board._file, "flush", fail)
    for step in range(40):  # more than the capacity of tensorboardX's queue
        with pytest.raises(UserError, match=message):
            board.write(step, {"loss": 1.0})
    monkeypatch.undo()
    board.close()


def test_every_file_is_closed_if_one_fails(tmp_path, monkeypatch):
    writer = MetricsWriter(RunDir(tmp_path), 0)
    close = writer._board.close

    def fail():
        close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer._board, "close", fail)
    with pytest.raises(UserError, match="No space left on device"):
        writer.close()
    assert writer._metrics.closed
    assert writer._samples.closed
