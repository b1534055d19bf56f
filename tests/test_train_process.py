"""`train.py` as a separate process, with threads, signals and devices."""

import signal

import pytest
from processes import ROOT, TINY_FLAGS, start_python, wait_until
from tiny_training import losses

FLAGS = (
    *("--data.synthetic-train-size=500", "--data.max-shapes=1"),
    "--data.batch-tokens=600",  # 100 // 47 tokens: rows that eight devices do not divide
    *("--training.validate-every=1000", "--training.valid-sentences=0", "--training.num-samples=0"),
)


def start(workdir, num_steps):
    flags = (f"--workdir={workdir}", f"--training.num-steps={num_steps}", *TINY_FLAGS, *FLAGS)
    return start_python([ROOT / "train.py", *flags], devices=1)


def finish(process):
    """Return the lines of stdout and of stderr."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return out.splitlines(), err.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_the_same_command_resumes(tmp_path, number):
    run = tmp_path / "run"
    process = start(run, 100_000)
    metrics = run / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3, [process])
    process.send_signal(number)
    out, err = finish(process)
    last = len(losses(run))
    assert out == []
    assert err[-1].startswith(f"stopped by {signal.Signals(number).name} after step {last} of 100000")
    assert (run / "checkpoints" / str(last)).is_dir()

    out, err = finish(start(run, last + 2))
    assert f"resuming {run} at step {last}" in err
    assert out[-1].startswith("exact match ")
    assert len(losses(run)) == last + 2
