"""`transformer-jax doctor`: each check finds its problem and names the fix."""

import dataclasses
import re
import shutil
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import cli, doctor
from transformer_jax.checkpoint.checkpoint import load_params, save_params
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError


@pytest.fixture
def run(capsys, monkeypatch):
    """`run("FOLDER")` gives the exit status and the lines by name."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def call(*args):
        status = cli.main(["doctor", *map(str, args), "--no-compilation-cache"])
        lines = capsys.readouterr().out.splitlines()
        assert all(line[:5] in ("ok   ", "FIX  ") for line in lines)
        assert status == any(line.startswith("FIX") for line in lines), lines
        return status, {line[5:].partition(": ")[0]: line for line in lines}

    return call


def test_healthy_machine_and_run_pass_all_checks(run, tiny):
    status, lines = run()
    assert status == 0
    assert list(lines) == ["packages", "devices", "precision", "compile cache", "cluster", "memory"]
    assert "jax " in lines["packages"]
    assert "8 x cpu (cpu)" in lines["devices"]

    status, lines = run(tiny.run)
    assert status == 0
    assert "200 pairs from " in lines["data, train"]
    assert "bpe of 300 entries: decoding restores the encoded text" in lines["tokenizer"]
    assert "checkpoints/4 is readable and complete" in lines["checkpoint"]
    assert "7 checkpoints need" in lines["disk"]
    assert "data 8, fsdp 1, tensor 1" in lines["mesh"]

    status, lines = run(tiny.run / "config.json")
    assert status == 0
    assert "checkpoint" not in lines


def test_failing_check_is_a_finding_and_later_checks_run(run, monkeypatch):
    def fails():
        raise RuntimeError("the driver is too old")

    monkeypatch.setitem(doctor.MACHINE_CHECKS, "devices", fails)
    status, lines = run()
    assert status == 1
    assert lines["devices"].startswith("FIX  devices: cannot be checked: ")
    assert "the driver is too old" in lines["devices"]
    assert lines["memory"].startswith("ok")


def changed(tiny, **sections) -> Config:
    parts = {name: dataclasses.replace(getattr(tiny.config, name), **fields) for name, fields in sections.items()}
    return dataclasses.replace(tiny.config, **parts)


@pytest.mark.parametrize(
    ("sections", "name", "message"),
    [
        ({"data": {"directory": "/nowhere"}}, "data, train", "no file /nowhere/train.en"),
        ({"training": {"mesh_fsdp": 3}}, "mesh", "do not multiply to the 8 devices"),
        ({"model": {"d_ff": 10**12}}, "memory", "a smaller model"),
        ({"model": {"d_ff": 10**12}}, "disk", "lower training.keep_checkpoints"),
    ],
)
def test_recipe_unsuitable_for_the_machine_is_reported(run, tiny, tmp_path, sections, name, message):
    (tmp_path / "config.json").write_text(changed(tiny, **sections).to_json())
    _, lines = run(tmp_path / "config.json")
    assert lines[name].startswith("FIX")
    assert message in lines[name]


def test_disk_space_includes_the_average_of_parameters(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_bytes", str)
    facts = [doctor._disk(config, tmp_path) for config in (tiny.config, changed(tiny, training={"ema_decay": 0.9}))]
    plain, averaged = (int(re.search(r"7 checkpoints need (\d+)", fact)[1]) for fact in facts)
    assert averaged * 3 == plain * 4


def test_damaged_files_of_a_run_are_reported(run, tiny, tmp_path):
    copy = tiny.copy(tmp_path / "run")
    (copy / "tokenizer" / "joint.json").write_text("{")
    for step in ("2", "4"):
        shutil.rmtree(copy / "checkpoints" / step / "state")
    assert "tokenizer/joint.json has 1 bytes" in run(copy)[1]["configuration"]
    RunDir(copy).seal()
    _, lines = run(copy)
    assert {name for name, line in lines.items() if line.startswith("FIX")} == {"tokenizer", "checkpoint"}
    shutil.rmtree(copy / "checkpoints")
    RunDir(copy).write("config.json", '{"model": {"d_modle": 1}}')
    _, lines = run(copy)
    assert "unknown field model.d_modle" in lines["configuration"]
    assert run(tmp_path / "nothing")[1]["configuration"].startswith("FIX")


def test_parameters_that_are_not_finite_are_reported(tiny, tmp_path):
    params = load_params(tiny.run / "checkpoints" / "4", abstract_params(tiny.config.model))
    params["embedding"]["table"] = params["embedding"]["table"].at[0, 0].set(jnp.nan)
    save_params(tmp_path / "checkpoints" / "1", params)
    with pytest.raises(UserError, match="some parameters are not finite"):
        doctor._checkpoint(tiny.config, RunDir(tmp_path))


def test_tokenizer_that_does_not_restore_text_is_reported(tiny, tmp_path):
    shutil.copytree(tiny.run / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "tokenizer" / "joint.json"
    file.write_text(file.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true', 1))
    with pytest.raises(UserError, match="Restore its files"):
        doctor._tokenizer(tiny.config, RunDir(tmp_path))


def test_broken_machine_is_reported(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(doctor.VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="cannot be written"):
        doctor._compile_cache()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert "SLURM_JOB_ID" in doctor._cluster()
    monkeypatch.setattr(doctor, "PACKAGES", ("jax", "no-such-package"))
    with pytest.raises(UserError, match="no-such-package not installed"):
        doctor._packages()
    monkeypatch.setattr(jnp, "matmul", lambda a, b, **_: np.zeros((256, 256)))
    with pytest.raises(UserError, match="computes wrong results"):
        doctor._precision()
