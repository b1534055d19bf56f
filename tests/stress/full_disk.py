"""Train tiny runs on disks that are too small, enlarge the disks, resume with the same command, and compare.

    python tests/stress/full_disk.py --disks 8 --seed 0        as root, on Linux: each disk is a tmpfs of some size

A run on a full disk must report it in one line, without a traceback. The same command on the enlarged disk must end
with the parameters, the optimizer state and the logged losses of a run that had enough space.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from kill_resume import differences, make_reference, outcome, start


def try_disk(disk, cache, expected, kilobytes):
    """Return the error of the run on a disk of that size, or None if the disk had enough space."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)], check=True)
    try:
        done = start(disk / "run", cache)
        message = None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
        if message is not None and (done.returncode != 1 or "Traceback" in done.stderr):
            raise AssertionError(f"{kilobytes} kB: status {done.returncode}\n{done.stderr}")
        subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        again = start(disk / "run", cache)
        if again.returncode != 0:
            raise AssertionError(f"{kilobytes} kB, enlarged: status {again.returncode}\n{again.stderr}")
        found = differences(expected, outcome(disk / "run"))
        if found:
            raise AssertionError(f"{kilobytes} kB, enlarged: {', '.join(found)} differ")
        return message
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--disks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="full-disk-") as folder:
        disk, cache = Path(folder) / "disk", Path(folder) / "cache"
        disk.mkdir()
        expected = make_reference(Path(folder), cache)
        for _ in range(options.disks):
            kilobytes = round(16 * 2 ** rng.uniform(0, 8))  # up to 4 MB
            message = try_disk(disk, cache, expected, kilobytes)
            print(f"{kilobytes} kB: {message or 'enough space'}; bit-identical after enlarging the disk", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
