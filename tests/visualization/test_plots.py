"""Compare each plotted curve with the run's files, the formula, or a loop over its batches."""

import json
import math
import shutil
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest

from transformer_jax import cli
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig, TrainingConfig
from transformer_jax.data.loader import plan_batches
from transformer_jax.model.positional import sinusoids
from transformer_jax.types import UserError
from transformer_jax.visualization import plots
from transformer_jax.visualization.plots import Subject, load_subject, plot


@pytest.fixture
def drawn(optional_package, monkeypatch):
    """Return the figures that were written: {y label of a panel: its axes}."""
    optional_package("matplotlib")
    figures, original = [], plots.drawing

    @contextmanager
    def keep(*args):
        with original(*args) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(plots, "drawing", keep)
    return lambda: {axes.get_ylabel(): axes for axes in figures[-1].axes if axes.get_ylabel()}


def curves_of(axes):
    return [(line.get_label(), line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.get_lines()]


def test_curves_equal_the_metrics_files(tiny, drawn, tmp_path):
    other = tiny.copy(tmp_path / "other")
    rows = [json.loads(line) for line in (tiny.run / "metrics.jsonl").read_text().splitlines()]
    changed = [row | ({"loss": None} if row["step"] == 2 and "loss" in row else {}) for row in rows]
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed) + '{"step": 5, "lo')
    names = plot([str(tiny.run), f"{other}/"], tmp_path / "plots.png")
    assert names == ["loss", "valid_loss", "bleu", "learning_rate", "lengths", "padding"]
    axes = drawn()
    losses = [row["loss"] for row in rows if "loss" in row]
    first, second = curves_of(axes["training loss"])
    assert first == (str(tiny.run), [1, 2, 3, 4], losses)
    assert second[:2] == (str(other), [1, 2, 3, 4])
    np.testing.assert_array_equal(second[2], [losses[0], math.nan, *losses[2:]])
    (valid,) = (row for row in rows if "valid_loss" in row)
    for label, name in (("validation loss", "valid_loss"), ("validation BLEU", "valid_bleu")):
        assert curves_of(axes[label])[0] == (str(tiny.run), [4], [valid[name]])
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")
    (right,) = axes["validation loss"].child_axes
    assert right.get_ylabel() == "perplexity"
    low, high = axes["validation loss"].get_ylim()
    np.testing.assert_allclose(right.get_ylim(), np.exp([low, high]))


def test_learning_rate_equals_equation_3():
    config = Config(training=TrainingConfig(num_steps=10_000))
    (curve,) = plots.learning_rates(Subject("base", config, None))
    assert (curve.x[0], curve.x[-1]) == (1, 10_000)
    assert 4000 in curve.x, "its peak"
    steps = curve.x.astype(float)
    np.testing.assert_allclose(curve.y, 512**-0.5 * np.minimum(steps**-0.5, steps * 4000**-1.5), rtol=1e-5)


def test_lengths_and_padding_equal_the_batches(tiny):
    subject = load_subject(str(tiny.run))
    encoded = subject.encoded
    source, target = plots.lengths(subject)
    for curve, side, extra in ((source, encoded.source, 1), (target, encoded.target, 1)):
        counted = Counter(len(side(i)) + extra for i in range(len(encoded)))
        assert {x: y for x, y in zip(curve.x.tolist(), curve.y.tolist(), strict=True) if y} == pytest.approx(
            {length: 100 * count / len(encoded) for length, count in counted.items()}
        )
    (curve,) = plots.padding(subject)
    plan = plan_batches(subject.config, encoded)
    assert len(curve.x) == plan.batches_per_epoch
    for index in range(plan.batches_per_epoch):
        shape, pairs, _ = plan.rows(index)
        tokens = sum(len(encoded.source(int(i))) + len(encoded.target(int(i))) + 2 for i in pairs)
        assert curve.x[index] == max(shape[1:])
        assert curve.y[index] == pytest.approx(
            100 - 100 * tokens / (shape.rows * (shape.src_length + shape.tgt_length))
        )
    assert curve.note == f"{plan.padding_share:.1%} of all positions"


