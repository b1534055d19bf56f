"""The short form of `kill_resume.py`: one run, killed once in each phase."""

import random

from kill_resume import kill_a_run, make_reference
from killed_run import PHASES


def test_a_run_that_is_killed_in_every_phase_ends_with_the_same_bits(tmp_path):
    cache = tmp_path / "cache"
    expected = make_reference(tmp_path, cache)
    met, found = kill_a_run(tmp_path / "run", cache, expected, PHASES, random.Random(0))
    assert sum(met.values()) >= 4, f"the run was over too soon: {dict(met)}"
    assert not found
