"""The run folder: which configurations may resume it, writes that fail at any moment, and its lock."""

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest
from checkpoint_cases import MODEL
from failing_writes import fail_after

from transformer_jax.checkpoint import manifest, run_dir
from transformer_jax.checkpoint.run_dir import RunDir, locked, truncate_after
from transformer_jax.config import Config
from transformer_jax.types import UserError

CONFIG = Config(model=MODEL)


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "parent" / "run")
    run.open_for_training(CONFIG)
    assert run.load_config() == CONFIG
    return run


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        CONFIG.with_changes(training={"num_steps": 5}),
        CONFIG.with_changes(training={"log_every": 7, "keep_checkpoints": 9, "mesh_fsdp": 2, "accumulate": 2}),
        CONFIG.with_changes(decoding={"beam_size": 1}),
        CONFIG.with_changes(data={"prefetch": 1}),
    ],
)
def test_fields_that_change_no_step_may_change(run, config):
    run.open_for_training(config)
    assert run.load_config() == config


def test_another_configuration_raises_with_its_fields(run):
    other = CONFIG.with_changes(
        model={"d_ff": 64, "norm_position": "pre"}, training={"seed": 3, "num_steps": 5, "log_every": 7}
    )
    with pytest.raises(UserError) as error:
        run.open_for_training(other)
    assert str(run.path) in str(error.value)
    fields = "model.d_ff 16 -> 64, model.norm_position 'post' -> 'pre', training.seed 0 -> 3. Give another --workdir"
    assert f"another configuration: {fields}" in str(error.value)
    assert run.load_config() == CONFIG


def test_folder_with_unrelated_files_is_not_changed(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for path, message in (
        (tmp_path, r"exists and is not a run \(no config.json\): give another --workdir"),
        (tmp_path / "thesis.tex", "exists and is not a run"),
        (tmp_path / "thesis.tex" / "run", r"cannot make the run folder .*thesis.tex/run: Not a directory"),
    ):
        with pytest.raises(UserError, match=message):
            RunDir(path).open_for_training(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    RunDir(tmp_path / "empty").open_for_training(CONFIG)


def test_a_folder_without_config_is_not_a_run(tmp_path):
    with pytest.raises(UserError, match=r"is not a run: it has no config.json"):
        RunDir(tmp_path).load_config()


@pytest.mark.parametrize("name", ["data.sha256", "config.json"], ids=["new file", "existing file"])
@pytest.mark.parametrize("writes", range(4))
def test_run_is_valid_after_a_write_that_fails_at_any_moment(name, writes, run, monkeypatch):
    fail_after(writes, monkeypatch, manifest, run_dir)
    with contextlib.suppress(UserError):
        run.write(name, CONFIG.to_json() + "\n")
    monkeypatch.undo()
    assert run.load_config() == CONFIG
    run.write(name, CONFIG.to_json())
    assert run.load_config() == CONFIG
    (run.path / name).write_text(CONFIG.to_json() + "\n")
    with pytest.raises(UserError, match=f"{name} has"):
        run.load_config()


def test_rows_after_a_step_and_damaged_lines_are_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "text": "one line\u2028for JSON,\x85two for Python"},
        {"step": 3, "loss": 1.0},
        {"step": 2, "valid_loss": 1.0},
        {"step": "1", "loss": 1.0},
        {"step": None, "loss": 1.0},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("\n".join([*lines, '{"step": 2, "text": "ö']).encode()[:-1])  # truncated within a letter
    truncate_after(path, 2)
    assert path.read_text(encoding="utf-8") == "\n".join([lines[0], lines[1], lines[3], ""])
    truncate_after(path, 0)
    assert path.read_text() == ""
    truncate_after(tmp_path / "none.jsonl", 0)
    assert not (tmp_path / "none.jsonl").exists()


HOLDER = """
import sys, time
from pathlib import Path
from transformer_jax.checkpoint.run_dir import RunDir, locked
with locked(RunDir(Path(sys.argv[1]))):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_run_is_locked_until_its_process_is_killed(tmp_path):
    run = RunDir(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    message = f"in use by process {holder.pid} on {socket.gethostname()}: wait until"
    try:
        assert holder.stdout.readline() == "locked\n"
        for _ in range(2):
            with pytest.raises(UserError, match=message), locked(run):
                pytest.fail("two processes have the lock")
    finally:
        holder.kill()
        holder.communicate()
    for _ in range(2):
        with locked(run):
            assert run.lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
