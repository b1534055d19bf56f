"""Trains a tiny run on disks that are too small, makes room, goes on with the same command, and compares.

    python tests/stress/full_disk.py --disks 8 --seed 0        as root, on Linux: each disk is a tmpfs of some size

A run on a full disk must say so in a line, without a traceback, and the same command on the enlarged disk must end with
the parameters, the optimizer state and the logged losses of a run that had room.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from kill_resume import differences, make_reference, outcome, start


def try_disk(disk, cache, expected, kilobytes):
    """What the run said on a disk of that size; None if it had room."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)], check=True)
    try:
        done = start(disk / "run", cache)
        said = None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
        if said is not None and (done.returncode != 1 or "Traceback" in done.stderr):
            raise AssertionError(f"{kilobytes} kB: status {done.returncode}\n{done.stderr}")
        subprocess.run(["mount", "-o", "remount,size=1g", str(disk)], check=True)
        again = start(disk / "run", cache)
        if again.returncode != 0:
            raise AssertionError(f"{kilobytes} kB, with room: status {again.returncode}\n{again.stderr}")
        found = differences(expected, outcome(disk / "run"))
        if found:
            raise AssertionError(f"{kilobytes} kB, with room: {', '.join(found)} differ")
        return said
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
            said = try_disk(disk, cache, expected, kilobytes)
            print(f"{kilobytes} kB: {said or 'there was room'}; with room the same bits", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
