"""The short form of `kill_resume.py`: one run, killed once in each of three phases."""

import random

import kill_resume
from kill_resume import kill_a_run, make_reference
from processes import xla_flags


def test_resume_after_sigkill_is_bit_identical(tmp_path, monkeypatch):
    monkeypatch.setattr(kill_resume, "XLA_FLAGS", xla_flags(1))
    cache = tmp_path / "cache"
    expected = make_reference(tmp_path, cache)
    phases = ("open save", "metric write", "evaluation")
    met, found = kill_a_run(tmp_path / "run", cache, expected, phases, random.Random(0))
    assert sum(met.values()) >= 2, f"the run was over too soon: {dict(met)}"
    assert not found
