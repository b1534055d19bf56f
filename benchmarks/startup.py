"""Seconds of imports, seconds to the first step of `train.py` with and without compiled code on disk, peak memory.

python -m benchmarks.startup
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Output, child_environment, comma_list, parser, summary

IMPORTS = (
    *("transformer_jax", "transformer_jax.cli", "transformer_jax.run", "transformer_jax.model.transformer"),
    *("transformer_jax.training.loop", "transformer_jax.decoding.translator", "transformer_jax.data.loader"),
    *("numpy", "jax", "flax.linen", "optax", "orbax.checkpoint", "grain", "tokenizers", "sacrebleu"),
)


def main(arguments: list[str] | None = None) -> int:
    """Print one line for the imports, and one for each start of training."""
    flags = parser(__doc__.splitlines()[0], rounds=5)
    flags.add_argument("--imports", type=comma_list, default=IMPORTS)
    flags.add_argument("--parts", type=comma_list, default=["imports", "cold", "warm"])
    flags.add_argument("--steps", type=int, default=5)
    flags.add_argument("--train-flags", default="", help="more flags of train.py")
    options = flags.parse_args(arguments)
    output = Output(options.output)
    environment = child_environment(options.device)
    good = True
    if "imports" in options.parts:
        good = _imports(options, environment, output)
    with tempfile.TemporaryDirectory(prefix="benchmark-startup-") as folder:
        for part in ("cold", "warm"):
            if part in options.parts:
                good = _first_step(part, Path(folder), options, environment, output) and good
    return 0 if good else 1


def _imports(options: argparse.Namespace, environment: dict[str, str], output: Output) -> bool:
    """Wall time of a Python that imports one thing, less that of a Python that imports nothing; the things in turn."""
    found: dict[str, list[float]] = {name: [] for name in ("", *options.imports)}
    for _ in range(options.rounds + 1):
        for name in list(found):
            start = time.perf_counter()
            code = f"import {name}" if name else ""
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True
            )
            seconds = time.perf_counter() - start
            if done.returncode:
                output.skip("startup", f"import {name}", done.stderr.strip().splitlines()[-1])
                del found[name]
                continue
            found[name].append(seconds)
    bare = summary(found.pop("")[1:])  # the first round filled the cache of files
    for name, seconds in found.items():
        own = [value - bare["median"] for value in seconds[1:]]
        output.write("startup", f"import {name}", {"seconds": {"ours": summary(own)}, "rounds": options.rounds})
    return len(found) == len(options.imports)


def _first_step(
    part: str, folder: Path, options: argparse.Namespace, environment: dict[str, str], output: Output
) -> bool:
    """Starts training until the first step stands in its metrics. cold: nothing is compiled; warm: all is on disk."""
    rounds = 1 if part == "cold" else min(options.rounds, 3)
    environment = {**environment, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    runs = []
    warming = part == "warm" and not (folder / "compiled").is_dir()
    for number in range(rounds + warming):
        answer = _train(folder / f"{part}{number}", options, environment)
        if "error" in answer:
            output.skip("startup", f"first step, {part}", answer["error"])
            return False
        runs.append(answer)
    runs = runs[warming:]
    figures = {
        "seconds": {"ours": summary([run["first_step"] for run in runs])},
        "seconds_until_end": summary([run["end"] for run in runs]),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "steps": options.steps,
        "rounds": rounds,
        "malloc_tuned": not options.no_malloc_tuning,
        "device": options.device,
    }
    output.write("startup", f"first step, {part}", figures)
    return True


def _train(workdir: Path, options: argparse.Namespace, environment: dict[str, str]) -> dict[str, Any]:
    """Start training once, and stop it after its last step, before the test."""
    command = [sys.executable, "train.py", "--workdir", str(workdir), "--training.log-every", "1"]
    command += ["--training.num-steps", str(options.steps + 1000), *options.train_flags.split()]
    command += ["--no-malloc-tuning"] if options.no_malloc_tuning else []
    metrics = workdir / "metrics.jsonl"
    workdir.parent.mkdir(exist_ok=True)
    log_path = workdir.with_suffix(".log")
    start, first = time.perf_counter(), None
    with log_path.open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log)
        ended, status, usage = 0, 0, None
        while not ended:
            time.sleep(0.02)
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            last = _last_step(metrics)
            if last >= 1 and first is None:
                first = time.perf_counter() - start
            if last >= options.steps and not ended:
                end = time.perf_counter() - start
                process.send_signal(signal.SIGTERM)  # it saves what it has and ends well
                _, status, usage = os.wait4(process.pid, 0)
                break
        process.returncode = os.waitstatus_to_exitcode(status)
    if first is None or usage is None or _last_step(metrics) < options.steps:
        return {"error": f"train.py ended with {process.returncode}: {log_path.read_text()[-400:].strip()}"}
    return {"first_step": first, "end": end, "peak_bytes": usage.ru_maxrss * 1024}


def _last_step(metrics: Path) -> int:
    """Of the training rows written so far, 0 if there is none."""
    if not metrics.is_file():
        return 0
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
    return max((row["step"] for row in rows), default=0)


if __name__ == "__main__":
    sys.exit(main())
