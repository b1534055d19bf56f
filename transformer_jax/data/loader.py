"""The training data of a run: batches as a pure function of their number, prepared ahead of the step with Grain."""

from collections.abc import Iterator
from dataclasses import dataclass

import grain
import numpy as np

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batching import BatchPlan, Plan, Rows, choose_shapes, make_batch
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.data.packing import PackedPlan
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.types import ALL_ROWS, Batch, RowParts


def plan_batches(config: Config, encoded: EncodedPairs) -> Plan:
    """Return the plan that assigns the encoded training pairs to batches, bucketed or packed."""
    data, seed = config.data, config.training.seed
    lengths = encoded.source_lengths, encoded.target_lengths
    if data.batching == "packed":
        return PackedPlan(*lengths, data.packed_length, data.batch_tokens, seed)
    return BatchPlan(*lengths, choose_shapes(*lengths, data.batch_tokens, data.max_shapes), seed)


@dataclass(frozen=True)
class TrainingData:
    """The training batches of a run: batch i is a pure function of the encoded pairs, the plan and i."""

    encoded: EncodedPairs
    plan: Plan
    model: ModelConfig
    tokenizers: TokenizerPair | None = None  # without tokenizers, `describe` has ids only
    row_multiple: int = 1  # rows are rounded up to a multiple of this number, with empty rows
    parts: RowParts = ALL_ROWS  # the rows of every batch that this process gets
    prefetch: int = 8  # number of batches to prepare ahead, at least 1

    def __post_init__(self) -> None:
        if self.row_multiple % self.parts.num_parts:
            raise ValueError(f"row_multiple {self.row_multiple} is not a multiple of the {self.parts.num_parts} parts")

    def batch(self, index: int) -> Batch:
        """Return this process's rows of global batch `index`, from 0 on over all epochs."""
        return make_batch(self.encoded, self.plan.rows(int(index)), self.model, self.row_multiple, self.parts)

    def padding_batches(self) -> list[Batch]:
        """Return one all-padding batch per shape in the plan, for ahead-of-time compilation."""
        none = np.zeros(0, np.int64)
        in_row = none if isinstance(self.plan, PackedPlan) else None
        return [
            make_batch(self.encoded, Rows(shape, none, in_row), self.model, self.row_multiple, self.parts)
            for shape in self.plan.shapes
        ]

    def describe(self, index: int) -> list[dict[str, object]]:
        """Return each pair of global batch `index`: its index in the encoded corpus, its text and its token ids."""
        pairs = self.plan.rows(index).pairs.tolist()
        described: list[dict[str, object]] = [{"pair": pair} for pair in pairs]
        for side in ("source", "target"):
            ids = [getattr(self.encoded, side)(pair).tolist() for pair in pairs]
            texts = getattr(self.tokenizers, side).decode(ids) if self.tokenizers else None
            for number, row in enumerate(described):
                row |= ({side: texts[number]} if texts else {}) | {f"{side}_ids": ids[number]}
        return described

    def iterator(self, start: int, stop: int) -> Iterator[Batch]:
        """Yield global batches `start` to `stop - 1` in order, prepared up to `prefetch` ahead by two threads."""
        if start >= stop:
            return iter(())
        options = grain.ReadOptions(num_threads=min(2, self.prefetch), prefetch_buffer_size=self.prefetch)
        return iter(grain.MapDataset.range(start, stop).map(self.batch).to_iter_dataset(options))
