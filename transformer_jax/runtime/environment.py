"""Process settings that must be in place before jax is imported: allocator, compilation cache, determinism."""

import ctypes
import os
from pathlib import Path

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def tune_malloc() -> bool:
    """Must be called before jax starts its threads. Returns False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(name, value) == 1 for name, value in settings)


VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def use_compilation_cache() -> None:
    """Must be called before jax is imported. A folder that the environment names already is left as it is.

    jax takes an entry that it cannot read for missing, with a warning, and an unwritable folder too. A user without a
    home has no cache.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return
    os.environ.setdefault(VARIABLE, str(home / "transformer_jax" / "compiled"))


FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")
"""XLA takes no operation whose sums come in any order, and no kernel because it was the fastest this time."""


def make_deterministic() -> None:
    """Must be called before jax is imported."""
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([given, *FLAGS]).strip()
