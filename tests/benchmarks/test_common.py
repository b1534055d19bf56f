"""Sides in separate processes, their turns, and the output lines."""

import json
import os
import statistics
import sys

import pytest

from benchmarks import common
from benchmarks.common import Output, Side, SideError, comparison, summary, take_turns


def clock(spec):
    """A side of known speed in a separate process: it returns the seconds of a unit and the received commands."""
    asked = []

    def turn(command):
        asked.append(command)
        if command.get("fail"):
            raise ValueError("as asked")
        if command.get("exit"):
            print("last words", file=sys.stderr, flush=True)
            os._exit(3)
        return {"seconds": spec["seconds"] * len(asked), "asked": asked}

    print("noise on stdout is no answer")
    return {"speed": spec["seconds"], "jax": "jax" in sys.modules}, turn


def make_side(**spec):
    return Side("tests.benchmarks.test_common:clock", spec)


def test_sides_are_timed_in_turns():
    with make_side(seconds=0.1) as ours, make_side(seconds=0.3) as peer:
        assert not ours.info["jax"]  # a side's process imports only what the side needs
        found = take_turns({"ours": ours, "peer": peer}, rounds=2, turn_seconds=0.6, beam=4)
        # The first answer is not counted. It gives the number of units that fill a turn.
        assert found == {"ours": pytest.approx([0.2, 0.3]), "peer": pytest.approx([0.6, 0.9])}
        assert [command["units"] for command in ours.ask(beam=4)["asked"][:3]] == [1, 6, 6]
        assert [command["units"] for command in peer.ask(beam=4)["asked"][:3]] == [1, 2, 2]
        assert comparison(**found) == {
            "ratio": {"median": 3.0, "min": 3.0, "q1": 3.0, "q3": 3.0, "max": 3.0},
            "seconds": {"ours": summary([0.2, 0.3]), "peer": summary([0.6, 0.9])},
            "rounds": 2,
        }


def test_failing_side_raises_with_its_error():
    with make_side(seconds=1) as side, pytest.raises(SideError, match="test_common:clock: ValueError: as asked"):
        side.ask(fail=True)
    with make_side(seconds=1) as side, pytest.raises(SideError, match=r"has ended: .*last words"):
        side.ask(exit=True)
    with Side("tests.benchmarks.test_common:nothing", {}) as side, pytest.raises(SideError, match="no attribute"):
        _ = side.info
    with Side("tests.benchmarks.test_common:clock", {}, timeout=0.0) as side, pytest.raises(SideError, match="in 0 s"):
        _ = side.info


def test_summary_is_median_and_quartiles():
    values = [5.0, 1.0, 2.0, 9.0, 4.0, 4.5, 7.0]
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    assert summary(values) == {"median": median, "min": 1.0, "q1": q1, "q3": q3, "max": 9.0}


def test_results_state_the_machine(tmp_path, capsys):
    output = Output(tmp_path / "deep" / "out.jsonl")
    output.write("training_step", "tiny", {"ratio": {"median": 2.0}})
    output.skip("decoding", "small", ValueError("no such thing"))
    lines = [json.loads(line) for line in (tmp_path / "deep" / "out.jsonl").read_text().splitlines()]
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines
    assert lines[0]["ratio"] == {"median": 2.0}
    assert lines[1]["skipped"] == "no such thing"
    for line in lines:
        assert set(line["versions"]) == {"python", *common.PACKAGES}
        assert line["threads"] >= 1
        assert {"cpu", "commit", "date"} <= set(line)
