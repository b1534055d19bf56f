"""Sizes of models and batches to measure, shared by all sides."""

from typing import Any, NamedTuple

import numpy as np


class Size(NamedTuple):
    """A model of the paper's form and a batch for it. Without biases in attention, tied embeddings, post-norm."""

    d_model: int
    d_ff: int
    num_heads: int
    num_layers: int
    vocab_size: int
    rows: int
    length: int

    def model(self, **changes: Any) -> dict[str, Any]:
        """As keyword arguments of `ModelConfig`, with dropout 0.1 where the paper has it."""
        sizes = self._asdict()
        fields = {name: sizes[name] for name in ("d_model", "d_ff", "num_heads", "num_layers", "vocab_size")}
        return fields | {"residual_dropout": 0.1, "norm_epsilon": 1e-5} | changes


SIZES = {
    "nano": Size(32, 64, 4, 1, 64, 4, 8),  # for tests of the scripts
    "tiny": Size(128, 512, 4, 2, 1_000, 64, 32),
    "small": Size(256, 1024, 4, 3, 8_000, 32, 64),
    "base": Size(512, 2048, 8, 6, 37_000, 32, 64),
    "big": Size(1024, 4096, 16, 6, 37_000, 32, 64),
}


def random_batch(vocab_size: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`src`, `tgt_in`, `tgt_out`: random ids, each sentence 85 to 100 % of `length` long, the rest padding (id 0)."""
    rng = np.random.default_rng(0)
    src, tgt_out = (rng.integers(4, vocab_size, (rows, length)).astype(np.int32) for _ in range(2))
    for side in (src, tgt_out):
        ends = rng.integers(-(-85 * length // 100) - 1, length, rows)
        side[np.arange(length) > ends[:, None]] = 0
        side[np.arange(rows), ends] = 2
    tgt_in = np.concatenate([np.ones((rows, 1), np.int32), tgt_out[:, :-1]], axis=1)
    tgt_in[tgt_in == 2] = 0
    return src, tgt_in, tgt_out
