"""Compile the training step for every batch shape before the first step, not in the middle of training."""

import os
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from jax.stages import Compiled, Wrapped
from jaxtyping import PyTree

from transformer_jax.runtime.distributed import main_process_logger
from transformer_jax.types import Batch

Shapes = tuple[tuple[int, ...] | None, ...]

logger = main_process_logger(__name__)


class CompiledStep:
    """A jitted step `(state, batch, controls) -> ...`, compiled once per batch shape.

    Another shape than those of `warmup_batches` is compiled when it first occurs, with a warning unless there are none.
    """

    def __init__(self, step: Wrapped, state: PyTree, controls: PyTree, warmup_batches: Sequence[Batch]) -> None:
        self._step = step
        self._compiled: dict[Shapes, Compiled] = {}
        self._is_warmed_up = bool(warmup_batches)
        start = time.monotonic()
        # XLA releases Python's lock while it compiles.
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as threads:
            waiting: dict[Future[Compiled], Batch] = {
                threads.submit(step.lower(state, batch, controls).compile): batch for batch in warmup_batches
            }
            for number, future in enumerate(as_completed(waiting), 1):
                batch = waiting[future]
                self._compiled[_shapes(batch)] = future.result()
                progress = number, len(warmup_batches), _describe_shape(batch), time.monotonic() - start
                logger.info("compiled %d of %d, %s, after %.1f s", *progress)

    def __call__(self, state: PyTree, batch: Batch, controls: PyTree) -> Any:
        """Run one step."""
        compiled = self._compiled.get(_shapes(batch))
        if compiled is None:
            if self._is_warmed_up:
                warnings.warn(f"{_describe_shape(batch)} is not among the warmup batches: compiling now", stacklevel=2)
            compiled = self._compiled[_shapes(batch)] = self._step.lower(state, batch, controls).compile()
        return compiled(state, batch, controls)


def _shapes(batch: Batch) -> Shapes:
    return tuple(None if array is None else array.shape for array in batch)


def _describe_shape(batch: Batch) -> str:
    rows, src_length = batch.src.shape
    return f"{rows} rows of {src_length} + {batch.tgt_in.shape[1]} tokens"
