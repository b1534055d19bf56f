"""The short form of `kill_resume.py`: one run, killed once in each of three phases."""

import random

from kill_resume import kill_a_run, make_reference


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path):
    cache = tmp_path / "cache"
    expected = make_reference(tmp_path, cache)
    phases = ("open save", "metric write", "evaluation")
    met, found = kill_a_run(tmp_path / "run", cache, expected, phases, random.Random(0))
    assert sum(met.values()) >= 2, f"the run was over too soon: {dict(met)}"
    assert not found
