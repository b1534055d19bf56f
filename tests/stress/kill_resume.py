"""Kill tiny training runs with SIGKILL at random times, resume with the same command, and compare.

    python tests/stress/kill_resume.py --kills 50 --seed 0

A run is killed several times, in each of five phases, and then resumed until its end. Its parameters, optimizer state
and logged losses must be bit-identical to those of an uninterrupted run. The table at the end counts the kills by the
phase in which they happened. A kill after the end of a run does not count.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from killed_run import PHASES

ROOT = Path(__file__).resolve().parents[2]

NUM_STEPS = 12
ARGUMENTS = [
    *("--model.vocab-size=300", "--model.d-model=16", "--model.num-layers=1", "--model.num-heads=2", "--model.d-ff=32"),
    *("--model.attention-dropout=0.1", "--data.synthetic-valid-size=10", "--data.synthetic-test-size=10"),
    *("--training.log-every=1", "--decoding.beam-size=1", "--decoding.max-length-offset=2"),
    # A few batches per epoch, so that kills occur within several epochs and between them.
    *("--data.synthetic-train-size=200", "--data.batch-tokens=1000", "--data.max-shapes=2"),
    *("--training.validate-every=5", "--training.valid-sentences=4", "--training.num-samples=1"),
    *("--training.checkpoint-every=2", f"--training.num-steps={NUM_STEPS}"),
]
TIMEOUT = 300
XLA_FLAGS = "--xla_backend_optimization_level=0"
# How often an uninterrupted run enters each phase, to choose when to kill.
OCCURRENCES = {"compilation": 1, "step": NUM_STEPS, "open save": 8, "metric write": NUM_STEPS + 3, "evaluation": 3}


def start(workdir, cache, record="-", phase="none", count=0, fraction=0.0):
    """Run the command until it ends or is killed."""
    environment = dict(os.environ, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", JAX_COMPILATION_CACHE_DIR=str(cache))
    environment["XLA_FLAGS"] = XLA_FLAGS
    environment |= {
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    killed_run = [sys.executable, str(Path(__file__).with_name("killed_run.py"))]
    aim = [str(record), phase, str(count), str(fraction)]
    command = ["train", f"--workdir={workdir}", *ARGUMENTS]
    return subprocess.run(
        [*killed_run, *aim, *command], env=environment, capture_output=True, text=True, timeout=TIMEOUT
    )


def train(workdir, cache, *aim):
    """Run the command, which may be killed but not fail. Return its status and, after a kill, the kill's record."""
    record = workdir.with_name(workdir.name + ".kill.json")
    record.unlink(missing_ok=True)
    done = start(workdir, cache, record, *aim)
    if done.returncode not in (0, -signal.SIGKILL) or "Traceback" in done.stderr:
        raise AssertionError(f"{workdir}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.returncode, json.loads(record.read_text()) if record.exists() else None


def outcome(workdir):
    """Return what must be equal: the bytes of the last state, and the logged rows without the speed."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore((workdir / "checkpoints" / str(NUM_STEPS) / "state").absolute())
    import jax

    arrays = {
        jax.tree_util.keystr(path): (np.asarray(leaf).dtype.str, np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    }
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("tokens_per_second", None)
    samples = (workdir / "samples.jsonl").read_text().splitlines()
    return {"state": arrays, "metrics": rows, "samples": samples}


def differences(one, other):
    """Return the names of what differs."""
    found = [f"{name} of the state" for name, value in one["state"].items() if other["state"].get(name) != value]
    return found + [name for name in ("metrics", "samples") if one[name] != other[name]]


def make_reference(folder, cache):
    """Return the outcome of an uninterrupted run."""
    status, _ = train(folder / "reference", cache)
    assert status == 0
    expected = outcome(folder / "reference")
    assert [row["step"] for row in expected["metrics"] if "loss" in row] == list(range(1, NUM_STEPS + 1))
    return expected


def kill_a_run(workdir, cache, expected, phases, rng):
    """Start a run repeatedly, each time with a kill in the next phase, and finally without a kill.

    Returns:
        The number of kills by the phase in which they happened, and what differs from `expected` at the end.
    """
    met, status = Counter(), None
    for phase in phases:
        # After a kill less work remains, so kills are aimed early.
        count = rng.randrange(max(1, OCCURRENCES[phase] // 2))
        # Half of the compilations start with an empty cache, so that they take longer.
        is_cold = phase == "compilation" and rng.random() < 0.5
        status, record = train(workdir, Path(f"{workdir}-cache") if is_cold else cache, phase, count, rng.random())
        if status == 0:
            break
        met[record["phase"]] += 1
    if status != 0:
        train(workdir, cache)
    return met, differences(expected, outcome(workdir))


def kill_and_compare(folder, num_kills, seed):
    """Kill runs until `num_kills` kills count, with at least a tenth of them in each phase.

    Returns:
        The numbers of kills survived and of all kills, by phase.
    """
    rng, cache = random.Random(seed), folder / "cache"
    expected = make_reference(folder, cache)
    kills, survived = Counter(), Counter()
    for number in range(1, num_kills + 1):
        lacking = [phase for phase in PHASES if kills[phase] < num_kills // 10]
        if sum(kills.values()) >= num_kills and not lacking:
            break
        phases = lacking + [phase for phase in PHASES if phase not in lacking and rng.random() < 0.7]
        rng.shuffle(phases)
        met, found = kill_a_run(folder / f"run{number}", cache, expected, phases, rng)
        kills += met
        survived += Counter() if found else met
        what = f"{', '.join(found)} differ" if found else "the same bits"
        print(f"run {number}: {sum(met.values())} kills ({', '.join(met)}): {what}", flush=True)
        shutil.rmtree(folder / f"run{number}")
    return survived, kills


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as folder:
        survived, kills = kill_and_compare(Path(folder), options.kills, options.seed)
    print("| killed during | kills | survived |\n|---|---|---|")
    for phase in (*PHASES, "other"):
        print(f"| {phase} | {kills[phase]} | {survived[phase]} |")
    print(f"| all | {sum(kills.values())} | {sum(survived.values())} |")
    return 0 if survived == kills else 1


if __name__ == "__main__":
    sys.exit(main())
