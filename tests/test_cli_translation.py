"""The command translate: several translations of a line, JSON lines, a conversation, progress."""

import io
import json
import sys
import types
import warnings

import pytest
from test_commands import tiny_run

from transformer_jax import cli as module
from transformer_jax.cli import translation
from transformer_jax.decoding.translator import Translator

LINES = ["the dog", "", "a \ud83d\udc15 dog".encode("utf-16", "surrogatepass").decode("utf-16")]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    return tiny_run(tmp_path_factory)


@pytest.fixture(scope="module")
def translator(tiny):
    return Translator.load(tiny.run, max_extra=2)


def test_several_translations_of_a_line(cli, tiny):
    stdin = ("\n".join(LINES) + "\n").encode()
    done = cli("translate", tiny.run, "--max-extra", "2", "--beam-size", "2", "--n-best", "2", stdin=stdin)
    assert (done.status, done.err) == (0, "")
    expected = Translator.load(tiny.run, max_extra=2, beam_size=2).translate_n_best(LINES, 2)
    assert [len(found) for found in expected] == [2, 1, 2]
    assert done.out.splitlines() == [
        f"{number} ||| {one.text} ||| {one.score:.4f}" for number, found in enumerate(expected) for one in found
    ]
    too_many = cli("translate", tiny.run, "--n-best", "9", stdin=stdin)
    assert (too_many.status, too_many.out) == (1, "")
    assert "n_best is 9; it must be at least 1 and at most decoding.beam_size" in too_many.err


def test_json_lines(cli, tiny, translator):
    stdin = ("\n".join(LINES) + "\n").encode()
    done = cli("translate", tiny.run, "--max-extra", "2", "--format", "jsonl", stdin=stdin)
    rows = [json.loads(line) for line in done.out.split("\n")[:-1]]
    assert [(row["line"], row["source"]) for row in rows] == list(enumerate(LINES))
    for row, (best,) in zip(rows, translator.translate_n_best(LINES, 1), strict=True):
        (found,) = row["translations"]
        assert (found["text"], found["num_tokens"]) == (best.text, best.num_tokens)
        assert (found["score"], found["log_prob"]) == pytest.approx((best.score, best.log_prob), rel=1e-5)


def test_a_conversation_answers_each_line_before_the_next_is_typed(tiny, translator, monkeypatch, capsys):
    written, typed = io.BytesIO(), iter(LINES)
    seen = []

    def answer(prompt):
        seen.append((prompt, written.getvalue().decode().splitlines()))
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back after the test
    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(buffer=written, flush=lambda: None))
    assert module.main(["translate", str(tiny.run), "--max-extra", "2"]) == 0
    expected = translator.translate(LINES)
    assert seen == [("> ", expected[:count]) for count in range(4)]
    assert "Ctrl-D ends" in capsys.readouterr().err


def test_progress_is_said_every_ten_seconds_and_not_for_less(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(translation.time, "monotonic", lambda: now[0])
    progress = translation._Progress(1000, enabled=True)
    for seconds in (4.0, 9.0, 10.0, 15.0, 20.0):
        now[0] = seconds
        progress(100)
    assert capsys.readouterr().err.splitlines() == [
        "300 of 1,000 lines, 30 lines/s, 23 s left",
        "500 of 1,000 lines, 25 lines/s, 20 s left",
    ]
    quiet = translation._Progress(10, enabled=False)
    now[0] = 99.0
    quiet(5)
    assert capsys.readouterr().err == ""


def test_what_is_done_is_counted(translator):
    counts = []
    translator.translate_n_best([*LINES, "the cat"], 1, progress=counts.append)
    assert sum(counts) == 3  # the empty line takes no time
