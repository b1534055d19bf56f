"""Run one side of a comparison in its own process: `python -m benchmarks.child MODULE:FUNCTION SPEC`.

The function gets the spec (JSON) and returns (what is known of this side, a function from a command to an answer). The
process answers each line of its standard input with a line of JSON, and ends with its input.
"""

import importlib
import json
import os
import sys


def main() -> None:
    """Read the command line, and answer commands until the input ends."""
    target, spec = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    tuned = False
    if spec.get("malloc", False):
        from transformer_jax.runtime.environment import tune_malloc

        tuned = tune_malloc()  # before jax or torch starts threads
    module, _, function = target.partition(":")
    try:
        info, turn = getattr(importlib.import_module(module), function)(spec)
        answers.write(json.dumps({**info, "malloc_tuned": tuned}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(turn(json.loads(line))) + "\n")
    except Exception as error:  # one side fails: the parent reports it, and the others run
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}) + "\n")
        raise


def peak_memory() -> int:
    """Return the peak resident size of this process, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        (line,) = (line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
