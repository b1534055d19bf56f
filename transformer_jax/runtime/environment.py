"""Process settings that must be in place before jax is imported: allocator, compilation cache, determinism."""

import ctypes
import os
from pathlib import Path

VARIABLE = "JAX_COMPILATION_CACHE_DIR"

FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")
"""With these flags XLA uses no operation that sums in any order and no kernel because it was the fastest this time."""

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def tune_malloc() -> bool:
    """Keep freed memory in the process. Call it before jax starts threads. Returns False without glibc."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(name, value) == 1 for name, value in settings)


def use_compilation_cache() -> None:
    """Keep compiled code in the user's cache folder, unless the environment names a folder or the user has no home.

    jax treats an unreadable entry as missing, with a warning, and ignores an unwritable folder.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return
    os.environ.setdefault(VARIABLE, str(home / "transformer_jax" / "compiled"))


def make_deterministic() -> None:
    """Make XLA choose operations that give the same bits each time on a GPU."""
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
