"""Which pairs stand in which batch, as `data.batching` of a configuration says."""

from transformer_jax.config import Config
from transformer_jax.data.batching import BatchPlan, Plan, choose_shapes
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.data.packing import PackedPlan


def plan_batches(config: Config, encoded: EncodedPairs) -> Plan:
    """The plan of a run's training batches."""
    data, seed = config.data, config.training.seed
    lengths = encoded.source_lengths, encoded.target_lengths
    if data.batching == "packed":
        return PackedPlan(*lengths, data.packed_length, data.batch_tokens, seed)
    return BatchPlan(*lengths, choose_shapes(*lengths, data.batch_tokens, data.max_shapes), seed)
