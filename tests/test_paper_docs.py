"""The two documents that hold the code to the paper, docs/faithfulness.md and docs/paper_map.md, and the presets."""

import ast
import dataclasses
import functools
import importlib
import re
from pathlib import Path

import pytest
import tiers

from transformer_jax.config import Config, ModelConfig
from transformer_jax.presets import PRESETS, preset
from transformer_jax.types import UserError

ROOT = Path(__file__).resolve().parents[1]
LEDGER, MAP = ROOT / "docs" / "faithfulness.md", ROOT / "docs" / "paper_map.md"

# Which preset is which column of the ledger; paper_big is the paper's column too.
COLUMNS = {
    "paper": "paper_base",
    "t2t 2017": "t2t_2017",
    "t2t today": "t2t_2018",
    "fairseq": "fairseq",
    "PyTorch": "torch",
    "Marian": "marian",
}
# Fields of ModelConfig that are sizes, which the ledger does not list.
SIZES = {
    *("vocab_size", "source_vocab_size", "d_model", "num_layers", "num_heads", "d_ff", "d_k", "d_v", "max_length"),
    *("decoder_num_layers", "decoder_num_heads", "decoder_d_ff", "decoder_d_k", "decoder_d_v"),
}
# Fields of ModelConfig that select an implementation without changing the function.
COMPUTATION = {"attention_kernel", "remat", "scan_layers"}
# Fields that presets set in addition to those of the ledger.
SIZES_OF_PRESETS = {"model.d_model", "model.num_layers", "model.num_heads", "model.d_ff", "training.num_steps"}
DEFAULTS = Config().flat()
ROWS = 1_000  # of the vocabulary of the presets below
FLAT = {name: preset(name, ROWS).flat() for name in PRESETS}


def tables(page: Path) -> list[list[dict[str, str]]]:
    """Return the tables of a page. A row is {heading: cell}."""
    found: list[list[dict[str, str]]] = []
    heads: list[str] = []
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not heads:
            heads = cells
            found.append([])
        elif set("".join(cells)) != {"-"}:
            assert len(cells) == len(heads), line
            found[-1].append(dict(zip(heads, cells, strict=True)))
    return found


def code(cell: str) -> list[str]:
    """Return the parts in code font."""
    return re.findall(r"`([^`]+)`", cell)


CHOICES = [row for table in tables(LEDGER) for row in table if "field" in row]
FIELDS = {code(row["field"])[0]: row for row in CHOICES}
STEPS = [row for table in tables(MAP) for row in table]
ALL_ROWS = [row for page in (LEDGER, MAP) for table in tables(page) for row in table]


def literal(text: str):
    try:
        return ast.literal_eval(text)
    except ValueError:
        return text


def in_cell(row: dict[str, str], column: str):
    """Return (value of a cell,), or () for a cell without a value."""
    return tuple(literal(text) for text in code(row[column])[:1])


@functools.cache
def functions_of(file: Path) -> dict[str, set[str]]:
    """Return the names of a file's functions, each with the names of its arguments."""
    functions = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)]
    return {node.name: {arg.arg for arg in node.args.args} for node in functions}


def in_fast_tier(name: str) -> bool:
    """Return whether `tests/file.py::test_function` runs in the fast tier."""
    file, _, function = name.partition("::")
    return not tiers.is_slow(Path(file).relative_to("tests"), function, functions_of(ROOT / file)[function])


# ------------------------------------------------------------------------------------------------------ what is named


def test_paper_tables_are_parsed():
    assert len(FIELDS) == len(CHOICES) >= 40
    assert len(STEPS) >= 30
    assert len(ALL_ROWS) > len(CHOICES) + len(STEPS)  # the ledger's points without a field


@pytest.mark.parametrize("row", ALL_ROWS, ids=[str(number) for number in range(len(ALL_ROWS))])
def test_every_test_in_the_tables_exists(row):
    names = code(row["test"])
    assert names or row["test"] == "-", row
    for name in names:
        file, _, function = name.partition("::")
        assert function.startswith("test_"), name
        assert function in functions_of(ROOT / file), name


def test_fast_tier_checks_every_row_of_the_paper_map():
    assert not [row["test"] for row in STEPS if not any(map(in_fast_tier, code(row["test"])))]


def test_fast_tier_checks_every_ledger_row_without_third_party_code():
    third_party = [
        name for reason, names in tiers.SLOW.items() if "needs" in reason or "with" in reason for name in names
    ]
    named = [name for table in tables(LEDGER) for row in table for name in code(row["test"])]
    missing = {name for name in named if not in_fast_tier(name)}
    assert not {name for name in missing if not name.removeprefix("tests/").startswith(tuple(third_party))}


