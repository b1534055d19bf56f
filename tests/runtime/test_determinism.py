"""What `--deterministic` asks of XLA, and when."""

import os

from transformer_jax import cli


def test_it_is_asked_before_jax_is_there_and_by_those_who_want_it_alone(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    assert cli.main(["--help"]) == 0
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to="
    assert cli.main(["--help", "--deterministic"]) == 0
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to= --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
