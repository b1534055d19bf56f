"""A failure of the disk in a place that does not expect it is reported in one line with the fix."""

import os

import pytest

from transformer_jax import cli
from transformer_jax.evaluation import evaluate as score_commands


@pytest.mark.parametrize(("number", "fix"), [(28, "Free some space on the disk"), (5, "Check the disk")])
def test_failure_of_the_disk_is_one_line_with_the_fix(capsys, monkeypatch, number, fix):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number), "cache/ids.npy")

    monkeypatch.setattr(score_commands, "average", fails)
    assert cli.main(["average", "nowhere", "--no-compilation-cache"]) == 1
    assert capsys.readouterr().err.startswith(f"error: {os.strerror(number)}: cache/ids.npy. {fix}")