@pytest.mark.filterwarnings("default")
def test_run_without_its_corpus_skips_lengths_with_a_warning(tiny, tmp_path, capsys, drawn):
    """Check that the cache suffices, and that a missing corpus is an error only if its panel was asked for."""
    run = tiny.copy(tmp_path / "moved")
    config = json.loads((run / "config.json").read_text())
    config["data"]["directory"] = str(tmp_path / "nowhere")
    RunDir(run).write("config.json", json.dumps(config))
    assert load_subject(str(run)).encoded.sha256() == load_subject(str(tiny.run)).encoded.sha256()
    shutil.rmtree(run / "cache")
    with pytest.raises(UserError, match="nowhere"):
        plot([str(run)], tmp_path / "plots.svg", ["lengths"])
    with pytest.warns(UserWarning, match="moved without lengths and padding: .*nowhere"):
        names = plot([str(run)], tmp_path / "plots.svg")
    assert names == ["loss", "valid_loss", "bleu", "learning_rate"]
    assert load_subject(str(tiny.run)).encoded is not None
    shutil.rmtree(tiny.copy(tmp_path / "again") / "cache")
    assert len(load_subject(str(tmp_path / "again")).encoded) == 200, "encoded again"


def test_positional_encodings_of_recipes(drawn, tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from transformer_jax import Config, ModelConfig\n"
        "def get_config(name):\n"
        "    positions = {'positions': 'halves'} if name == 'halves' else {'positions': name}\n"
        "    return Config(model=ModelConfig(d_model=16, num_heads=2, d_ff=8, max_length=256, **positions))\n"
    )
    assert plot([f"{recipe}:interleaved", f"{recipe}:halves"], tmp_path / "p.svg", ["positions"]) == [
        f"positions of {recipe}:interleaved",
        f"positions of {recipe}:halves",
    ]
    tables = [plots.positional_encoding(load_subject(f"{recipe}:{name}")) for name in ("interleaved", "halves")]
    np.testing.assert_array_equal(tables[0], sinusoids(100, 16))
    np.testing.assert_array_equal(tables[1], sinusoids(100, 16, "halves"))
    with pytest.raises(UserError, match=r"learned: model.positions is 'learned', so only a run has them"):
        plot([f"{recipe}:learned"], tmp_path / "p.svg", ["positions"])


def test_learned_positions_come_from_the_run(monkeypatch, tmp_path):
    config = Config(model=ModelConfig(d_model=4, num_heads=2, positions="learned", max_length=258, position_offset=2))
    table = np.arange(258 * 4, dtype=np.float32).reshape(258, 4)
    params = {"source_positions": {"table": table}}
    monkeypatch.setattr("transformer_jax.decoding.decode.run_params", lambda *_: params)
    found = plots.positional_encoding(Subject("run", config, plots.RunDir(tmp_path)))
    np.testing.assert_array_equal(found, table[2:102])


def test_plot_command_writes_a_reproducible_picture(tiny, tmp_path, capsys, optional_package):
    optional_package("matplotlib")
    output = tmp_path / "plots.svg"
    rest = ["--output", str(output), "--no-compilation-cache"]
    assert cli.main(["plot", f"{tiny.folder}/tiny.py", str(tiny.run), *rest, "--panels", "learning_rate", "loss"]) == 0
    assert capsys.readouterr().out == f"{output}: learning_rate, loss\n"
    text = output.read_text()
    for words in ("learning rate", "training loss", f"{tiny.folder}/tiny.py", str(tiny.run)):
        assert words in text
    first = output.read_bytes()
    assert cli.main(["plot", f"{tiny.folder}/tiny.py", str(tiny.run), *rest, "--panels", "learning_rate", "loss"]) == 0
    assert output.read_bytes() == first
    capsys.readouterr()
    for args, message in (
        (["nowhere"], "error: nowhere: no such recipe"),
        ([str(tiny.folder)], "is not a run"),
        (
            [f"{tiny.folder}/tiny.py", "--panels", "loss"],
            "nothing to plot: loss needs the metrics or the corpus of a run",
        ),
    ):
        assert cli.main(["plot", *args, *rest]) == 1
        assert message in capsys.readouterr().err
    assert cli.main(["plot", *rest]) == 2
    assert "name a run or a recipe" in capsys.readouterr().err
