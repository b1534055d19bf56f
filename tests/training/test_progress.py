"""What a user sees of a training run, on a terminal and elsewhere."""

import io
import sys

from transformer_jax.training import metrics
from transformer_jax.training.metrics import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_with_all_figures(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(2, 4) as progress:
        progress.advance()
        progress.show(3.25, 12345.6, 7e-4)
        progress.say("a line of its own")
        progress.advance()
    seen = terminal.getvalue()
    assert "a line of its own\n" in seen
    for figure in ("4/4", "loss 3.250", "12,346 tokens/s", "learning rate 7.00e-04"):
        assert figure in seen.rpartition("\r")[2]


def test_compilation_does_not_count_for_the_time_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    with Progress(2, 12) as progress:
        now[0] = 1000.0
        progress.restart()
        now[0] += 20.0
        progress.advance()
        progress.advance()
        progress.show(1.0, 1.0, 1.0)
    assert "01:20 left" in capsys.readouterr().err  # 8 steps of 10 s


def test_elsewhere_there_is_a_line_every_ten_seconds_and_at_the_end(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    with Progress(0, 4) as progress:
        for seconds in (10.0, 12.0, 20.0, 21.0):
            now[0] = seconds
            progress.advance()
            progress.show(1.0, 2.0, 3.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1/4", "step 3/4", "step 4/4"]
    assert lines[0].endswith("00:30 left")
