"""Fuzz config files and flags: the result is a `Config` or a `UserError`."""

import io
import json
import sys
import types
import warnings

import pytest
from garbage import json_values, mutated_bytes, mutated_json
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from transformer_jax import cli
from transformer_jax import run as commands
from transformer_jax.config import Config
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.evaluation.evaluate import result_lines
from transformer_jax.presets import numbers_config
from transformer_jax.runtime.files import to_json
from transformer_jax.types import UserError

TREE = json.loads(numbers_config().to_json())


def check(read):
    """Check that a config is rejected with a `UserError`, or survives a round trip through JSON."""
    try:
        config = read()
    except UserError as error:
        assert 0 < len(str(error)) < 3000  # noqa: PT017  any of them will do
        return
    text = config.to_json()
    json.loads(text, parse_constant=pytest.fail)
    assert Config.from_json(text) == config


@examples(700)
@given(mutated_json(TREE) | json_values)
def test_any_json_is_read_or_rejected(tree):
    check(lambda: Config.from_json(json.dumps(tree)))


@examples(300)
@given(mutated_bytes(numbers_config().to_json().encode()))
def test_any_bytes_are_read_or_rejected(tmp_path, data):
    path = tmp_path / "config.json"
    path.write_bytes(data)
    check(lambda: Config.load(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not JSON"),
        ('{"training": {"seed": ' + "9" * 5000 + "}}", "not JSON"),
        ('{"training": {"seed": ' + "9" * 30 + "}}", "training.seed has 100 bits"),
        ('{"training": {"clip_norm": ' + "9" * 400 + "}}", "training.clip_norm"),
        ('{"training": {"checkpoint_seconds": Infinity}}', "training.checkpoint_seconds is inf"),
        ('{"model": {"norm_epsilon": NaN}}', "model.norm_epsilon is nan"),
        ('{"decoding": {"checkpoint": "' + "9" * 5000 + '"}}', "decoding.checkpoint"),
    ],
    ids=["nesting", "5000 digits", "30 digits", "400 digits", "infinity", "not a number", "a long step"],
)
def test_extreme_values_are_rejected(text, message):
    with pytest.raises(UserError, match=message):
        Config.from_json(text)


def test_unreadable_file_is_rejected(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"model": "\xff"}')
    for path in (tmp_path / "config.json", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            Config.load(path)


FLAGS = [f"--{name.replace('_', '-')}" for name in Config().flat()]
VALUES = st.one_of(
    st.sampled_from(
        ["", "nan", "inf", "-1", "0", "1e999", "9" * 40, "9" * 5000, "None", "True", "\0", "--", "{", "best"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.integers().map(str),
    st.floats().map(str),
)


@examples(25)
@given(st.lists(st.tuples(st.sampled_from(FLAGS), VALUES), min_size=1, max_size=3))
def test_any_flags_give_a_status_without_traceback(pairs):
    with pytest.MonkeyPatch.context() as patch:
        trained, err = [], io.StringIO()
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        patch.setattr(sys, "stderr", err)
        patch.setattr(sys, "stdout", io.StringIO())

        def train(config, *_, **__):
            trained.append(config)
            return types.SimpleNamespace(test=None)

        patch.setattr(commands, "train", train)
        try:
            status = cli.main(["train", *(word for pair in pairs for word in pair), "--no-malloc-tuning"])
        except SystemExit as error:
            status = error.code
    assert status in (0, 1, 2)
    assert (status == 0) == bool(trained)
    assert "--traceback" not in err.getvalue()
    assert "Traceback" not in err.getvalue()
    assert status == 0 or err.getvalue().strip()


def test_json_is_strict():
    """Check that infinity and NaN become null, and that a lone surrogate becomes an escape sequence."""
    text = to_json({"perplexity": float("inf"), "loss": [float("nan"), (1.5,)], "text": "\ud800ä"})
    assert json.loads(text.encode("utf-8"), parse_constant=pytest.fail) == {
        "perplexity": None,
        "loss": [None, [1.5]],
        "text": "\ud800ä",
    }


def test_infinite_perplexity_is_null_in_json(monkeypatch, capsys):
    found = {"run": "r", "checkpoint": "last", "bleu": 0.0, "bleu_signature": "s", "chrf": 0.0, "chrf_signature": "s"}
    found |= {"loss": 1000.0, "perplexity": float("inf"), "exact_match": 0.0, "num_sentences": 1}
    found |= {"sentences_per_second": 1.0, "tokens_per_second": 1.0}
    monkeypatch.setattr(score_commands, "evaluate_runs", lambda *_, **__: [found])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(), isatty=lambda: False))
    assert cli.main(["evaluate", "r", "--json"]) == 0
    read = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert read["perplexity"] is None
    assert "loss 1000.0000, perplexity inf per token" in result_lines(read)
