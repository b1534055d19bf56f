"""Render the tables and the plot of docs/log/benchmarks.md from the JSON lines in benchmarks/results/.

python -m benchmarks.report             write the tables between their markers, and the plot next to the document
python -m benchmarks.report --check     exit with status 1 if the document is out of date, and write nothing

A table is placed between `<!-- begin NAME -->` and `<!-- end NAME -->`. NAME is a key of `TABLES` and a device, such as
`training_step cpu`, or `plot` for the plot. If several lines measure the same thing on the same device, the last line
of the last file in alphabetical order is used.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

Line = dict[str, Any]
RESULTS, DOCUMENT, PLOT = ROOT / "benchmarks" / "results", ROOT / "docs" / "log" / "benchmarks.md", "benchmarks.svg"
_BLOCK = re.compile(r"(<!-- begin (?P<name>[^>]+?) -->\n)(?P<body>.*?)(<!-- end (?P=name) -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the document; return the exit status."""
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--results", type=Path, default=RESULTS, help="folder of .jsonl files (default: %(default)s)")
    flags.add_argument("--document", type=Path, default=DOCUMENT, help="document to update (default: %(default)s)")
    flags.add_argument("--check", action="store_true", help="report whether the document is up to date; write nothing")
    flags.add_argument("--no-plot", action="store_true", help="leave the plot as it is")
    options = flags.parse_args(arguments)
    lines = read_lines(options.results)
    old = options.document.read_text(encoding="utf-8")
    new = render(old, lines)
    if options.check:
        if old != new:
            print(f"{options.document} is out of date with {options.results}. Run python -m benchmarks.report")
        return int(old != new)
    options.document.write_text(new, encoding="utf-8")
    if not options.no_plot:
        plot(lines, options.document.with_name(PLOT))
    return 0


def read_lines(folder: Path) -> list[Line]:
    """Return the lines of the folder's .jsonl files, with the newest line for each measurement.

    Raises:
        ValueError: A line is not a JSON object with a benchmark and a name. The message has the file and the line.
    """
    found: dict[tuple[str, str, str], Line] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
                key = (line["benchmark"], line["name"], line.get("device", "cpu"))
            except (json.JSONDecodeError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number}: not a benchmark result: {error}") from error
            found.pop(key, None)  # a repeated measurement moves to the position of its newest line
            found[key] = line
    return list(found.values())


def render(text: str, lines: Sequence[Line]) -> str:
    """Return the document with its tables rendered from the measurements.

    Raises:
        ValueError: A marker is not closed, or names an unknown table.
    """
    named = re.findall(r"<!-- begin ([^>]+?) -->", text)
    closed = [match["name"] for match in _BLOCK.finditer(text)]
    if named != closed:
        raise ValueError(f"markers not closed: {', '.join(sorted(set(named) - set(closed)))}")
    return _BLOCK.sub(lambda match: f"{match[1]}{_table(match['name'], lines)}{match[4]}", text)


def _table(name: str, lines: Sequence[Line]) -> str:
    if name == "plot":
        return f"![Speedup over other libraries]({PLOT})\n" if _plotted(lines) else "Not measured yet.\n"
    benchmark, _, device = name.partition(" ")
    if benchmark not in TABLES or device not in ("cpu", "gpu"):
        raise ValueError(f"no table {name!r}; expected one of {', '.join(TABLES)}, then a space and cpu or gpu")
    columns, row = TABLES[benchmark]
    chosen = [line for line in lines if line["benchmark"] == benchmark and line.get("device", "cpu") == device]
    rows = [row(line) for line in chosen if "skipped" not in line]
    skipped = [f"Not measured: {line['name']} ({line['skipped']})." for line in chosen if "skipped" in line]
    if not chosen:
        return "Not measured yet.\n"
    table = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    table += [f"| {' | '.join(cells)} |" for cells in rows]
    parts = ["\n".join(table) if rows else "", "\n".join(skipped), _machines(chosen)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _machines(lines: Sequence[Line]) -> str:
    """Return one sentence for each combination of machine, versions and commit in the measurements."""
    found: dict[str, None] = {}
    for line in lines:
        kind = line.get("ours_info", {}).get("device_kind", "cpu")
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items() if version)
        malloc = {True: "tuned malloc on both sides", False: "default malloc"}.get(line.get("malloc_tuned"), "")
        parts = [line["cpu"] + ("" if kind == "cpu" else f", {kind}"), f"{line['threads']} threads", versions, malloc]
        parts += [f"commit {line['commit']}", line["date"]]
        found["; ".join(part for part in parts if part)] = None
    return "\n".join(f"{text}." for text in found)


def _spread(line: Line) -> str:
    ratio = line["ratio"]
    return f"**{ratio['median']:.2f}x** ({ratio['min']:.2f}-{ratio['max']:.2f})"


def seconds(value: float | None) -> str:
    """Format a duration with a suitable unit.

    >>> [seconds(value) for value in (12.34, 0.01234, 1.2e-5, None)]
    ['12.3 s', '12.3 ms', '12 µs', '']
    """
    if value is None:
        return ""
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    return ""


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:,.0f} MB"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _both(line: Line) -> list[str]:
    sides = line["seconds"]
    return [seconds(sides[side]["median"]) if side in sides else "" for side in ("ours", "peer")]


