"""The commands evaluate and average."""

import dataclasses
import itertools
import json
import re
import shutil

import pytest
from command_line import plain

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.decoding.translator import Hypothesis, Translator
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.evaluation import validation as evaluation
from transformer_jax.experiments import table3_runs
from transformer_jax.visualization import plots

EMPTY, ESCAPED = (Hypothesis(text, -1.0, -1.0, 1) for text in ("", "c&apos; est &quot; bien &quot; ."))


def test_evaluate_prints_one_json_object_per_run(cli, tiny, tmp_path):
    run = tiny.copy(tmp_path / "other")
    files = ["--source", tiny.corpus / "test.en", "--reference", tiny.corpus / "test.de"]
    done = cli("evaluate", tiny.run, run, *files, "--json")
    assert (done.status, done.err) == (0, "")
    results = [json.loads(line) for line in done.out.splitlines()]
    assert [result["run"] for result in results] == [str(tiny.run), str(run)]
    written = json.loads((tiny.run / "result.json").read_text())
    for result in results:
        assert {name: result[name] for name in ("bleu", "chrf", "exact_match")} == {
            name: written[name] for name in ("bleu", "chrf", "exact_match")
        }
        assert {"loss", "perplexity", "sentences_per_second", "bleu_signature", "chrf_signature"} <= result.keys()


def test_evaluate_flags_override_the_settings_of_each_run(cli, monkeypatch, tiny, tmp_path):
    seen, load = [], Translator.load
    monkeypatch.setattr(Translator, "load", lambda run, **asked: (seen.append((run, asked)), load(run, **asked))[1])
    other = tiny.copy(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["decoding"]["beam_size"] = 1
    RunDir(other).write("config.json", json.dumps(config))
    # 3 is already the setting of the first run.
    options = ["--split", "valid", "--lowercase", "--tokenize", "intl", "--bootstrap", "20"]
    done = cli("evaluate", "--max-length-offset", "3", tiny.run, other, *options)
    assert (done.status, done.err) == (0, "")
    assert seen == [(run, {"ensemble": (), "max_length_offset": 3}) for run in (tiny.run, other)]
    lines = done.out.splitlines()
    first, second = lines[:13], lines[13:]
    assert (first[0], second[0]) == (f"{tiny.run}, checkpoint last", f"{other}, checkpoint last")
    assert re.fullmatch(r"BLEU [\d.]+ \(95 %: [\d.]+ ± [\d.]+\)  \(nrefs:1\|case:lc\|eff:no\|tok:intl\|.*", first[1])
    names = [line.split("  ")[-2] for line in first[2:9]]
    assert names[:4:2] == ["sacreBLEU 13a", "sacreBLEU intl"]
    assert names[-1].startswith("paper: Moses tokens (sacremoses")
    assert first[-1].startswith("exact match ")
    differences = second[13:]
    assert [line.split(": ")[1].split()[0] for line in differences] == ["BLEU", "chrF2"]
    assert all(re.search(r" [+-][\d.]+, p = [\d.]+  \(nrefs:1\|bs:20\|seed:12345\|", line) for line in differences)


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("more", [[], ["--sweep", "beam-size=1"]], ids=["evaluate", "sweep"])
def test_swapped_files_and_empty_translations_give_warnings(cli, tiny, monkeypatch, more):
    monkeypatch.setattr(Translator, "translate_n_best", lambda self, texts, *_, **__: [[EMPTY]] * len(texts))
    losses = itertools.cycle([3.0, 1.0])
    monkeypatch.setattr(evaluation, "corpus_loss", lambda *_, **__: next(losses))
    files = ["--source", tiny.corpus / "test.de", "--reference", tiny.corpus / "test.en"]
    done = cli("evaluate", tiny.run, *files, "--bootstrap", "0", *more)
    assert done.status == 0
    assert "the model assigns higher likelihood to the reverse direction" in done.err
    assert "12 of 12 sentences have an empty translation" in done.err


def test_runs_with_different_tokenization_are_not_compared(cli, tiny, monkeypatch, tmp_path):
    kinds = iter(["13a", "none", "13a"])
    monkeypatch.setattr(score_commands, "tokenization_of", lambda config: next(kinds))
    done = cli("evaluate", tiny.run, tiny.run, tiny.run, "--max-length-offset", "1", "--bootstrap", "20")
    assert (done.status, done.err) == (0, "")
    assert done.out.count(f"no significance test against {tiny.run}: different references or tokenization") == 1
    assert done.out.count(f"against {tiny.run}: BLEU +0.00") == 1


def test_translations_are_written_as_text(cli, tiny, monkeypatch, tmp_path):
    output = tmp_path / "out.txt"
    asked = ["evaluate", tiny.run, "--max-length-offset", "2", "--bootstrap", "0", "--output", output]
    assert cli(*asked).status == 0
    sources = (tiny.corpus / "test.en").read_text().splitlines()
    written = output.read_text().splitlines()
    assert written == Translator.load(tiny.run, max_length_offset=2).translate(sources)

    # As for a tokenized corpus.
    monkeypatch.setattr(Translator, "translate_n_best", lambda self, texts, *_, **__: [[ESCAPED]] * len(texts))
    load = Translator.load

    def load_as_tokenized(run, **asked):
        translator = load(run, **asked)
        tokenizer = dataclasses.replace(translator.config.tokenizer, kind="pretokenized")
        translator.config = dataclasses.replace(translator.config, tokenizer=tokenizer)
        return translator

    monkeypatch.setattr(Translator, "load", load_as_tokenized)
    done = cli(*asked, "--language", "fr")
    assert done.status == 0, done.err
    assert "detokenized (sacremoses" in done.out
    assert ", fr), sacreBLEU 13a" in done.out
    assert output.read_text().splitlines() == ['c\'est "bien".'] * 12
    assert cli(*asked, tiny.run).status == 2


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "RUN", "--output"],
        ["parsing", "score", "RUN", "--output"],
        ["attention", "RUN", "the dog", "--output"],
        ["plot", "RUN", "--output"],
        ["table3", "base", "--picture"],
    ],
    ids=lambda command: command[0],
)
def test_unwritable_output_is_rejected_before_translating(cli, monkeypatch, tmp_path, command):
    def work(*_, **__):
        pytest.fail("worked first")

    monkeypatch.setattr(Translator, "load", work)
    monkeypatch.setattr(plots, "load_subject", work)
    monkeypatch.setattr(table3_runs, "run_table3", work)
    (tmp_path / "folder.svg").mkdir()
    for wrong, reason in (
        (tmp_path / "none" / "x.svg", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path / "folder.svg", "Is a directory"),
    ):
        refused = cli(*command, wrong)
        assert (refused.status, refused.err) == (1, f"error: {wrong}: cannot be written: {reason}\n")


