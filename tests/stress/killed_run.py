"""`train` that kills itself with SIGKILL: python killed_run.py RECORD PHASE COUNT FRACTION ARGUMENTS...

PHASE is one of PHASES or `none`. The kill happens when the phase is entered for the COUNT-th time, from 0. FRACTION,
from 0 to 1, is the time after entering it, as a share of its usual time, or a share of a metric row's bytes. The phase
in which the kill really happened is written to RECORD.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from functools import wraps

PHASES = ("compilation", "step", "open save", "metric write", "evaluation")
TYPICAL_SECONDS = {"compilation": 1.0, "step": 0.002, "open save": 0.06, "evaluation": 0.3}


class Killer:
    """Track the phases of the process, and kill it in one of them."""

    def __init__(self, record, phase, count, fraction):
        self.record, self.phase, self.count, self.fraction = record, phase, count, fraction
        self.entered = dict.fromkeys(PHASES, 0)
        self.within = []
        self.is_saving = lambda: False

    def is_aimed_at(self, phase):
        """Count that a phase is entered. Return whether to kill now."""
        self.entered[phase] += 1
        return phase == self.phase and self.entered[phase] == self.count + 1

    @contextmanager
    def within_phase(self, phase):
        self.within.append(phase)
        try:
            if self.is_aimed_at(phase):
                self.kill_soon(phase)
            yield
        finally:
            self.within.remove(phase)

    def kill_soon(self, phase):
        threading.Thread(
            target=self._wait_and_kill, args=(TYPICAL_SECONDS[phase] * self.fraction,), daemon=True
        ).start()

    def _wait_and_kill(self, seconds):
        time.sleep(seconds)
        self.kill()

    def kill(self):
        going_on = [*self.within, *(["open save"] if self.is_saving() else []), "other"]
        going_on = self.phase if self.phase in going_on else going_on[0]
        with open(self.record, "w") as file:
            json.dump({"phase": going_on, "entered": self.entered}, file)
            file.flush()
            os.fsync(file.fileno())
        os.kill(os.getpid(), signal.SIGKILL)


def install(killer):
    """Put the killer into the functions of the package that a training run calls."""
    from transformer_jax.checkpoint.checkpoint import Checkpoints
    from transformer_jax.evaluation.validation import Validation
    from transformer_jax.training import metrics
    from transformer_jax.training.compilation import CompiledStep

    def during(cls, name, phase):
        method = getattr(cls, name)

        @wraps(method)
        def wrapped(self, *args, **options):
            with killer.within_phase(phase):
                return method(self, *args, **options)

        setattr(cls, name, wrapped)

    during(CompiledStep, "__init__", "compilation")
    during(Validation, "__call__", "evaluation")
    step, save, append = CompiledStep.__call__, Checkpoints.save, metrics._append

    def step_and_perhaps_kill(self, *args):
        result = step(self, *args)  # computes in the background
        if killer.is_aimed_at("step"):
            killer.within.append("step")
            time.sleep(TYPICAL_SECONDS["step"] * killer.fraction)
            killer.kill()
        return result

    def save_and_perhaps_kill(self, *args, **options):
        killer.is_saving = self._manager.is_saving_in_progress
        if killer.is_aimed_at("open save"):
            killer.kill_soon("open save")
        return save(self, *args, **options)

    def append_or_kill(file, row):
        if killer.is_aimed_at("metric write"):
            killer.within.append("metric write")
            line = json.dumps(row, ensure_ascii=False).encode()
            file.buffer.write(line[: int(len(line) * killer.fraction)])
            file.buffer.flush()
            killer.kill()
        append(file, row)

    CompiledStep.__call__, Checkpoints.save, metrics._append = (
        step_and_perhaps_kill,
        save_and_perhaps_kill,
        append_or_kill,
    )


if __name__ == "__main__":
    record, phase, count, fraction, *arguments = sys.argv[1:]
    from transformer_jax import cli
    from transformer_jax.runtime import environment

    environment.use_compilation_cache()  # before jax is imported, as the command line does
    install(Killer(record, phase, int(count), float(fraction)))
    sys.exit(cli.main(arguments))
