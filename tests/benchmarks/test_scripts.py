"""The scripts run at small sizes, and print the documented results."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import batching, gpu_all, input_pipeline, startup
from benchmarks.corpora import LENGTHS, entropy, make_corpus, make_plan
from benchmarks.sizes import SIZES, random_batch

ROOT = Path(__file__).resolve().parents[2]
SPREAD = {"median", "min", "q1", "q3", "max"}


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.filterwarnings("ignore")
def test_gpu_benchmarks_run_at_tiny_scale(tmp_path, optional_package):
    for name in ("torch", "ctranslate2"):
        optional_package(name)
    command = [sys.executable, "-m", "benchmarks.gpu_all", str(tmp_path), "--device", "cpu", "--scale", "tiny"]
    # More threads only contend with other tests.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of((tmp_path / "cpu.jsonl").read_text())
    assert lines == lines_of(done.stdout)
    parts = [line for line in lines if line["benchmark"] == "gpu_all"]
    assert [line["name"] for line in parts] == ["base", "choices", "decoding"]
    assert not any("skipped" in line for line in parts), parts

    (step,) = [line for line in lines if line["benchmark"] == "training_step"]
    assert step["name"] == "nano bfloat16 rows 4 length 8 vs autocast"
    assert set(step["ratio"]) == set(step["seconds"]["ours"]) == SPREAD
    assert step["ratio"]["median"] == pytest.approx(
        step["seconds"]["peer"]["median"] / step["seconds"]["ours"]["median"], rel=1e-3
    )
    # Both sides have the same parameters, and start near the loss of uniform guessing.
    ours, peer = step["ours_info"], step["peer_info"]
    assert ours["parameters"] == peer["parameters"]
    for side in (ours, peer):
        assert abs(side["first_loss"] - np.log(SIZES["nano"].vocab_size)) < 1.5
    share = step["model_flops"] / step["seconds"]["ours"]["median"] / step["matrix_flops_per_second"]
    assert step["share_of_matrix_rate"] == pytest.approx(share, abs=1e-4)
    assert min(step["peak_bytes"], step["peer_peak_bytes"]) > 1e7

    variants = {line["variant"]: line for line in lines if line["benchmark"] == "variants" and "variant" in line}
    assert variants["defaults"]["ratio"]["median"] == 1.0
    (kernels,) = [line["kernels"] for line in lines if line["benchmark"] == "variants" and "kernels" in line]
    assert 0 < kernels["xla"]["logits"] < 0.05  # bfloat16 is close to float32, but not equal

    (decoding,) = [line for line in lines if line["benchmark"] == "decoding"]
    assert decoding["equal_outputs"] == "2 of 2"  # equal weights give equal translations
    assert decoding["words_per_second"] == pytest.approx(32 * decoding["sentences_per_second"], rel=1e-2)
    assert decoding["peer_info"]["inter_threads"] >= 1
    assert decoding["share_of_limit"] > 0


def test_most_important_parts_run_first():
    assert [part.name for part in gpu_all.parts("full")[:2]] == ["base", "big"]
    for part in gpu_all.parts("full"):
        # Each part is a valid command line of its script.
        module, *flags = part.arguments
        with pytest.raises(SystemExit) as stopped:
            importlib.import_module(f"benchmarks.{module}").main([*flags, "--help"])
        assert stopped.value.code == 0


def test_training_benchmark_uses_the_batches_of_a_plan():
    spec = {"corpus": "wmt", "size": "nano", "dtype": "float32", "batching": "bucketed"}
    info, turn = batching.train({**spec, "pairs": 40, "batch_tokens": 256, "max_shapes": 1})
    assert info["shapes"] == 1
    answer = turn({"units": 2})
    assert answer["seconds"] > answer["unit_seconds"] > 0  # a batch is less than a million tokens


def test_exhausted_time_budget_is_reported(tmp_path, capsys):
    assert gpu_all.main([str(tmp_path), "--device", "cpu", "--scale", "tiny", "--seconds", "0"]) == 1
    lines = lines_of(capsys.readouterr().out)
    assert [line["name"] for line in lines] == ["base", "choices", "decoding"]
    assert all("left" in line["skipped"] for line in lines)


def test_input_pipeline_counts_are_correct():
    spec = {"corpus": "multi30k", "pairs": 2_000, "batching": "bucketed", "batch_tokens": 1_024, "counted_batches": 1}
    info, turn = input_pipeline.pipeline(spec)
    encoded = make_corpus("multi30k", 2_000, 37_000)
    tokens = encoded.source_lengths.sum() + encoded.target_lengths.sum()
    assert info["tokens_per_batch"] * info["batches_per_epoch"] == pytest.approx(tokens)
    plan = make_plan("bucketed", encoded, 1_024)
    rows = [plan.rows(index).shape for index in range(plan.batches_per_epoch)]
    positions = sum(shape.rows * (shape.src_length + shape.tgt_length) for shape in rows)
    assert info["padding_share"] == pytest.approx(1 - tokens / positions, abs=1e-4)
    assert 1 < info["shapes"] <= 12
    assert turn({"units": 1})["seconds"] > 0


def test_entropy_measures_the_order_of_shapes():
    sorted_order, random_order = [1] * 500 + [2] * 500, np.random.default_rng(0).integers(1, 3, 1000).tolist()

    def given_previous(items):
        pairs = itertools.pairwise(items)
        return entropy(pairs) - entropy(items[:-1])

    assert given_previous(sorted_order) < 0.02
    assert given_previous(random_order) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", LENGTHS)
def test_synthetic_lengths_match_the_real_corpus(name):
    mean, deviation, ratio_mean, ratio_deviation = LENGTHS[name]
    encoded = make_corpus(name, 20_000, 1_000)
    source, target = np.log(encoded.source_lengths), np.log(encoded.target_lengths)
    assert source.mean() == pytest.approx(mean, abs=0.03)
    assert source.std() == pytest.approx(deviation, rel=0.05)
    assert (target - source).mean() == pytest.approx(ratio_mean, abs=0.02)
    assert (target - source).std() == pytest.approx(ratio_deviation, rel=0.1)


def test_random_batch_is_well_formed():
    src, tgt_in, tgt_out = random_batch(50, rows=200, length=20)
    for side in (src, tgt_out):
        ends = (side == 2).argmax(axis=1)
        assert np.all((side == 2).sum(axis=1) == 1)
        assert ends.min() == 16  # 17 tokens of 20 with EOS
        assert ends.max() == 19
        assert np.all((side != 0).sum(axis=1) == ends + 1)
    assert np.all(tgt_in[:, 0] == 1)
    inner = tgt_out[:, :-1]
    np.testing.assert_array_equal(tgt_in[:, 1:], np.where(inner == 2, 0, inner))


def test_import_times_are_reported(capsys):
    assert startup.main(["--parts", "imports", "--imports", "transformer_jax,no_such_module", "--rounds", "1"]) == 1
    bad, good = lines_of(capsys.readouterr().out)
    assert "No module named 'no_such_module'" in bad["skipped"]
    assert good["name"] == "import transformer_jax"
    assert good["seconds"]["ours"]["median"] < 5


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("training_step", ["--sizes", "huge"], "legal: nano, tiny"),
        ("training_step", ["--peers", "jit"], "legal: eager"),
        ("decoding", ["--pairs", "ours:theirs"], "legal: ours"),
        ("decoding", ["--run", "somewhere"], "--run and --source belong together"),
    ],
)
def test_invalid_usage_is_reported(script, arguments, message, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{script}").main(arguments)
    assert message in capsys.readouterr().err