def test_sweep_translates_the_validation_set_with_each_setting(cli, tiny):
    done = cli("evaluate", tiny.run, "--max-length-offset", "2", "--sweep", "beam-size=1,2", "alpha=0,0.6", "--json")
    assert (done.status, done.err) == (0, "")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert [row["setting"] for row in rows] == [
        {"beam_size": k, "alpha": alpha} for k in (1, 2) for alpha in (0.0, 0.6)
    ]
    alone = score_commands.evaluate(tiny.run, split="valid", max_length_offset=2, beam_size=2, alpha=0.6)
    for name in ("bleu", "chrf", "num_sentences"):
        assert rows[-1][name] == alone[name]
    printed = cli("evaluate", tiny.run, "--max-length-offset", "2", "--sweep", "beam-size=2,1").out.splitlines()
    assert printed[0].startswith(f"{tiny.run}, {tiny.corpus}")
    best = max((2, 1), key=lambda k: next(row["bleu"] for row in rows if row["setting"]["beam_size"] == k))
    assert printed[-1] == f"best: --beam-size {best}"


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--source", "test.en"], 2, "--source and --reference must be given together"),
        (["--split", "dev"], 2, "invalid choice 'dev'"),
        (["--source", "test.en", "--reference", "valid.de"], 1, "12 source sentences and 8 target sentences"),
        (["--source", "test.en", "--reference", "none.de"], 1, "none.de: cannot be read: No such file or directory"),
        (["--tokenize", "moses"], 1, "tokenize is 'moses'; legal: "),
        (["--sweep", "beam=1"], 1, "sweep has 'beam=1'; it must be FIELD=VALUE,VALUE..."),
        (["--sweep", "beam-size=1,x"], 1, "sweep has 'beam-size=1,x'; every value must be like 4"),
        (["--sweep", "beam-size=1,0"], 1, "decoding.beam_size is 0; it must be at least 1"),
    ],
)
def test_invalid_flags_of_evaluate_are_rejected(cli, tiny, monkeypatch, args, status, message):
    monkeypatch.chdir(tiny.corpus)
    done = cli("evaluate", tiny.run, *args)
    assert (done.status, done.out) == (status, "")
    assert message in plain(done.err)


def test_average_then_translate_with_it(cli, tiny, tmp_path):
    run = tiny.copy(tmp_path / "run")
    done = cli("average", "--last", "2", run)
    assert done == (0, f"{run / 'average'}: the average of the steps 2, 4\n", "")
    assert cli("translate", run, "--checkpoint", "average", "--max-length-offset", "1", stdin=b"the dog\n").status == 0
    assert cli("average", run, "--steps", "4", "2").out == done.out
    assert cli("average", run, "--minutes", "0").out == f"{run / 'average'}: the average of the steps 4\n"
    assert cli("average", run, "--minutes", "1", "--last", "2").status == 2
    shutil.rmtree(run / "checkpoints" / "2")
    done = cli("average", run, "--last", "2")
    assert done.status == 1
    assert done.err == f"error: {run} has 1 checkpoints [4]; the last 2 cannot be averaged\n"
