"""Train rows of Table 3 at any size on any corpus and compare them with the published figures."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax import run as commands
from transformer_jax.config import Config
from transformer_jax.evaluation import evaluate as evaluation
from transformer_jax.experiments.table3 import PAPER, ROWS, perplexity_of, table3_config
from transformer_jax.model.transformer import count_parameters
from transformer_jax.runtime.distributed import main_process_logger, on_main_process
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import read_json_lines, to_json, write_atomically
from transformer_jax.visualization.canvas import COLORS, drawing

logger = main_process_logger(__name__)

Result = dict[str, Any]  # the figures of a trained row, as values that JSON can hold


def run_table3(rows: Sequence[str], base: Config, workdir: str | Path) -> Iterator[Result]:
    """Train or resume rows of Table 3 around a base recipe, and yield each row's scores on the validation split.

    The run of a row is `workdir`/ROW, and `workdir`/table3.jsonl has the results of all rows that were trained there.
    """
    require(base.data.valid, "data.valid is empty; the rows of Table 3 are scored on the validation split")
    base = base.with_changes(data={"test": ""})
    configs = {row: table3_config(row, base) for row in rows}  # raises before the first training run
    file = Path(workdir) / "table3.jsonl"
    for row, config in configs.items():
        run = Path(workdir) / row
        logger.info("--- row %s", row)
        outcome = commands.train(config, run)
        if outcome.interrupted_by:
            return
        decoding = json.loads(json.dumps(dataclasses.asdict(config.decoding)))  # tuples become lists, as in the file
        asked = {"num_steps": config.training.num_steps, "valid": config.data.valid, "decoding": decoding}
        result = on_main_process(_read)(file).get(row)
        if outcome.state is not None or result is None or result.get("asked") != asked:
            result = {
                "row": row,
                "change": _change(base, config),
                "parameters": count_parameters(config.model),
                **evaluation.evaluate(run, split="valid", num_samples=0),
                "paper": PAPER[row]._asdict(),
                "asked": asked,
            }
            on_main_process(_add)(file, result)
        # Compiled code occupies thousands of memory mappings per row, and Linux allows a process 65,530.
        jax.clear_caches()
        yield result


def render(results: Sequence[Result]) -> str:
    """Format the results of `run_table3` as a text table, with the paper's numbers on the right."""
    width = max(len(result["change"]) for result in results) + 1
    lines = [
        f"{'':{width + 6}}{'here':>24}{'the paper':>24}",
        f"{'row':6}{'change':{width}}" + 2 * f"{'params e6':>10}{'PPL':>8}{'BLEU':>6}",
    ]
    for result in results:
        paper = PAPER[result["row"]]
        millions = "" if paper.millions is None else paper.millions
        lines.append(
            f"{result['row']:6}{result['change']:{width}}{result['parameters'] / 1e6:10.2f}{perplexity_of(result):8.2f}"
            f"{result['bleu']:6.1f}{millions:>10}{paper.perplexity:8.2f}{paper.bleu:6.1f}"
        )
    first = results[0]
    lines += [
        f"here: {first['num_sentences']} sentences of validation after {first['asked']['num_steps']} steps, "
        f"{first['bleu_signature']}",
        "the paper: newstest2013. Perplexities are per token of a vocabulary: compare the order of the rows, not the "
        "numbers",
    ]
    if len(results) > 2:
        lines.append(f"Spearman's rank correlation of the perplexities: {rank_correlation(results):.2f}")
    return "\n".join(lines)


def rank_correlation(results: Sequence[Result]) -> float:
    """Return Spearman's rank correlation of our perplexities and the paper's, or NaN if it is undefined."""
    sides = np.array([[perplexity_of(result), PAPER[result["row"]].perplexity] for result in results]).T[:, :, None]
    others = sides.swapaxes(1, 2)
    ranks = ((others < sides).sum(axis=2) + (others <= sides).sum(axis=2) + 1) / 2  # the mean rank of equal values
    return float(np.corrcoef(ranks)[0, 1]) if ranks.std(axis=1).all() else float("nan")


def _change(base: Config, config: Config) -> str:
    """Describe what a row changes in the base recipe.

    >>> _change(Config(), table3_config("B1", Config()))
    'd_k 16'
    """
    before, after = base.flat(), config.flat()
    return ", ".join(f"{name.partition('.')[2]} {after[name]}" for name in after if after[name] != before[name])


def _read(file: Path) -> dict[str, Result]:
    """Return the results in a `table3.jsonl` by row. A missing file gives no results; damaged lines are skipped."""
    return {row["row"]: row for row in read_json_lines(file) if str(row.get("row")) in PAPER}


def _add(file: Path, result: Result) -> None:
    # The file is read again, because another process may have added other rows during training.
    results = _read(file) | {result["row"]: result}
    write_atomically(file, "".join(to_json(results[name]) + "\n" for name in PAPER if name in results))


def plot_table3(results: Sequence[Result], output: Path) -> None:
    """Plot the perplexity of each row, sorted by the paper's: the paper's on the left, ours on the right."""
    results = sorted(results, key=lambda result: PAPER[result["row"]].perplexity)
    places, groups = np.arange(len(results)), list(dict.fromkeys(row[0] for row in ROWS))
    colors = [COLORS[groups.index(result["row"][0])] for result in results]
    sides = [PAPER[result["row"]].perplexity for result in results], [perplexity_of(result) for result in results]
    with drawing(output, 7.2, 1.1 + 0.24 * len(results)) as figure:
        names = "the paper: newstest2013", "here: validation"
        for axes, values, name in zip(figure.subplots(1, 2, sharey=True), sides, names, strict=True):
            axes.scatter(values, places, c=colors, s=22)
            for result, value in zip(results, values, strict=True):
                if result["row"] == "base":
                    axes.axvline(value, color="#999999", linewidth=0.8, zorder=0)
            axes.set_title(name, fontsize=9)
            axes.set_xlabel("perplexity")
            axes.set_yticks(places, [f"{result['row']}  {result['change']}".strip() for result in results], fontsize=7)
            axes.grid(axis="y", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
