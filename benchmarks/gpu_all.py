"""Every figure that needs a GPU, within 10 minutes on one device, the most important first; JSON lines in a folder.

python -m benchmarks.gpu_all                                the folder is $OUT, or benchmarks/results
python -m benchmarks.gpu_all --device cpu --scale tiny      tries the script where there is no GPU

A part is a process with a time limit; what it found before that stands in `gpu.jsonl` already.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import ROOT, Output, child_environment


class Part(NamedTuple):
    """A command line of another benchmark, and its time limit in seconds."""

    name: str
    arguments: list[str]
    seconds: float


def parts(scale: str) -> list[Part]:
    """What is run, in order. 25k tokens are 392 rows of 64 positions, of which 92.5 % hold tokens."""
    if scale == "tiny":  # one of each kind; torch.compile takes a minute for any model
        tiny = ["--sizes", "nano", "--rounds", "1", "--turn-seconds", "0.01"]
        step = ["--rows", "4", "--length", "8", "--dtype", "bfloat16", *tiny]
        decoding = ["--beams", "1", "--batches", "2", "--pairs", "ours:ctranslate2_float32", *tiny]
        return [
            Part("base", ["training_step", "--peers", "autocast", *step], 300),
            Part("choices", ["variants", "--check-kernels", "--vary", "attention_kernel=xla", *step], 300),
            Part("decoding", ["decoding", *decoding], 300),
        ]
    rounds = ["--rounds", "5", "--turn-seconds", "1"]
    step = ["--length", "64", "--dtype", "bfloat16", *rounds]
    base = ["--sizes", "base", "--rows", "392", *step]
    big, half = (["--sizes", "big", "--rows", rows, *step] for rows in ("392", "196"))
    best = ["--peers", "compile_autocast"]
    choices = ["--vary", "dropout_generator=hash,threefry", "--vary", "attention_kernel=xla", "--check-kernels"]
    more = ["--vary", "loss_chunk_mb=64,1024,100000", "--vary", "scan_layers=true"]
    corpus = ["--corpora", "wmt", "--pairs", "100000", "--batch-tokens", "25000", "--dtype", "bfloat16"]
    return [
        Part("base", ["training_step", *best, *base], 200),
        Part("big", ["training_step", *best, *big], 200),
        Part("choices", ["variants", *choices, *base], 150),
        Part("decoding", ["decoding", "--sizes", "base", *rounds], 200),
        Part("big half", ["training_step", *best, *half], 150),
        Part("batching", ["batching", "--sizes", "base", *corpus, *rounds], 150),
        Part("big remat", ["training_step", "--peers", "", "--remat", "layers", *big], 100),
        Part("more choices", ["variants", *more, *base], 150),
        Part("eager", ["training_step", "--peers", "autocast", *base], 100),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Run the parts until the time limit. Return 1 if a part failed or was skipped for lack of time."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("folder", nargs="?", type=Path, default=os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    flags.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    flags.add_argument("--scale", choices=("full", "tiny"), default="full")
    flags.add_argument("--seconds", type=float, default=570.0, help="for all parts (default %(default)s)")
    flags.add_argument("--only", action="append", help="the name of a part; may be given several times")
    options = flags.parse_args(arguments)
    path = Path(options.folder).absolute() / f"{options.device}.jsonl"
    output, started, good = Output(path), time.monotonic(), True
    with tempfile.TemporaryDirectory(prefix="benchmark-gpu-") as folder:
        environment = child_environment(options.device)
        # The same step is compiled for several parts; the first of them says how long that takes.
        environment.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
        environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        for part in parts(options.scale):
            if options.only and part.name not in options.only:
                continue
            left = options.seconds - (time.monotonic() - started)
            if left < min(30.0, part.seconds / 4):
                output.skip("gpu_all", part.name, f"{left:.0f} s are left")
                good = False
                continue
            good = _run(part, min(left, part.seconds), options.device, path, environment, output) and good
    return 0 if good else 1


def _run(part: Part, seconds: float, device: str, path: Path, environment: dict[str, str], output: Output) -> bool:
    """Run a part in its own process group, so that its sides end with it."""
    module, *rest = part.arguments
    command = [sys.executable, "-m", f"benchmarks.{module}", *rest, "--device", device, "--output", str(path)]
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = process.wait(timeout=seconds)
        reason = None if status == 0 else f"ended with {status}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        reason = f"not ready after {seconds:.0f} s"
    figures = {"seconds": {"ours": {"median": round(time.monotonic() - start, 1)}}, "command": " ".join(command[1:])}
    output.write("gpu_all", part.name, figures | ({"skipped": reason} if reason else {}))
    return reason is None


if __name__ == "__main__":
    sys.exit(main())
