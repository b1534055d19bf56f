"""Checksums and strict JSON."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def to_json(tree: Any, indent: int | None = None) -> str:
    """A tree of dicts, lists and scalars as JSON, in one line unless `indent` says otherwise.

    >>> to_json({"perplexity": float("inf"), "text": "ä"})
    '{"perplexity": null, "text": "ä"}'
    """
    # A lone surrogate, which UTF-8 cannot hold, is written as its escape.
    text = json.dumps(_finite(tree), ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree
