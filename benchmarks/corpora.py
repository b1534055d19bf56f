"""Make corpora of random ids with realistic sentence lengths, and plans of their batches."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from transformer_jax.data.batching import BatchPlan, Plan, choose_shapes
from transformer_jax.data.encoding import EncodedPairs
from transformer_jax.data.packing import PackedPlan
from transformer_jax.types import Batch

# Mean and deviation of log(source tokens) and of log(target / source), EOS counted. multi30k: counted from its 29,000
# training pairs in 10,000 byte pairs; wmt: from the 3,003 of newstest2014, words times 1.25 (en) and 1.35 (de).
LENGTHS = {"multi30k": (2.647, 0.286, -0.003, 0.163), "wmt": (3.125, 0.509, -0.010, 0.185)}
LONGEST = 256


def make_corpus(name: str, pairs: int, vocab_size: int) -> EncodedPairs:
    """Return a corpus with the lengths `LENGTHS`. Each call returns equal ids."""
    rng = np.random.default_rng(0)
    mean, deviation, ratio_mean, ratio_deviation = LENGTHS[name]
    source = rng.lognormal(mean, deviation, pairs)
    target = source * rng.lognormal(ratio_mean, ratio_deviation, pairs)
    sides = []
    for lengths in (source, target):
        counts = np.clip(np.rint(lengths), 2, LONGEST).astype(np.int64) - 1  # EOS is added in batches
        ids = rng.integers(4, vocab_size, counts.sum()).astype(np.uint16)
        sides += [ids, np.concatenate([[0], np.cumsum(counts)])]
    return EncodedPairs(*sides, source_eos=True)


def make_plan(kind: str, encoded: EncodedPairs, batch_tokens: int, max_shapes: int = 12) -> Plan:
    """Return the plan for batches of `batch_tokens` tokens on each side."""
    lengths = encoded.source_lengths, encoded.target_lengths
    if kind == "bucketed":
        return BatchPlan(*lengths, choose_shapes(*lengths, batch_tokens, max_shapes), seed=0)
    return PackedPlan(*lengths, min(LONGEST, batch_tokens), batch_tokens, seed=0)


def count_tokens(batch: Batch) -> int:
    """Return the number of non-padding tokens of both sides."""
    return int(np.count_nonzero(batch.src) + np.count_nonzero(batch.tgt_out))


def entropy(items: Iterable[Any]) -> float:
    """Return the entropy of the frequencies of items, in bits."""
    counts: dict[Any, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    shares = np.array(list(counts.values())) / max(1, sum(counts.values()))
    return float(-(shares * np.log2(shares)).sum()) + 0.0
