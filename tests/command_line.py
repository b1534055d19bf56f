"""Run a command in the process of the tests, for the fixture `cli`."""

import io
import re
import sys
import types
from typing import NamedTuple

from transformer_jax import cli


class Done(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str


def run_command(monkeypatch, capsysbinary, *args, stdin=b""):
    """Run a command, and return its exit status and output."""
    capsysbinary.readouterr()
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False))
    try:
        status = cli.main(["--no-malloc-tuning", *map(str, args)])
    except SystemExit as error:
        status = error.code
    out, err = capsysbinary.readouterr()
    return Done(status, out.decode(), err.decode())


def plain(text):
    """Return text in one line, without the frames that tyro draws."""
    return " ".join(re.sub(r"[│─╭╮╰╯]", " ", text).split())
