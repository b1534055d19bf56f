"""A command run in the process of the tests: behind the fixture `cli`."""

import io
import re
import sys
import types
from typing import NamedTuple

from transformer_jax import cli


class Done(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str


def run_command(monkeypatch, capsysbinary, *args, stdin=b""):
    """Its status and what it wrote."""
    capsysbinary.readouterr()
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
    try:
        status = cli.main(["--no-malloc-tuning", *map(str, args)])
    except SystemExit as error:
        status = error.code
    out, err = capsysbinary.readouterr()
    return Done(status, out.decode(), err.decode())


def plain(text):
    """Without the frames that tyro draws, and in one line."""
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", text).split())