def test_every_slow_test_exists():
    for name in (*tiers.SLOW_NAMES, *tiers.SAMPLED):
        file, _, function = name.partition("::")
        assert (ROOT / "tests" / file).exists(), f"tests/tiers.py names {name}"
        assert not function or function in functions_of(ROOT / "tests" / file), f"tests/tiers.py names {name}"


@pytest.mark.parametrize("row", STEPS, ids=[str(number) for number in range(len(STEPS))])
def test_every_symbol_in_the_tables_exists(row):
    (name,) = code(row["code"])
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        if ROOT.joinpath(*parts[:length]).with_suffix(".py").is_file():
            thing = importlib.import_module(".".join(parts[:length]))
            for part in parts[length:]:
                thing = getattr(thing, part)
            return
    pytest.fail(f"{name} is in no module")


def test_paper_map_follows_the_order_of_the_paper():
    sections = [[int(number) for number in row["section"].partition(",")[0].split(".")] for row in STEPS]
    assert sections == sorted(sections)


def test_every_field_in_the_ledger_exists():
    assert set(FIELDS) <= set(DEFAULTS), set(FIELDS) - set(DEFAULTS)


def test_every_model_choice_is_in_the_ledger():
    names = {item.name for item in dataclasses.fields(ModelConfig)}
    assert names >= SIZES | COMPUTATION
    assert {f"model.{name}" for name in names - SIZES - COMPUTATION} == {
        field for field in FIELDS if field.startswith("model.")
    }


@pytest.mark.parametrize("field", FIELDS)
def test_default_equals_the_ledger(field):
    assert in_cell(FIELDS[field], "ours") == (DEFAULTS[field],)


# ----------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", PRESETS)
def test_preset_changes_only_ledger_fields_and_sizes(name):
    changed = {field for field, value in FLAT[name].items() if value != DEFAULTS[field]}
    assert changed <= set(FIELDS) | SIZES_OF_PRESETS | {"model.vocab_size"}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("column", COLUMNS)
def test_preset_has_the_values_of_its_column(column, field):
    """An empty cell means the paper's value, or else this project's. Negative ids count from the end."""
    row = FIELDS[field]
    (expected, *_) = in_cell(row, column) + in_cell(row, "paper") + in_cell(row, "ours")
    if field.endswith("_id") and expected < 0:
        expected += ROWS
    value = FLAT[COLUMNS[column]][field]
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_and_round_trip_through_json(name):
    config = preset(name, ROWS)
    assert Config.from_json(config.to_json()) == config


def test_sizes_of_the_presets():
    for name in PRESETS:
        reference = ModelConfig.big(50) if name == "paper_big" else ModelConfig.base(50)
        model = preset(name, 50).model
        assert (model.encoder, model.decoder, model.d_model) == (
            reference.encoder,
            reference.decoder,
            reference.d_model,
        )
    assert preset("paper_base", 37_000).model == ModelConfig.base(37_000)
    assert preset("paper_big", 37_000).model == ModelConfig.big(37_000)
    assert [preset(name, 50).training.num_steps for name in ("paper_base", "paper_big")] == [100_000, 300_000]


def test_big_differs_from_base_as_in_table_3():
    base, big = FLAT["paper_base"], FLAT["paper_big"]
    assert {field: value for field, value in big.items() if base[field] != value} == {
        "model.d_model": 1024,
        "model.d_ff": 4096,
        "model.num_heads": 16,
        "model.residual_dropout": 0.3,
        "training.num_steps": 300_000,
        "training.average_last": 20,
        "training.keep_checkpoints": 20,
    }


def test_special_ids_of_presets_match_their_reference_implementation():
    fairseq, marian, t2t = (preset(name, 60).model for name in ("fairseq", "marian", "t2t_2017"))
    assert fairseq.position_offset == fairseq.pad_id + 1 == 2
    assert fairseq.start_id == fairseq.eos_id == 2
    assert marian.start_id == marian.pad_id == 59
    assert t2t.start_id == t2t.pad_id == 0


def test_preset_accepts_changes_and_rejects_unknown_names():
    assert preset("marian", 60, pad_id=3, d_model=256).model == dataclasses.replace(
        preset("marian", 60).model, pad_id=3, d_model=256
    )
    with pytest.raises(UserError, match="no preset 't2t'; legal: paper_base, paper_big, t2t_2017, t2t_2018, fairseq"):
        preset("t2t", 60)
