"""The session of every command: start-up, log lines, warnings, system errors and closed streams."""

import errno
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from processes import xla_flags

from transformer_jax.evaluation import evaluate as score_commands

ROOT = Path(__file__).resolve().parents[2]


def test_system_errors_are_reported_in_one_line(cli, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x")

    monkeypatch.setattr(score_commands, "average", fails)
    line = "error: No space left on device: runs/x. Free some space on the disk and run the command again\n"
    assert cli("average", "nowhere") == (1, "", line)
    assert cli("average", "nowhere", "--traceback").err.startswith("Traceback")


@pytest.mark.parametrize(
    ("closed", "message"), [("<&-", "standard input is closed"), (">&-", "standard output is closed")]
)
def test_translate_with_a_closed_stream_fails_with_one_line(tiny, closed, message):
    code = "import sys; from transformer_jax.cli import main; sys.exit(main())"
    command = f'"$0" -c "{code}" translate "$1" {closed}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(1)}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, str(tiny.run)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args",
    [
        *(["--help"], ["train", "--help"], ["translate", "--help"], ["evaluate", "--help"], ["table3", "--help"]),
        *(
            ["trian"],
            ["train", "--modle.d-ff", "3"],
            ["translate", "x", "--beam-size", "0"],
            ["table3", "--scale", "3"],
        ),
        ["translate", "x", "--sample", "--top-p", "0"],
    ],
    ids=" ".join,
)
def test_help_and_usage_errors_do_not_import_jax(args):
    code = "import sys; from transformer_jax.cli import main; s = main(); print('jax' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "False"


def test_control_characters_of_messages_are_escaped(cli, tmp_path):
    done = cli("translate", tmp_path / "a\x1b[31mb")
    assert done.status == 1
    assert "a\\x1b[31mb is not a run" in done.err


def test_log_records_and_warnings_are_lines_on_stderr(cli, monkeypatch):
    def logs(*_, **__):
        logger = logging.getLogger("transformer_jax.anything")
        logger.info("step %d", 3)
        logger.warning("slow \x1b[0m disk")
        warnings.warn("take care", stacklevel=2)
        return [2]

    monkeypatch.setattr(score_commands, "average", logs)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.showwarning
        done = cli("average", "r")
        assert warnings.showwarning is before
    assert done.err.splitlines() == ["step 3", "warning: slow \\x1b[0m disk", "warning: take care"]
    assert done.out == "r/average: the average of the steps 2\n"
    assert not logging.getLogger("transformer_jax").handlers


def test_warning_during_parsing_does_not_initialize_devices():
    code = """
import socket, sys, warnings
from transformer_jax.cli.session import session
from transformer_jax.runtime.distributed import main_process_logger

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % free.getsockname()[1]

def command():
    warnings.warn("old field", stacklevel=1)
    main_process_logger("transformer_jax.anything").info("a notice")
    import jax

    jax.distributed.initialize(address, num_processes=1, process_id=0)

sys.exit(session(command))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(1)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[:2] == ["warning: old field", "a notice"]
