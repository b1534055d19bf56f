"""A trace of a few training steps, for TensorBoard and Perfetto."""

from collections.abc import Callable
from pathlib import Path

import jax

FIRST, LAST = 3, 7  # steps of this call of `fit` that are traced: the first ones are not typical


class Profile:
    """Traces some steps into a folder. Closing it ends a trace that is still open.

    Args:
        folder: where to; None: nothing is traced.
        first_step: the first step of this call of `fit`.
        say: called with a line for the user when the trace is written.
    """

    def __init__(self, folder: Path | None, first_step: int, say: Callable[[str], None]) -> None:
        self._folder, self._first_step, self._say = folder, first_step, say
        self._is_open = False

    def before(self, step: int) -> None:
        """Called before a step is started."""
        if self._folder and step == self._first_step + FIRST - 1:
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True)
            self._is_open = True

    def after(self, step: int, result: object) -> None:
        """Called with what a step gave."""
        if self._is_open and step == self._first_step + LAST - 1:
            jax.block_until_ready(result)
            self.close()

    def close(self) -> None:
        """Writes the trace."""
        if self._is_open:
            self._is_open = False
            jax.profiler.stop_trace()
            self._say(
                f"trace of some steps in {self._folder}: tensorboard --logdir {self._folder}, or open its "
                "perfetto_trace.json.gz at ui.perfetto.dev"
            )
