"""Rows of Table 3 at other sizes, and their runner."""

import dataclasses
import json
import math
import types
from pathlib import Path

import pytest
from command_line import plain

from transformer_jax import run as commands
from transformer_jax.accelerators.cost import parameters_by_part
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.experiments import table3_runs as ablation
from transformer_jax.experiments.table3 import PAPER, ROWS, scaled, table3_config
from transformer_jax.experiments.table3_runs import plot_table3, rank_correlation, render, run_table3
from transformer_jax.presets import load_recipe
from transformer_jax.testing import one_device_mesh, write_tiny_corpus
from transformer_jax.types import UserError

RECIPE = str(Path(__file__).resolve().parents[2] / "configs" / "table3.py")


def base_of(**model) -> Config:
    base = table3_config()
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **model))


@pytest.mark.parametrize("scale", [2, 4, 16])
@pytest.mark.parametrize("row", ROWS)
def test_scale_divides_every_width_of_a_row(row, scale):
    paper, ours = load_recipe(f"{RECIPE}:{row}"), table3_config(row, scaled(table3_config(), scale))
    assert ours.model.d_model * scale == paper.model.d_model
    for stack in ("encoder", "decoder"):
        here, there = getattr(ours.model, stack), getattr(paper.model, stack)
        assert (here.num_layers, here.num_heads) == (there.num_layers, there.num_heads)
        assert [here.d_ff * scale, here.d_k * scale, here.d_v * scale] == [there.d_ff, there.d_k, there.d_v]
        if row.startswith("A"):
            assert here.num_heads * here.d_k == ours.model.d_model
    for field in ("model.residual_dropout", "training.label_smoothing", "model.positions"):
        assert ours.flat()[field] == paper.flat()[field]


def test_sizes_change_in_proportion_to_the_base():
    base = base_of(num_layers=3, d_model=96, num_heads=4, d_ff=160)
    with pytest.raises(UserError, match=r"row A1 of Table 3: model.num_heads would be 4 x 1 / 8, which is not"):
        table3_config("A1", base)
    change = [("A4", "num_heads", 16), ("C1", "num_layers", 1), ("C3", "num_layers", 4), ("C4", "d_model", 48)]
    change += [("C5", "d_model", 192), ("C6", "d_ff", 80), ("B1", "d_k", 6), ("B2", "d_k", 12)]
    for row, field, value in change:
        assert getattr(table3_config(row, base).model, field) == value


def test_all_rows_have_the_steps_of_the_base():
    base = table3_config()
    base = dataclasses.replace(base, training=dataclasses.replace(base.training, num_steps=7))
    assert {table3_config(row, base).training.num_steps for row in ROWS} == {7}
    assert table3_config("big").training.num_steps == 300_000, "the paper's own"


@pytest.mark.parametrize(
    ("row", "model", "scale", "message"),
    [
        ("base", {}, 3, "scale is 3; it must be a whole number that divides model.d_model 512 and model.d_ff 2048"),
        ("base", {}, 0, "scale is 0"),
        ("base", {"d_k": 32}, 1, "model.d_k is 32; the rows of Table 3 need None there"),
        ("base", {"decoder_num_layers": 2}, 1, "model.decoder_num_layers is 2"),
        ("A4", {}, 32, "row A4 of Table 3: model.num_heads=32 does not divide model.d_model=16"),
        ("B1", {}, 32, "row B1 of Table 3: model.d_k would be 2 x 16 / 64, which is not a whole number"),
        ("C1", {"num_layers": 4}, 1, "model.num_layers would be 4 x 2 / 6, which is not"),
        ("F", {}, 1, "no recipe 'F'; legal: base, A1"),
    ],
)
def test_invalid_rows_and_scales_are_rejected(row, model, scale, message):
    with pytest.raises(UserError, match=message):
        table3_config(row, scaled(base_of(**model), scale))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table3") / "corpus"
    write_tiny_corpus(folder)
    for language, words in (("en", "the dog runs"), ("de", "der hund rennt")):
        (folder / f"valid.{language}").write_text(8 * f"{words}\n")  # equal lengths, so that fewer shapes are compiled
    return folder


def flags(corpus: Path, workdir: Path) -> list[str]:
    """Return flags for one layer of d_model 32 and two steps."""
    given = f"""
        scale=16 workdir={workdir} model.num-layers=1 model.vocab-size=400
        data.source=text data.name= data.subset= data.directory={corpus} data.valid=valid
        data.batch-tokens=600 data.max-length=100 data.max-shapes=1 training.num-steps=2
        training.validate-every=2 training.valid-sentences=0 training.num-samples=0
        decoding.beam-size=1 decoding.max-length-offset=3
    """
    return [f"--{flag}" for flag in given.split()]


