"""The table of breakages matches the code."""

from benchmarks import mutations


def test_each_breakage_applies_to_one_place():
    assert not mutations.stale()
