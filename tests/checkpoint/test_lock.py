"""Two processes do not write one run, and a process that is killed leaves no lock behind."""

import os
import socket
import subprocess
import sys

import pytest

from transformer_jax.checkpoint.run_dir import RunDir, locked
from transformer_jax.types import UserError

HOLDER = """
import sys, time
from pathlib import Path
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.checkpoint.run_dir import locked
with locked(RunDir(Path(sys.argv[1]))):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_run_in_use_is_left_alone_until_its_process_is_killed(tmp_path):
    run = RunDir(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        for _ in range(2):
            with (
                pytest.raises(UserError, match=f"in use by process {holder.pid} on {socket.gethostname()}: wait until"),
                locked(run),
            ):
                pytest.fail("two processes have the lock")
    finally:
        holder.kill()
        holder.communicate()
    with locked(run):
        assert run.lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    with locked(run):
        pass
