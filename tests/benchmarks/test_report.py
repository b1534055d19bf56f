"""The tables of docs/log/benchmarks.md are rendered from the committed results."""

import json

import pytest

from benchmarks import report
from benchmarks.common import environment, summary

TIMES = {"ours": summary([0.1, 0.11, 0.12]), "peer": summary([0.2, 0.21, 0.22])}
COMMON = {"ratio": summary([1.9, 2.0, 2.25]), "seconds": TIMES, "rounds": 3, "malloc_tuned": True}
INFO = {"shape": [64, 32], "compile_seconds": 12.5, "device_kind": "cpu", "temporary_bytes": 5e7}
LINES = [
    {
        **COMMON, "benchmark": "training_step", "name": "tiny float32 vs eager", "device": "cpu", "peer": "eager",
        "tokens_per_second": 12345, "share_of_matrix_rate": 0.4321, "peak_bytes": 1.5e9, "peer_peak_bytes": 2.5e9,
        "ours_info": INFO,
    },
    {"benchmark": "training_step", "name": "base float32 vs compile", "device": "cpu", "skipped": "no compiler"},
    {
        **COMMON, "benchmark": "decoding", "name": "small greedy batch 32 ours vs ctranslate2_int8", "device": "cpu",
        "size": "small", "beam": 1, "batch": 32, "ours": "ours", "peer": "ctranslate2_int8",
        "equal_outputs": "31 of 32", "sentences_per_second": 290.9, "share_of_limit": 0.5,
        "peer_info": {"inter_threads": 2, "intra_threads": 1},
    },
    {
        **COMMON, "benchmark": "input_pipeline", "name": "wmt bucketed vs tiny", "device": "cpu", "corpus": "wmt",
        "batching": "bucketed", "peer": "training step of tiny", "batches_per_second": 111.0, "shapes": 12,
        "padding_share": 0.0789, "shape_entropy_bits": 3.5, "shape_entropy_given_previous_bits": 3.25,
    },
    {
        **COMMON, "benchmark": "batching", "name": "wmt small", "device": "cpu", "corpus": "wmt", "size": "small",
        "dtype": "float32", "ours_info": {"shapes": 1, "padding_share": 0.03, "compile_seconds": 9.0},
        "peer_info": {"shapes": 12, "padding_share": 0.08, "compile_seconds": 99.0},
    },
    {**COMMON, "benchmark": "variants", "name": "small float32 remat=layers", "device": "cpu", "ours_info": INFO},
    {
        "benchmark": "variants", "name": "small float32 kernels", "device": "cpu",
        "kernels": {"xla": {"logits": 0.01}, "cudnn": {"logits": 0.011}, "equal": True},
    },
    {"benchmark": "startup", "name": "import jax", "seconds": {"ours": summary([0.4, 0.5])}, "rounds": 2},
    {"benchmark": "gpu_all", "name": "base", "device": "gpu", "seconds": {"ours": {"median": 99.0}}},
]  # fmt: skip
NAMES = [*(f"{name} cpu" for name in report.TABLES if name != "gpu_all"), "gpu_all gpu", "training_step gpu", "plot"]
DOCUMENT = "\n".join(f"# {name}\n<!-- begin {name} -->\nold\n<!-- end {name} -->\nafter" for name in NAMES) + "\n"


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    lines = [json.dumps({**line, **environment()}) for line in LINES]
    stale = json.dumps({**LINES[0], "tokens_per_second": 777, **environment()})
    (folder / "a.jsonl").write_text("\n".join([stale, *lines[:3]]) + "\n")
    (folder / "b.jsonl").write_text("\n".join(lines[3:]) + "\n")
    return folder


def section(text, name):
    return text.partition(f"<!-- begin {name} -->\n")[2].partition(f"<!-- end {name} -->")[0]


def test_tables_contain_the_measurements(results, tmp_path):
    document = tmp_path / "benchmarks.md"
    document.write_text(DOCUMENT)
    assert report.main(["--results", str(results), "--document", str(document), "--no-plot"]) == 0
    text = document.read_text()
    row = "| tiny float32 | 64 x 32 | eager | **2.00x** (1.90-2.25) | 110 ms | 210 ms | 12,345 | 43.2 % | 1,500 MB | "
    assert row + "2,500 MB | 12.5 s |" in text
    step = section(text, "training_step cpu")
    assert "777" not in step  # replaced by a newer line
    assert "Not measured: base float32 vs compile (no compiler)." in step
    assert "tuned malloc on both sides" in step
    assert f"jax {environment()['versions']['jax']}" in step
    decoding = "| small | greedy | 32 | ours | ctranslate2_int8 (2 x 1 threads) | **2.00x** (1.90-2.25) | 110 ms | "
    assert decoding + "210 ms | 290.9 | 31 of 32 | 50.0 % |  |" in section(text, "decoding cpu")
    pipeline = "| wmt | bucketed | tiny | **2.00x** (1.90-2.25) | 111 | 12 | 7.9 % | 3.25 of 3.50 |"
    assert pipeline in section(text, "input_pipeline cpu")
    assert "1, 3.0 %, 9 s | 12, 8.0 %, 99 s" in section(text, "batching cpu")
    variants = section(text, "variants cpu")
    assert "| small float32 remat=layers | **2.00x** (1.90-2.25) | 110 ms | 50 MB | 12.5 s |" in variants
    assert "xla: logits 0.01; cudnn: logits 0.011; equal: True" in variants
    assert "| import jax | 450 ms | 400 ms-500 ms |  |" in section(text, "startup cpu")
    assert "| base | 99 s |" in section(text, "gpu_all gpu")
    assert section(text, "training_step gpu") == "Not measured yet.\n"
    assert section(text, "plot") == "![Speedup over other libraries](benchmarks.svg)\n"
    assert text.count("after") == len(NAMES)
    assert "old" not in text
    # Rendering again changes nothing, and --check passes.
    assert report.main(["--results", str(results), "--document", str(document), "--check"]) == 0
    document.write_text(text.replace("12,345", "12,346"))
    assert report.main(["--results", str(results), "--document", str(document), "--check"]) == 1


def test_plot_has_every_speedup_and_is_deterministic(results, tmp_path, monkeypatch, optional_package):
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))  # instead of the user's home
    optional_package("matplotlib")
    lines = report.read_lines(results)
    report.plot(lines, tmp_path / "one.svg")
    report.plot(lines, tmp_path / "two.svg")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    for name in ("training_step: tiny float32 vs eager", "decoding: small greedy batch 32 ours vs ctranslate2_int8"):
        assert name in text
    assert "import jax" not in text


def test_invalid_markers_and_results_raise(tmp_path):
    with pytest.raises(ValueError, match="no table 'speed cpu'; expected one of training_step"):
        report.render("<!-- begin speed cpu -->\n<!-- end speed cpu -->\n", [])
    with pytest.raises(ValueError, match="not closed: startup cpu"):
        report.render("<!-- begin startup cpu -->\n", [])
    (tmp_path / "bad.jsonl").write_text('{"benchmark": "startup", "name": "x"}\n{"half": \n')
    with pytest.raises(ValueError, match=r"bad.jsonl, line 2: not a benchmark result"):
        report.read_lines(tmp_path)


def test_document_is_up_to_date_with_the_committed_results():
    text = report.DOCUMENT.read_text(encoding="utf-8")
    assert report.render(text, report.read_lines(report.RESULTS)) == text
    assert report.render(text, []).count("Not measured yet.") >= 5  # the markers exist
