"""The command translate: n-best lists, JSON lines, sampling, prefixes, interactive use, progress."""

import dataclasses
import io
import json
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest
from command_line import plain

from transformer_jax import cli as module
from transformer_jax.cli import translate as translation
from transformer_jax.config import Sampling
from transformer_jax.decoding.alignment import align
from transformer_jax.decoding.translator import Translator
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import UserError

LINES = ["the dog", "", "a \ud83d\udc15 dog".encode("utf-16", "surrogatepass").decode("utf-16")]


@pytest.fixture(scope="module")
def translator(tiny):
    return Translator.load(tiny.run, max_length_offset=2)


def test_n_best_list_is_written_per_line(cli, tiny):
    stdin = ("\n".join(LINES) + "\n").encode()
    done = cli("translate", tiny.run, "--max-length-offset", "2", "--beam-size", "2", "--n-best", "2", stdin=stdin)
    assert (done.status, done.err) == (0, "")
    expected = Translator.load(tiny.run, max_length_offset=2, beam_size=2).translate_n_best(LINES, 2)
    assert [len(found) for found in expected] == [2, 1, 2]
    assert done.out.splitlines() == [
        f"{number} ||| {one.text} ||| {one.score:.4f}" for number, found in enumerate(expected) for one in found
    ]
    too_many = cli("translate", tiny.run, "--n-best", "9", stdin=stdin)
    assert (too_many.status, too_many.out) == (1, "")
    assert "n_best is 9; it must be at least 1 and at most decoding.beam_size" in too_many.err


def test_translations_as_json_lines(cli, tiny, translator):
    stdin = ("\n".join(LINES) + "\n").encode()
    done = cli("translate", tiny.run, "--max-length-offset", "2", "--format", "jsonl", stdin=stdin)
    rows = [json.loads(line) for line in done.out.split("\n")[:-1]]
    assert [(row["line"], row["source"]) for row in rows] == list(enumerate(LINES))
    for row, (best,) in zip(rows, translator.translate_n_best(LINES, 1), strict=True):
        (found,) = row["translations"]
        assert (found["text"], found["num_tokens"]) == (best.text, best.num_tokens)
        assert (found["score"], found["log_prob"]) == pytest.approx((best.score, best.log_prob), rel=1e-5)


def test_json_lines_include_alignments(cli, tiny, translator):
    stdin = ("\n".join(LINES) + "\n").encode()
    done = cli("translate", tiny.run, "--max-length-offset", "2", "--format", "jsonl", "--alignment", stdin=stdin)
    rows = [json.loads(line) for line in done.out.split("\n")[:-1]]
    aligned = align(translator, LINES, translator.translate_n_best(LINES, 1))
    for row, (one,) in zip(rows, aligned, strict=True):
        (found,) = row["translations"]
        assert row["source_tokens"] == list(one.source_tokens)
        assert found["tokens"] == list(one.target_tokens)
        assert found["alignment"] == [list(pair) for pair in one.pairs]
        assert len(found["alignment"]) == len(found["tokens"])
    assert rows[1]["source_tokens"] == rows[1]["translations"][0]["alignment"] == []
    assert sum(len(row["source_tokens"]) for row in rows) > 3
    without = cli("translate", tiny.run, "--max-length-offset", "2", "--format", "jsonl", stdin=stdin)
    assert "alignment" not in without.out
    assert 'tokens":' not in without.out.replace("num_tokens", "")


