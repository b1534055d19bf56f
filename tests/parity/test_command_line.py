"""`compare` and `params` at the command line: stdout and exit status."""

import json
from pathlib import Path

import pytest

from transformer_jax import cli
from transformer_jax.parity import compare as parity
from transformer_jax.parity.report import Difference, Loss, ParityReport, Trajectory

TABLE3 = Path(__file__).parents[2] / "configs" / "table3.py"


@pytest.fixture
def answers(monkeypatch):
    """Return `answers(ok)`, which fakes the report of `compare` and returns the list of its arguments."""

    def make(ok):
        seen = []
        layer = Difference("encoder/embedding", 1e-7, 1e-7, True)
        report = ParityReport(
            ok=ok, dtype="float32", layers=(layer,), first_divergence=None, cause=None,
            loss=Loss(1.0, 1.0, 0.0, True), gradients=(layer,), trajectory=Trajectory((1.0,), (1.0,), 0.0, 0.0, True),
            greedy_equal=True, beam_equal=True, against="torch", notes=(),
        )  # fmt: skip
        monkeypatch.setattr(parity, "compare", lambda *args: seen.append(args) or report)
        return seen

    return make


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (False, 1)])
def test_exit_status_and_one_line_of_json(ok, status, answers, capsys):
    seen = answers(ok)
    assert cli.main(["compare", "--against", "torch", "--json", "--dtype", "float64"]) == status
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out)["ok"] is ok
    assert seen == [("torch", None, None, "float64")]
    assert cli.main(["compare", "--against", "torch"]) == status
    assert "encoder/embedding" in capsys.readouterr().out


@pytest.mark.parametrize(
    "args",
    [
        ["--against", "torch", "/nowhere/model.pt"],
        ["--against", "torch", "--config", "/nowhere.py"],
        ["--against", "fairsec"],
        [],
    ],
)
def test_invalid_usage_is_not_reported_as_a_difference(args, capsys):
    assert cli.main(["compare", *args, "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_params(capsys):
    assert cli.main(["params", str(TABLE3)]) == 0
    assert "C7" in capsys.readouterr().out
    assert cli.main(["params", "--flops", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
