"""One process at a time writes a run."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from transformer_jax.errors import UserError
from transformer_jax.run.folder import RunFolder

try:
    import fcntl
except ImportError:  # a system that has other locks, where nobody is kept out
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(run: RunFolder) -> Iterator[None]:
    """Keeps other processes from writing the run while the context is open.

    The lock is the operating system's, so it ends with the process, however that ends.

    Raises:
        UserError: another process has it, which is named.
    """
    with run.lock.open("a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"{run.path} is in use by {file.read(200).strip() or 'another process'}: wait for its end or stop "
                    "it, or give another --workdir"
                ) from None
            except OSError:
                pass  # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