def _training_row(line: Line) -> list[str]:
    info = line["ours_info"]
    return [
        line["name"].partition(" vs ")[0].removesuffix(" alone"),
        " x ".join(map(str, info["shape"])),
        line.get("peer", ""),
        _spread(line) if "ratio" in line else "",
        *_both(line),
        f"{line['tokens_per_second']:,}",
        _percent(line["share_of_matrix_rate"]),
        _megabytes(line["peak_bytes"]),
        _megabytes(line.get("peer_peak_bytes")),
        seconds(info["compile_seconds"]),
    ]


def _decoding_row(line: Line) -> list[str]:
    threads = line["peer_info"]
    setting = (
        f" ({threads['inter_threads']} x {threads['intra_threads']} threads)" if "inter_threads" in threads else ""
    )
    bleu = line.get("bleu")
    return [
        line["size"],
        "greedy" if line["beam"] == 1 else f"beam {line['beam']}",
        str(line["batch"]),
        line["ours"],
        line["peer"] + setting,
        _spread(line),
        *_both(line),
        f"{line['sentences_per_second']:,.4g}",
        line["equal_outputs"],
        _percent(line.get("share_of_limit")),
        f"{bleu['ours']:.2f} / {bleu['peer']:.2f}" if bleu else "",
    ]


def _pipeline_row(line: Line) -> list[str]:
    return [
        line["corpus"],
        line["batching"],
        line["peer"].removeprefix("training step of "),
        _spread(line),
        f"{line['batches_per_second']:,.4g}",
        str(line["shapes"]),
        _percent(line["padding_share"]),
        f"{line['shape_entropy_given_previous_bits']:.2f} of {line['shape_entropy_bits']:.2f}",
    ]


def _batching_row(line: Line) -> list[str]:
    sides = [line["ours_info"], line["peer_info"]]
    return [
        line["corpus"],
        f"{line['size']} {line['dtype']}",
        _spread(line),
        *_both(line),
        *(f"{side['shapes']}, {_percent(side['padding_share'])}, {seconds(side['compile_seconds'])}" for side in sides),
    ]


def _variants_row(line: Line) -> list[str]:
    if "kernels" in line:
        errors = {
            name: found if isinstance(found, bool) else ", ".join(f"{key} {value:.2g}" for key, value in found.items())
            for name, found in line["kernels"].items()
        }
        differences = "; ".join(f"{name}: {text}" for name, text in errors.items())
        return [line["name"], f"difference from float32: {differences}", "", "", ""]
    info = line["ours_info"]
    return [
        line["name"],
        _spread(line),
        seconds(line["seconds"]["ours"]["median"]),
        _megabytes(info["temporary_bytes"]),
        seconds(info["compile_seconds"]),
    ]


def _startup_row(line: Line) -> list[str]:
    found = line["seconds"]["ours"]
    spread = f"{seconds(found['min'])}-{seconds(found['max'])}" if line["rounds"] > 1 else ""
    return [line["name"], seconds(found["median"]), spread, _megabytes(line.get("peak_bytes"))]


def _part_row(line: Line) -> list[str]:
    return [line["name"], seconds(line["seconds"]["ours"]["median"])]


Row = Callable[[Line], list[str]]
TABLES: dict[str, tuple[list[str], Row]] = {
    "training_step": (
        [
            *("model", "batch", "compared with", "speedup", "step time", "its step time", "tokens/s"),
            *("share of matmul speed", "peak memory", "its peak memory", "compilation"),
        ],
        _training_row,
    ),
    "decoding": (
        [
            *("model", "search", "sentences per call", "ours", "compared with", "speedup", "time per call"),
            *("its time per call", "sentences/s", "equal outputs", "share of the limit", "BLEU"),
        ],
        _decoding_row,
    ),
    "input_pipeline": (
        [
            *("lengths", "batching", "consumer", "speed relative to the consumer", "batches/s", "shapes", "padding"),
            "entropy of the next shape given the last one, in bits, of its maximum",
        ],
        _pipeline_row,
    ),
    "batching": (
        [
            *("lengths", "model", "speed of packed relative to bucketed", "time per million tokens, packed"),
            *("time per million tokens, bucketed", "packed: shapes, padding, compilation"),
            "bucketed: shapes, padding, compilation",
        ],
        _batching_row,
    ),
    "variants": (
        ["setting", "speed relative to the defaults", "step time", "temporary memory", "compilation"],
        _variants_row,
    ),
    "startup": (["", "median", "range", "peak memory"], _startup_row),
    "gpu_all": (["part", "time"], _part_row),
}


def _plotted(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["benchmark"] in ("training_step", "decoding") and "ratio" in line]


def plot(lines: Sequence[Line], path: Path) -> None:
    """Draw the speedups over other libraries as bars with their range. Write nothing if there are none."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    shown = _plotted(lines)
    if not shown:
        return
    # A fixed hash salt and no date make the file a function of the measurements alone.
    with plt.rc_context({"svg.hashsalt": "benchmarks", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(9, 1 + 0.28 * len(shown)), layout="constrained")
        positions = range(len(shown))
        medians = [line["ratio"]["median"] for line in shown]
        below = [line["ratio"]["median"] - line["ratio"]["min"] for line in shown]
        above = [line["ratio"]["max"] - line["ratio"]["median"] for line in shown]
        colors = ["#4472a8" if median >= 1 else "#c0803c" for median in medians]
        axes.barh(positions, medians, xerr=[below, above], color=colors, ecolor="#404040", capsize=2)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(
            positions, [f"{line['benchmark']}: {line['name']} ({line['device']})" for line in shown], size=7
        )
        axes.invert_yaxis()
        axes.set_xlabel("speedup over the other library: median and range")
        figure.savefig(path, format="svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
