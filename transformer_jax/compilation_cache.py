"""What XLA has compiled is kept on disk, so that the same command starts faster the next time."""

import os
from pathlib import Path

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
