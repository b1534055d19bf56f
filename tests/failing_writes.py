"""A disk that fails after a number of atomic writes."""

from transformer_jax.runtime import files
from transformer_jax.types import UserError


def fail_after(count, monkeypatch, *modules):
    """Make every atomic write of these modules after the first `count` fail, as on a full disk."""
    done = []

    def write_or_fail(path, text):
        if len(done) == count:
            raise UserError(f"{path}: cannot be written")
        done.append(path)
        files.write_atomically(path, text)

    for module in modules:
        monkeypatch.setattr(module, "write_atomically", write_or_fail)
