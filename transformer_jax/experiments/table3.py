"""Table 3 of the paper: its rows as configurations, at any size, trained and compared with the published figures."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax import run as commands
from transformer_jax.checkpoint.run_dir import write_atomically
from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, StackSize, TrainingConfig
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.model.transformer import count_parameters
from transformer_jax.runtime.distributed import broadcast_from_main, run_on_main
from transformer_jax.runtime.files import to_json
from transformer_jax.types import UserError
from transformer_jax.visualization.canvas import COLOURS, drawing

SIZES = {"model.d_model": 512, "model.d_ff": 2048, "model.num_layers": 6, "model.num_heads": 8, "model.d_k": 64}
"""The sizes of the paper's base model, which a row changes in proportion."""

# What each row changes in the base recipe. Where d_k and d_v stay None, h * d_k = d_model, as in rows A and in the
# rows C that change d_model.
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "A1": {"model.num_heads": 1},
    "A2": {"model.num_heads": 4},
    "A3": {"model.num_heads": 16},
    "A4": {"model.num_heads": 32},
    "B1": {"model.d_k": 16},
    "B2": {"model.d_k": 32},
    "C1": {"model.num_layers": 2},
    "C2": {"model.num_layers": 4},
    "C3": {"model.num_layers": 8},
    "C4": {"model.d_model": 256},
    "C5": {"model.d_model": 1024},
    "C6": {"model.d_ff": 1024},
    "C7": {"model.d_ff": 4096},
    "D1": {"model.residual_dropout": 0.0},
    "D2": {"model.residual_dropout": 0.2},
    "D3": {"training.label_smoothing": 0.0},
    "D4": {"training.label_smoothing": 0.2},
    "E": {"model.positions": "learned"},
    "big": {
        "model.d_model": 1024,
        "model.d_ff": 4096,
        "model.num_heads": 16,
        "model.residual_dropout": 0.3,
        "training.num_steps": 300_000,
    },
}


class Published(NamedTuple):
    """What the paper's Table 3 says of a row."""

    perplexity: float
    bleu: float
    millions: int | None
    """Parameters; the paper gives them only where they differ from base."""


PAPER = {
    "base": Published(4.92, 25.8, 65),
    "A1": Published(5.29, 24.9, None),
    "A2": Published(5.00, 25.5, None),
    "A3": Published(4.91, 25.8, None),
    "A4": Published(5.01, 25.4, None),
    "B1": Published(5.16, 25.1, 58),
    "B2": Published(5.01, 25.4, 60),
    "C1": Published(6.11, 23.7, 36),
    "C2": Published(5.19, 25.3, 50),
    "C3": Published(4.88, 25.5, 80),
    "C4": Published(5.75, 24.5, 28),
    "C5": Published(4.66, 26.0, 168),
    "C6": Published(5.12, 25.4, 53),
    "C7": Published(4.75, 26.2, 90),
    "D1": Published(5.77, 24.6, None),
    "D2": Published(4.95, 25.5, None),
    "D3": Published(4.67, 25.3, None),
    "D4": Published(5.47, 25.7, None),
    "E": Published(4.92, 25.7, None),
    "big": Published(4.33, 26.4, 213),
}


def perplexity_of(result: Mapping[str, Any]) -> float:
    """Of a row that was trained. JSON has null for what is not finite."""
    return float("inf") if result["perplexity"] is None else float(result["perplexity"])


def table3_config(row: str = "base", base: Config | None = None) -> Config:
    """The recipe of one row.

    Args:
        row: one of `ROWS`.
        base: another base recipe than the paper's. Each row has the number of steps of this one: the paper's big, which
            has three times the steps of the others, has not here.

    Raises:
        UserError: no such row; a base of which the row's change makes no model.

    >>> table3_config("C4", scaled(table3_config(), 4)).model.d_model
    64
    """
    if row not in ROWS:
        raise UserError(f"table3 has no recipe {row!r}; legal: {', '.join(ROWS)}")
    config = base or _BASE
    try:
        for field, value in ROWS[row].items():
            if base is not None and field == "training.num_steps":
                continue
            section, _, key = field.partition(".")
            new = _in_proportion(config, field, value) if field in SIZES else value
            config = dataclasses.replace(
                config, **{section: dataclasses.replace(getattr(config, section), **{key: new})}
            )
    except UserError as error:
        raise UserError(f"row {row} of Table 3: {error}; another base, or a smaller --scale") from error
    return config


def scaled(base: Config, scale: int) -> Config:
    """The recipe with d_model and d_ff divided by `scale`.

    Layers and heads stay, so the widths of the heads (d_model / h) are divided too, and h * d_k = d_model. The 32 heads
    of row A4 stay 32, each 16 / scale wide.

    Raises:
        UserError: one of them is not divisible, or the base gives the widths of its heads or sizes of its decoder.
    """
    model = base.model
    for name in ("d_k", "d_v", *(f"decoder_{size}" for size in StackSize._fields)):
        if getattr(model, name) is not None:
            raise UserError(f"model.{name} is {getattr(model, name)}; the rows of Table 3 need None there")
    if scale < 1 or model.d_model % scale or model.d_ff % scale:
        raise UserError(
            f"scale is {scale}; it must be a whole number that divides model.d_model {model.d_model} and model.d_ff "
            f"{model.d_ff}"
        )
    smaller = dataclasses.replace(model, d_model=model.d_model // scale, d_ff=model.d_ff // scale)
    return dataclasses.replace(base, model=smaller)


_BASE = Config(
    model=ModelConfig.base(37_000),  # section 5.1: "about"
    data=DataConfig(
        source="huggingface", name="wmt14", subset="de-en", valid="validation", test="test", batch_tokens=25_000
    ),
    training=TrainingConfig(num_steps=100_000),
    decoding=DecodingConfig(beam_size=4, alpha=0.6, max_length_offset=50),
)


def _in_proportion(config: Config, field: str, value: int) -> int:
    """What this size becomes if it changes as that of the paper's base model changes to `value`."""
    own = config.model.encoder.d_k if field == "model.d_k" else config.flat()[field]
    size, rest = divmod(own * value, SIZES[field])
    if rest:
        raise UserError(f"{field} would be {own} x {value} / {SIZES[field]}, which is not a whole number")
    return size


def run_table3(
    rows: Sequence[str], base: Config, workdir: str | Path, say: commands.Say = print
) -> Iterator[dict[str, Any]]:
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
        say(f"--- row {row}")
        outcome = commands.train(config, run, say)
        if outcome is not None and outcome.interrupted_by:
            return
        decoding = json.loads(json.dumps(dataclasses.asdict(config.decoding)))  # with lists for tuples, as in the file
        asked = {"num_steps": config.training.num_steps, "valid": config.data.valid, "decoding": decoding}
        result = broadcast_from_main(_read(file).get(row))
        if outcome is not None or result is None or result.get("asked") != asked:
            result = {
                "row": row,
                "change": _change(base, config),
                "parameters": count_parameters(config.model),
                **score_commands.evaluate(run, split="valid", num_samples=0),
                "paper": PAPER[row]._asdict(),
                "asked": asked,
            }
            run_on_main(partial(_add, file, result))
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
    try:
        return {row["row"]: row for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


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
    colors = [COLOURS[groups.index(one["row"][0])] for one in results]
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