def test_sampling_is_reproducible_by_seed_and_line_number(cli, tiny, translator):
    stdin = ("\n".join(LINES) + "\n").encode()
    how = ["--max-length-offset", "2", "--sample", "--temperature", "0.9", "--top-k", "40", "--top-p", "0.95"]
    done = cli("translate", tiny.run, *how, "--seed", "3", "--n-best", "3", stdin=stdin)
    assert (done.status, done.err) == (0, "")
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95)
    expected = translator.translate_n_best(LINES, 3, sampling=sampling, seed=3)
    assert done.out.split("\n")[:-1] == [
        f"{number} ||| {one.text} ||| {one.score:.4f}" for number, found in enumerate(expected) for one in found
    ]
    assert [len(found) for found in expected] == [3, 1, 3]
    assert len({one.token_ids for one in expected[0]}) > 1
    assert expected == translator.translate_n_best(LINES, 3, sampling=sampling, seed=3)
    assert expected != translator.translate_n_best(LINES, 3, sampling=sampling, seed=4)
    # The sample of a line depends on its line number, not on other lines or its position in a batch.
    for before in (["two", "a"], ["the red house and the blue tree", "a dog"]):
        others = translator.translate_n_best([*before, LINES[2]], 3, sampling=sampling, seed=3)
        assert [one.token_ids for one in others[2]] == [one.token_ids for one in expected[2]]
    alone = translator.translate_n_best(LINES[2:], 3, sampling=sampling, seed=3, first_line=2)
    assert [one.token_ids for one in alone[0]] == [one.token_ids for one in expected[2]]
    equal = translator.translate_n_best(["the dog"] * 4, 1, sampling=Sampling())
    assert len({one.token_ids for (one,) in equal}) == 4
    with pytest.raises(UserError, match="seed is 4294967296; it must be from 0 to 4294967295"):
        translator.translate_n_best(LINES, 1, sampling=sampling, seed=2**32)
    with pytest.raises(UserError, match=r"n_best is 0; it must be at least 1$"):
        translator.translate_n_best(LINES, 0, sampling=sampling)


def text_of(count, translator):
    """Return a target text of `count` tokens."""
    texts = ["Q" * number for number in range(1, 2 * count)]
    rows = translator.tokenizers.target.encode(texts)
    return next(text for text, ids in zip(texts, rows, strict=True) if len(ids) == count)


def test_translations_start_with_their_prefixes(cli, tiny, translator, tmp_path):
    stdin = ("\n".join(LINES) + "\n").encode()
    done = cli("translate", tiny.run, "--max-length-offset", "2", "--prefix", "zwei katze", stdin=stdin)
    assert (done.status, done.err) == (0, "")
    first, empty, third = done.out.split("\n")[:-1]
    assert first.startswith("zwei katze")
    assert third.startswith("zwei katze")
    assert empty == "", "an empty line stays empty"
    file = tmp_path / "prefixes"
    file.write_text("drei\n\n\n")
    done = cli("translate", tiny.run, "--max-length-offset", "2", "--prefixes", file, stdin=stdin)
    assert done.out.split("\n")[:-1] == [
        translator.translate_n_best(LINES[:1], 1, prefixes=["drei"])[0][0].text,
        "",
        translator.translate(LINES)[2],
    ]
    file.write_text("drei\n \n\n")
    spaces = cli("translate", tiny.run, "--max-length-offset", "2", "--prefixes", file, stdin=stdin)
    assert spaces.out == done.out
    # A prefix longer than the limit is kept complete and continued.
    long = text_of(16, translator)  # no padding hides its last step
    (found,) = translator.translate_n_best(["a"], 1, prefixes=[long])[0]
    assert found.text.startswith(long)
    assert found.num_tokens > 16
    wrong = cli("translate", tiny.run, "--prefixes", file, stdin=b"one line\n")
    assert (wrong.status, wrong.out) == (1, "")
    assert "3 prefixes for 1 texts; each text needs one, which may be empty" in wrong.err


