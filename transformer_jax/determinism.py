"""The same bits in every run, on GPUs too. On CPUs a run has them in any case."""

import os

FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")
"""XLA takes no operation whose sums come in any order, and no kernel because it was the fastest this time."""


def make_deterministic() -> None:
    """Must be called before jax is imported."""
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *FLAGS]).strip()
