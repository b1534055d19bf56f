"""Choose the batch plan of a run and prepare its batches ahead of the training step with Grain."""

from collections.abc import Iterator

import grain

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batching import BatchPlan, Plan, choose_shapes, make_batch
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.data.packing import PackedPlan
from transformer_jax.types import ALL_ROWS, Batch, RowParts


def plan_batches(config: Config, encoded: EncodedPairs) -> Plan:
    """The plan of a run's training batches."""
    data, seed = config.data, config.training.seed
    lengths = encoded.source_lengths, encoded.target_lengths
    if data.batching == "packed":
        return PackedPlan(*lengths, data.packed_length, data.batch_tokens, seed)
    return BatchPlan(*lengths, choose_shapes(*lengths, data.batch_tokens, data.max_shapes), seed)


class BatchSource:
    """Global batches start to stop - 1 as a random-access source: item i is global batch start + i, or parts of it."""

    def __init__(
        self,
        encoded: EncodedPairs,
        plan: Plan,
        model: ModelConfig,
        start: int,
        stop: int,
        row_multiple: int = 1,
        parts: RowParts = ALL_ROWS,
    ) -> None:
        if row_multiple % parts.num_parts:
            raise ValueError(f"row_multiple {row_multiple} is not a multiple of the {parts.num_parts} parts")
        self._encoded, self._plan, self._model = encoded, plan, model
        self._start, self._stop = start, stop
        self._row_multiple, self._parts = row_multiple, parts

    def __len__(self) -> int:
        return max(0, self._stop - self._start)

    def __getitem__(self, index: int) -> Batch:
        rows = self._plan.rows(self._start + int(index))
        return make_batch(self._encoded, rows, self._model, self._row_multiple, self._parts)


def batch_iterator(
    encoded: EncodedPairs,
    plan: Plan,
    model: ModelConfig,
    start: int,
    stop: int,
    row_multiple: int = 1,
    prefetch: int = 8,
    parts: RowParts = ALL_ROWS,
) -> Iterator[Batch]:
    """Global batches `start` to `stop - 1` in order, made up to `prefetch` ahead by two threads.

    Args:
        encoded: the training pairs.
        plan: their order.
        model: special ids, decoder start, source EOS.
        start: global batches consumed already.
        stop: global batches consumed at the end.
        row_multiple: rows are rounded up to a multiple of it, with empty rows.
        prefetch: batches made ahead; 1 or more.
        parts: which rows of every batch this process gets; their number divides `row_multiple`.
    """
    source = BatchSource(encoded, plan, model, start, stop, row_multiple, parts)
    if not len(source):
        return iter(())
    options = grain.ReadOptions(num_threads=min(2, prefetch), prefetch_buffer_size=prefetch)
    return iter(grain.MapDataset.source(source).to_iter_dataset(options))
