"""A disk that is full wherever nobody looks for it: one line and the cure."""

import os

import pytest

from transformer_jax import cli
from transformer_jax.evaluation import evaluate as score_commands


@pytest.mark.parametrize(("number", "cure"), [(28, "make room on the disk, and run it again"), (5, "run again with")])
def test_a_full_disk_is_the_users_to_mend(capsys, monkeypatch, number, cure):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number), "cache/ids.npy")

    monkeypatch.setattr(score_commands, "average", fails)
    assert cli.main(["average", "nowhere", "--no-compilation-cache"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: OSError: [Errno {number}] {os.strerror(number)}: 'cache/ids.npy'\n{cure}")
