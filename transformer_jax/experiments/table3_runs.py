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
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.experiments.table3 import PAPER, ROWS, perplexity_of, table3_config
from transformer_jax.model.transformer import count_parameters
from transformer_jax.runtime.distributed import broadcast_from_main, main_process_logger, on_main_process
from transformer_jax.runtime.files import read_json_lines, to_json, write_atomically
from transformer_jax.types import UserError
from transformer_jax.visualization.canvas import COLORS, drawing

logger = main_process_logger(__name__)


def run_table3(rows: Sequence[str], base: Config, workdir: str | Path) -> Iterator[dict[str, Any]]:
    """Trains rows around a base recipe, or goes on with them, and scores each on the validation split.

    A row's run is `workdir`/ROW. All have the steps of `base`, and no test split. Yields the figures of each as soon as
    it is trained, the paper's with them; `workdir`/table3.jsonl has these, and those of rows trained there before.

    Raises:
        UserError: no such row, no validation split, or anything that `commands.train` raises.
    """
    if not base.data.valid:
        raise UserError("data.valid is empty; the rows of Table 3 are scored on the validation split")
    base = dataclasses.replace(base, data=dataclasses.replace(base.data, test=""))
    configs = {row: table3_config(row, base) for row in rows}  # what is wrong with any is found before the training
    file = Path(workdir) / "table3.jsonl"
    for row, config in configs.items():
        run = Path(workdir) / row
        logger.info("--- row %s", row)
        outcome = commands.train(config, run)
        if outcome.interrupted_by:
            return
        decoding = json.loads(json.dumps(dataclasses.asdict(config.decoding)))  # with lists for tuples, as in the file
        asked = {"num_steps": config.training.num_steps, "valid": config.data.valid, "decoding": decoding}
        result = broadcast_from_main(_read(file).get(row))
        if outcome.state is not None or result is None or result.get("asked") != asked:
            result = {
                "row": row,
                "change": _change(base, config),
                "parameters": count_parameters(config.model),
                **score_commands.evaluate(run, split="valid", num_samples=0),
                "paper": PAPER[row]._asdict(),
                "asked": asked,
            }
            on_main_process(_add)(file, result)
        # What a row compiled is mapped into memory in thousands of places, of which a process may have 65,530.
        jax.clear_caches()
        yield result


def render(results: Sequence[dict[str, Any]]) -> str:
    """Results of `run_table3` as a table, the paper's figures at the right."""
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
    first, correlation = results[0], rank_correlation(results)
    return "\n".join(
        [
            *lines,
            f"here: {first['num_sentences']} sentences of validation after {first['asked']['num_steps']} steps, "
            f"{first['bleu_signature']}",
            "the paper: newstest2013. Perplexities are per token of a vocabulary: the order of the rows compares, not "
            "the figures",
            *([f"Spearman's rank correlation of the perplexities: {correlation:.2f}"] if len(results) > 2 else []),
        ]
    )


def rank_correlation(results: Sequence[dict[str, Any]]) -> float:
    """Spearman's, between our perplexities and the paper's: 1 for the same order, -1 for the opposite one.

    Equal figures have the mean of their ranks. NaN for less than two rows, or where all are equal.
    """
    sides = [perplexity_of(one) for one in results], [PAPER[one["row"]].perplexity for one in results]
    ours, paper = (_ranks(np.array(side)) for side in sides)
    if len(results) < 2 or ours.std() == 0 or paper.std() == 0:
        return float("nan")
    return float(np.corrcoef(ours, paper)[0, 1])


def _change(base: Config, config: Config) -> str:
    """What the row changes, at this size.

    >>> _change(Config(), table3_config("B1", Config()))
    'd_k 16'
    """
    before, after = base.flat(), config.flat()
    return ", ".join(f"{name.partition('.')[2]} {after[name]}" for name in after if after[name] != before[name])


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """The rows of a `table3.jsonl` by name; none where there is no such file, or a damaged one."""
    return {row["row"]: row for row in read_json_lines(file) if str(row.get("row")) in PAPER}


def _add(file: Path, result: dict[str, Any]) -> None:
    # Read at the last moment: another command may train other rows here, and have scored one while this one was.
    known = _read(file) | {result["row"]: result}
    write_atomically(file, "".join(to_json(known[name]) + "\n" for name in PAPER if name in known))


def _ranks(values: np.ndarray) -> np.ndarray:
    below, up_to = (values < values[:, None]).sum(axis=1), (values <= values[:, None]).sum(axis=1)
    ranks: np.ndarray = (below + up_to + 1) / 2
    return ranks


def plot_table3(results: Sequence[dict[str, Any]], output: Path) -> None:
    """Draws the perplexity of each row, the best of the paper's at the top; ours beside it, on an axis of its own.

    Args:
        results: of `ablation.run_table3`.
        output: a .png, .svg or .pdf file.

    Raises:
        UserError: as `canvas.drawing`.
    """
    results = sorted(results, key=lambda one: PAPER[one["row"]].perplexity)
    places, groups = np.arange(len(results)), list(dict.fromkeys(row[0] for row in ROWS))
    colors = [COLORS[groups.index(one["row"][0])] for one in results]
    sides = [PAPER[one["row"]].perplexity for one in results], [perplexity_of(one) for one in results]
    with drawing(output, 7.2, 1.1 + 0.24 * len(results)) as figure:
        names = "the paper: newstest2013", "here: validation"
        for axes, values, name in zip(figure.subplots(1, 2, sharey=True), sides, names, strict=True):
            axes.scatter(values, places, c=colors, s=22)
            for one, value in zip(results, values, strict=True):
                if one["row"] == "base":
                    axes.axvline(value, color="#999999", linewidth=0.8, zorder=0)
            axes.set_title(name, fontsize=9)
            axes.set_xlabel("perplexity")
            axes.set_yticks(places, [f"{one['row']}  {one['change']}".strip() for one in results], fontsize=7)
            axes.grid(axis="y", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()