@pytest.mark.filterwarnings("ignore:.*have an empty translation")  # after so few steps
def test_two_rows_are_trained_scored_and_compared_with_the_paper(cli, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "make_mesh", lambda *_: one_device_mesh())  # compiles faster than eight
    (tmp_path / "table3.jsonl").write_text('{"row": "C1", trunc')
    cleared = []
    monkeypatch.setattr(ablation.jax, "clear_caches", lambda: cleared.append(None))  # keep what other tests compiled
    picture = tmp_path / "rows.svg"
    done = cli("table3", "base", "B1", *flags(corpus, tmp_path), "--picture", picture)
    assert done.status == 0, done.err
    lines = [line.split() for line in done.out.splitlines()]
    assert [line[0] for line in lines[2:4]] == ["base", "B1"]
    assert lines[2][-3:] == ["65", "4.92", "25.8"]
    assert lines[3][1:3] == ["d_k", "1"], "4 / 4: the paper has 16 for 64"
    assert lines[3][-3:] == ["58", "5.16", "25.1"]
    assert len(cleared) == 2, "all 20 rows compile more than a process may map"
    rows = [json.loads(line) for line in (tmp_path / "table3.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == ["base", "B1"]
    assert "d_k 1" in picture.read_text()
    for row, line in zip(rows, lines[2:4], strict=True):
        config = RunDir(tmp_path / row["row"]).load_config()
        assert config.data.test == ""
        assert row["parameters"] == parameters_by_part(config.model)["total"]
        assert row["num_sentences"] == 8, "the validation split"
        assert row["checkpoint"] == "last"
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert float(line[-5]) == pytest.approx(row["perplexity"], abs=0.01)
        assert float(line[-4]) == pytest.approx(row["bleu"], abs=0.1)
        assert tuple(row["paper"].values()) == PAPER[row["row"]]

    # Repeated: the runs are finished, and are not scored again.
    def fails(*_, **__):
        raise AssertionError("nothing has changed")

    monkeypatch.setattr(score_commands, "evaluate", fails)
    again = cli("table3", "B1", *flags(corpus, tmp_path), "--json")
    assert again.status == 0, again.err
    assert [json.loads(line) for line in again.out.splitlines()] == rows[1:]
    assert "B1 is finished: step 2 of 2" in again.err
    assert (tmp_path / "table3.jsonl").read_text().splitlines() == [json.dumps(row, ensure_ascii=False) for row in rows]


def test_results_of_another_process_are_kept(tmp_path, monkeypatch):
    file = tmp_path / "table3.jsonl"

    def evaluate(run, **_):
        file.write_text('{"row": "A1"}\n')
        return {"bleu": 1.0}

    monkeypatch.setattr(commands, "train", lambda *_: types.SimpleNamespace(interrupted_by=None, state=None))
    monkeypatch.setattr(score_commands, "evaluate", evaluate)
    (result,) = run_table3(["base"], table3_config(), tmp_path)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [result, {"row": "A1"}]


def test_interrupted_row_ends_the_command(tmp_path, monkeypatch):
    trained = []

    def train(config, run):
        trained.append(run.name)
        return types.SimpleNamespace(interrupted_by="SIGTERM")

    monkeypatch.setattr(commands, "train", train)
    assert list(run_table3(["E", "base"], table3_config(), tmp_path)) == []
    assert trained == ["E"]


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        ([], 2, "name rows: all, or some of base, A1"),
        (["base", "--scale", "3"], 2, "scale is 3; it must be a whole number that divides"),
        (["base", "F"], 1, "table3 has no recipe 'F'; legal: base, A1"),
        (["all", "--scale", "32"], 1, "row A4 of Table 3: model.num_heads=32 does not divide"),
        (["base", "--data.valid", ""], 1, "data.valid is empty"),
        (["base", "--model.num-head", "4"], 2, "--model.num-heads INT"),
    ],
)
def test_invalid_usage_is_rejected_before_training(cli, tmp_path, monkeypatch, args, status, message):
    monkeypatch.chdir(tmp_path)
    done = cli("table3", *args)
    assert (done.status, done.out) == (status, "")
    assert message in plain(done.err)
    assert not list(tmp_path.iterdir())


def results_of(perplexities: dict[str, float | None]) -> list[dict]:
    figures = {
        "parameters": 65_110_000,
        "bleu": 1.0,
        "num_sentences": 9,
        "asked": {"num_steps": 5},
        "bleu_signature": "x",
    }
    return [{"row": row, "change": f"{row} is changed", "perplexity": p} | figures for row, p in perplexities.items()]


def test_rank_correlation_equals_scipy():
    stats = pytest.importorskip("scipy.stats")
    # The paper has two ties, base and E, and A4 and B2. The measured values have one tie and one infinity.
    ours = {"base": 9.0, "E": 9.5, "A4": 9.0, "B2": 12.0, "C1": None, "C5": 30.0, "D1": 8.0, "big": 7.0}
    expected = stats.spearmanr(
        [1e9 if value is None else value for value in ours.values()], [PAPER[row].perplexity for row in ours]
    ).statistic
    assert rank_correlation(results_of(ours)) == pytest.approx(expected, rel=1e-12)
    assert f"correlation of the perplexities: {expected:.2f}" in render(results_of(ours))
    assert math.isnan(rank_correlation(results_of({"base": 9.0})))
    assert "correlation" not in render(results_of({"base": 9.0, "E": 8.0}))


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_picture_of_the_rows(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    output = tmp_path / f"rows{suffix}"
    plot_table3(results_of({"base": 20.0, "C1": 40.0, "big": 15.0, "D1": None}), output)
    if suffix == ".svg":
        text = output.read_text()
        # The paper's best at the top.
        assert text.index("big is changed") < text.index("base is changed") < text.index("D1 is changed")
        assert text.index("D1 is changed") < text.index("C1 is changed")
        assert ">the paper: newstest2013<" in text
        assert ">here: validation<" in text
        assert text.count(">perplexity<") == 2
    assert output.stat().st_size > 5_000


def test_infinite_perplexity_in_the_table():
    text = render(results_of({"D1": None}))
    assert text.splitlines()[2].split() == ["D1", "D1", "is", "changed", "65.11", "inf", "1.0", "5.77", "24.6"]
    assert max(map(len, text.splitlines())) <= 120
