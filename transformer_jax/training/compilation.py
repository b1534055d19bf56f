"""Compiling the training step for each batch shape before the first step, not in the middle of the training."""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from transformer_jax.types import Batch


class CompiledStep:
    """A jitted step `(state, batch, rng) -> ...`, compiled once a batch shape.

    Args:
        step: from `jax.jit`.
        state: a state like those it will be called with.
        rng: a key like those.
        warmup_batches: one batch per shape, on the devices. Other shapes are compiled when they first occur, with a
            warning unless `warmup_batches` is empty.
        say: called with a line for each shape that is compiled.
    """

    def __init__(
        self, step: Any, state: Any, rng: Any, warmup_batches: Sequence[Batch], say: Callable[[str], None]
    ) -> None:
        self._step = step
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._is_announced = bool(warmup_batches)
        start = time.monotonic()
        # XLA lets go of Python's lock while it compiles.
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as threads:
            waiting: dict[Future[Any], Batch] = {
                threads.submit(step.lower(state, batch, rng).compile): batch for batch in warmup_batches
            }
            for number, future in enumerate(as_completed(waiting), 1):
                batch = waiting[future]
                self._compiled[_shapes(batch)] = future.result()
                seconds = time.monotonic() - start
                say(f"compiled {number} of {len(warmup_batches)}, {_describe(batch)}, after {seconds:.1f} s")

    def __call__(self, state: Any, batch: Batch, rng: Any) -> Any:
        """One step."""
        compiled = self._compiled.get(_shapes(batch))
        if compiled is None:
            if self._is_announced:
                warnings.warn(f"{_describe(batch)} was not warmup_batches and compiles now", stacklevel=2)
            compiled = self._compiled[_shapes(batch)] = self._step.lower(state, batch, rng).compile()
        return compiled(state, batch, rng)


def _shapes(batch: Batch) -> tuple[Any, ...]:
    return tuple(None if array is None else array.shape for array in batch)


def _describe(batch: Batch) -> str:
    rows, src_length = batch.src.shape
    return f"{rows} rows of {src_length} + {batch.tgt_in.shape[1]} tokens"
