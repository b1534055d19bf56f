"""Start processes for tests: `train.py` with a tiny model, and other programs."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY_FLAGS = (
    *("--model.vocab-size=300", "--model.d-model=16", "--model.num-layers=1", "--model.num-heads=2", "--model.d-ff=32"),
    *("--model.attention-dropout=0.1", "--data.synthetic-valid-size=10", "--data.synthetic-test-size=10"),
    *("--training.log-every=1", "--decoding.beam-size=1", "--decoding.max-length-offset=2"),
)
"""A model of one layer on the numbers corpus, which logs every step."""


def xla_flags(devices: int) -> str:
    """Return the tests' own `XLA_FLAGS`, which compile fast, for a number of devices."""
    return re.sub(r"(device_count)=\d+", rf"\1={devices}", os.environ["XLA_FLAGS"])


def start_python(arguments: list, devices: int) -> subprocess.Popen:
    """Start a Python program on a number of devices. Its output goes to pipes."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS=xla_flags(devices))
    pipe, command = subprocess.PIPE, [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def wait_until(condition: Callable[[], bool], processes: list[subprocess.Popen]) -> None:
    """Wait up to two minutes for a condition, while processes run."""
    for _ in range(2400):
        if condition():
            return
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        time.sleep(0.05)
    raise AssertionError("the condition did not become true within two minutes")
