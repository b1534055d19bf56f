"""The run folder: what may be opened for training, and files that are whole whatever happens."""

import contextlib
import dataclasses
import json

import pytest
from failing_writes import fail_after

from transformer_jax.checkpoint import manifest, run_dir
from transformer_jax.checkpoint.run_dir import RunDir, truncate_after
from transformer_jax.config import Config, ModelConfig, TrainingConfig
from transformer_jax.types import UserError

CONFIG = Config(model=ModelConfig(vocab_size=16, d_model=16, num_layers=1, num_heads=2, d_ff=32))


def changed(section, **values):
    return dataclasses.replace(CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **values)})


def test_a_new_run_holds_its_configuration(tmp_path):
    run = RunDir(tmp_path / "deep" / "run")
    run.open_for_training(CONFIG)
    assert run.load_config() == CONFIG
    run.open_for_training(CONFIG)
    assert run.load_config() == CONFIG


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("training", {"num_steps": 5}),
        ("training", {"log_every": 7, "keep_checkpoints": 9, "mesh_fsdp": 2, "accumulate": 2}),
        ("decoding", {"beam_size": 1}),
        ("data", {"prefetch": 1}),
    ],
)
def test_what_changes_no_step_may_change(section, values, tmp_path):
    run = RunDir(tmp_path)
    run.open_for_training(CONFIG)
    run.open_for_training(changed(section, **values))
    assert run.load_config() == changed(section, **values)


def test_another_configuration_is_refused_field_by_field(tmp_path):
    run = RunDir(tmp_path)
    run.open_for_training(CONFIG)
    other = dataclasses.replace(
        changed("model", d_ff=64, norm_position="pre"), training=TrainingConfig(seed=3, num_steps=5)
    )
    with pytest.raises(UserError) as error:
        run.open_for_training(other)
    assert str(tmp_path) in str(error.value)
    fields = "model.d_ff 32 -> 64, model.norm_position 'post' -> 'pre', training.seed 0 -> 3. Give another --workdir"
    assert f"another configuration: {fields}" in str(error.value)
    assert run.load_config() == CONFIG


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match=r"exists and is not a run \(no config.json\): give another --workdir"):
        RunDir(tmp_path).open_for_training(CONFIG)
    with pytest.raises(UserError, match="exists and is not a run"):
        RunDir(tmp_path / "thesis.tex").open_for_training(CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    RunDir(tmp_path / "empty").open_for_training(CONFIG)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the run folder .*file/run: Not a directory"):
        RunDir(tmp_path / "file" / "run").open_for_training(CONFIG)


def test_what_is_no_run_has_no_configuration(tmp_path):
    with pytest.raises(UserError, match=r"is not a run: it has no config.json"):
        RunDir(tmp_path).load_config()


@pytest.mark.parametrize("name", ["data.sha256", "config.json"], ids=["new file", "existing file"])
@pytest.mark.parametrize("writes", range(4))
def test_run_is_valid_after_a_write_that_fails_at_any_moment(name, writes, tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.open_for_training(CONFIG)
    fail_after(writes, monkeypatch, manifest, run_dir)
    with contextlib.suppress(UserError):
        run.write(name, CONFIG.to_json() + "\n")
    monkeypatch.undo()
    assert run.load_config() == CONFIG
    run.write(name, CONFIG.to_json())
    assert run.load_config() == CONFIG
    (tmp_path / name).write_text(CONFIG.to_json() + "\n")
    with pytest.raises(UserError, match=f"{name} has"):
        run.load_config()


def test_rows_after_a_step_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "text": "one line\u2028for JSON,\x85two for Python"},
        {"step": 3, "loss": 1.0},
        {"step": 2, "valid_loss": 1.0},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("\n".join([*lines, '{"step": 2, "text": "ö']).encode()[:-1])  # torn within a letter
    truncate_after(path, 2)
    assert path.read_text(encoding="utf-8") == "\n".join([lines[0], lines[1], lines[3], ""])
    truncate_after(path, 0)
    assert path.read_text() == ""
    truncate_after(tmp_path / "none.jsonl", 0)
    assert not (tmp_path / "none.jsonl").exists()