def test_prefix_longer_than_the_learned_positions_is_rejected(tiny, translator):
    config = translator.config
    model = dataclasses.replace(config.model, positions="learned", max_length=9)
    tokens = jnp.zeros((1, 2), jnp.int32)
    params = Transformer(model).init(jax.random.key(0), tokens, tokens)["params"]
    short = Translator(
        dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, max_length=9)),
        params,
        translator.tokenizers,
    )
    count = len(translator.tokenizers.target.encode(["ein der"])[0])
    assert count <= 8
    found = short.translate_n_best(["a", "a"], 1, prefixes=["", "ein der"])
    assert found[1][0].text.startswith("ein der")
    # Eight tokens leave space for one more, and nine leave none.
    (full,) = short.translate_n_best(["a"], 1, prefixes=[text_of(8, translator)])[0]
    assert full.num_tokens == 9
    with pytest.raises(
        UserError, match=r"the prefix of line 2 has 9 tokens; .* more than the 9 positions of the model"
    ):
        short.translate_n_best(["a", "a"], 1, prefixes=["", text_of(9, translator)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--top-k", "3"], "--top-k needs --sample"),
        (["--seed=3"], "--seed needs --sample"),
        (["--sample", "--beam_size=2"], "--beam-size configures the search, and --sample does not search"),
        (["--alignment"], "--alignment needs --format jsonl"),
        (["--prefix", "a", "--prefixes", "b"], "exclude each other"),
        (["--sample", "--top-p", "0"], "top_p is 0.0; it must be more than 0 and at most 1"),
    ],
)
def test_conflicting_flags_are_rejected(cli, tiny, flags, message):
    done = cli("translate", tiny.run, *flags, stdin=b"a\n")
    assert (done.status, done.out) == (2, "")
    assert message in plain(done.err)


def converse(monkeypatch, lines, *args, is_terminal=True):
    """Run an interactive `transformer-jax translate`, and return (prompt, output before the prompt) pairs."""
    written, typed, seen = io.BytesIO(), iter(lines), []

    def answer(prompt):
        seen.append((prompt, written.getvalue().decode().split("\n")[:-1]))
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # restored after the test
    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    stdout = types.SimpleNamespace(buffer=written, flush=lambda: None, isatty=lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert module.main(["translate", *map(str, args)]) == 0
    return seen


def test_interactive_translate_answers_each_line_immediately(tiny, translator, monkeypatch, capsys):
    seen = converse(monkeypatch, LINES, tiny.run, "--max-length-offset", "2")
    expected = translator.translate(LINES)
    assert seen == [("> ", expected[:count]) for count in range(4)]
    assert "Ctrl-D ends" in capsys.readouterr().err
    seen = converse(monkeypatch, LINES, tiny.run, "--max-length-offset", "2", is_terminal=False)
    assert seen == [("", expected[:count]) for count in range(4)], "no prompt among translations that go to a file"


def test_prefix_file_is_rejected_on_a_terminal(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "prefixes").write_text("ein\n")
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True))
    assert module.main(["translate", str(tiny.run), "--prefixes", str(tmp_path / "prefixes")]) == 2
    assert "--prefixes needs lines from a file on stdin" in capsys.readouterr().err


def test_repeated_interactive_line_gets_a_new_sample(tiny, translator, monkeypatch):
    seen = converse(monkeypatch, ["the dog"] * 3, tiny.run, "--max-length-offset", "2", "--sample", "--prefix", "drei")
    drawn = seen[-1][1]
    assert len(set(drawn)) == 3
    assert all(text.startswith("drei") for text in drawn)


def test_progress_is_logged_every_ten_seconds(monkeypatch, caplog):
    caplog.set_level("INFO")
    now = [0.0]
    monkeypatch.setattr(translation.time, "monotonic", lambda: now[0])
    progress = translation._Progress(1000, enabled=True)
    for seconds in (4.0, 9.0, 10.0, 15.0, 20.0):
        now[0] = seconds
        progress(100)
    assert caplog.messages == [
        "300 of 1,000 lines, 30 lines/s, 23 s left",
        "500 of 1,000 lines, 25 lines/s, 20 s left",
    ]
    quiet = translation._Progress(10, enabled=False)
    now[0] = 99.0
    quiet(5)
    assert len(caplog.messages) == 2


def test_progress_counts_translated_lines(translator):
    counts = []
    translator.translate_n_best([*LINES, "the cat"], 1, progress=counts.append)
    assert sum(counts) == 3  # the empty line takes no time
