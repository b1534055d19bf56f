"""`train.py` as a user runs it: a process with threads, signals and its own devices."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import xla_flags

ROOT = Path(__file__).resolve().parents[1]
FLAGS = {
    "model": {"vocab-size": 300, "d-model": 16, "num-layers": 1, "num-heads": 2, "d-ff": 32, "attention-dropout": 0.1},
    # 100 // 47 tokens: rows that eight devices do not divide
    "data": {
        "synthetic-train-size": 500,
        "synthetic-valid-size": 10,
        "synthetic-test-size": 10,
        "batch-tokens": 600,
        "max-shapes": 1,
    },
    "training": {"log-every": 1, "validate-every": 1000, "valid-sentences": 0, "num-samples": 0},
    "decoding": {"beam-size": 1, "max-length-offset": 2},
}


def start(workdir: Path, devices: int, num_steps: int) -> subprocess.Popen:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    environment["XLA_FLAGS"] = xla_flags(devices)
    flags = [f"--{section}.{name}={value}" for section, fields in FLAGS.items() for name, value in fields.items()]
    command = [sys.executable, str(ROOT / "train.py"), f"--workdir={workdir}", f"--training.num-steps={num_steps}"]
    return subprocess.Popen(
        [*command, *flags], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def losses(workdir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def finish(process: subprocess.Popen) -> tuple[list[str], list[str]]:
    """Return the lines of stdout and of stderr."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out.splitlines(), err.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_and_the_same_command_goes_on(tmp_path, number):
    process = start(tmp_path / "run", 1, 100_000)
    metrics = tmp_path / "run" / "metrics.jsonl"
    for _ in range(2400):
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    out, err = finish(process)
    last = max(losses(tmp_path / "run"))
    assert out == []
    assert err[-1].startswith(f"stopped by {signal.Signals(number).name} after step {last} of 100000")
    assert (tmp_path / "run" / "checkpoints" / str(last)).is_dir()

    out, err = finish(start(tmp_path / "run", 1, last + 2))
    assert f"resuming {tmp_path / 'run'} at step {last}" in err
    assert out[-1].startswith("exact match ")
    assert list(losses(tmp_path / "run")) == list(range(1, last + 3))
