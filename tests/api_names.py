"""The names of the public interface."""

import ast
from pathlib import Path

import transformer_jax


def api() -> dict[str, str]:
    """Return {name: module} of `__init__.pyi`."""
    tree = ast.parse(Path(transformer_jax.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}
