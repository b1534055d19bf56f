"""configs/table3.py against the paper's Table 3, and the operations of its models."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from transformer_jax.accelerators.cost import (
    PAPER_COSTS,
    attention_products,
    matrix_entries,
    parameters_by_part,
    params_report,
    training_flops,
)
from transformer_jax.config import Config, ModelConfig
from transformer_jax.model.transformer import Transformer, abstract_params, count_parameters
from transformer_jax.presets import load_recipe, numbers_config
from transformer_jax.types import UserError

RECIPE = str(Path(__file__).resolve().parents[2] / "configs" / "table3.py")

# row: (what changes against base, perplexity, BLEU, millions of parameters: the paper's and those of 40,960 rows).
TABLE_3 = {
    "base": ({}, 4.92, 25.8, 65, 65.11),
    "A1": ({"model.num_heads": 1}, 5.29, 24.9, None, 65.11),
    "A2": ({"model.num_heads": 4}, 5.00, 25.5, None, 65.11),
    "A3": ({"model.num_heads": 16}, 4.91, 25.8, None, 65.11),
    "A4": ({"model.num_heads": 32}, 5.01, 25.4, None, 65.11),
    "B1": ({"model.d_k": 16}, 5.16, 25.1, 58, 58.02),
    "B2": ({"model.d_k": 32}, 5.01, 25.4, 60, 60.38),
    "C1": ({"model.num_layers": 2}, 6.11, 23.7, 36, 35.68),
    "C2": ({"model.num_layers": 4}, 5.19, 25.3, 50, 50.40),
    "C3": ({"model.num_layers": 8}, 4.88, 25.5, 80, 79.82),
    "C4": ({"model.d_model": 256}, 5.75, 24.5, 28, 27.85),
    "C5": ({"model.d_model": 1024}, 4.66, 26.0, 168, 167.94),
    "C6": ({"model.d_ff": 1024}, 5.12, 25.4, 53, 52.51),
    "C7": ({"model.d_ff": 4096}, 4.75, 26.2, 90, 90.30),
    "D1": ({"model.residual_dropout": 0.0}, 5.77, 24.6, None, 65.11),
    "D2": ({"model.residual_dropout": 0.2}, 4.95, 25.5, None, 65.11),
    "D3": ({"training.label_smoothing": 0.0}, 4.67, 25.3, None, 65.11),
    "D4": ({"training.label_smoothing": 0.2}, 5.47, 25.7, None, 65.11),
    "E": ({"model.positions": "learned"}, 4.92, 25.7, None, 66.16),
    "big": (
        {
            "model.d_model": 1024,
            "model.d_ff": 4096,
            "model.num_heads": 16,
            "model.residual_dropout": 0.3,
            "training.num_steps": 300_000,
        },
        *(4.33, 26.4, 213, 218.30),
    ),
}


@functools.cache
def row_config(name: str) -> Config:
    return load_recipe(f"{RECIPE}:{name}")


@pytest.fixture(scope="module")
def report():
    return params_report(RECIPE, flops=True)[0]


def test_base_is_the_wmt14_recipe_without_averaging():
    config, wmt14 = row_config("base"), load_recipe(str(Path(RECIPE).with_name("wmt14_en_de_base.py"))).flat()
    differing = {field: value for field, value in config.flat().items() if value != wmt14[field]}
    for field in ("training.validate_every", "training.checkpoint_every", "training.checkpoint_seconds"):
        del differing[field]
    assert differing == {"training.average_last": 0, "decoding.checkpoint": "last"}  # "no checkpoint averaging"
    assert load_recipe(RECIPE) == config


@pytest.mark.parametrize("name", TABLE_3)
def test_row_differs_from_base_only_in_its_change(name):
    base, flat = row_config("base").flat(), row_config(name).flat()
    assert {field: value for field, value in flat.items() if base[field] != value} == TABLE_3[name][0]


@pytest.mark.parametrize(
    ("name", "num_heads", "d_k", "d_v"),
    [
        *(("A1", 1, 512, 512), ("A2", 4, 128, 128), ("A3", 16, 32, 32), ("A4", 32, 16, 16)),
        *(("B1", 8, 16, 64), ("B2", 8, 32, 64), ("C4", 8, 32, 32), ("C5", 8, 128, 128), ("big", 16, 64, 64)),
    ],
)
def test_widths_of_the_heads(name, num_heads, d_k, d_v):
    model = row_config(name).model
    for size in (model.encoder, model.decoder):
        assert (size.num_heads, size.d_k, size.d_v) == (num_heads, d_k, d_v)


def test_unknown_row_is_rejected():
    with pytest.raises(UserError, match=r"no recipe 'F'; legal: base, A1, .* E, big"):
        row_config("F")


def test_parameters_equal_the_paper(report):
    rows = report["table"]["rows"]
    assert report["table"]["vocab_sizes"] == [40_960, 37_000]
    assert [row["row"] for row in rows] == list(TABLE_3)
    for row in rows:
        *_, paper, millions = TABLE_3[row["row"]]
        assert round(row["parameters"][0] / 1e6, 2) == millions, row
        assert row["paper_millions"] == paper
        if paper is None:
            assert row["match"] == [None, None]
        elif row["row"] != "big":
            assert round(row["parameters"][0] / 1e6) == paper, row
            assert row["match"][0] is True
    base, big = rows[0], rows[-1]
    assert [round(row["parameters"][1] / 1e6, 2) for row in (base, big)] == [63.08, 214.25]
    assert big["match"] == [False, False]
    assert base["match"] == [True, False]
    assert round(count_parameters(row_config("base").model) / 1e6, 2) == 63.05  # without attention biases


def test_row_c6_needs_attention_biases():
    model = dataclasses.replace(row_config("C6").model, vocab_size=40_960)
    assert round(count_parameters(model) / 1e6) == 52
    assert round(count_parameters(dataclasses.replace(model, attention_bias=True)) / 1e6) == 53


def test_no_vocabulary_size_fits_big_and_the_other_rows():
    (first, last), (big_first, big_last) = (40_932, 41_160), (35_296, 36_272)  # as docs/usage.md states

    def fits(name, vocab_size):
        model = dataclasses.replace(row_config(name).model, vocab_size=vocab_size, attention_bias=True)
        return round(parameters_by_part(model)["total"] / 1e6) == TABLE_3[name][3]

    assert [fits("big", size) for size in (big_first - 1, big_first, big_last, big_last + 1)] == [0, 1, 1, 0]
    rows = [name for name in TABLE_3 if TABLE_3[name][3] and name != "big"]
    assert all(fits(name, size) for name in rows for size in (first, last))
    assert not all(fits(name, first - 1) for name in rows)
    assert not all(fits(name, last + 1) for name in rows)


def test_published_figures_equal_the_paper():
    namespace = {}
    exec(compile(Path(RECIPE).read_text(encoding="utf-8"), RECIPE, "exec"), namespace)
    assert {name: tuple(row) for name, row in namespace["PAPER"].items()} == {
        name: row[1:4] for name, row in TABLE_3.items()
    }
    assert list(namespace["ROWS"]) == list(TABLE_3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "d_k": 3, "d_v": 5},
        {"positions": "learned", "tie_embeddings": "none", "source_vocab_size": 40, "logits_bias": True},
        {"tie_embeddings": "target", "source_vocab_size": 60, "final_norm": True},
        {"decoder_num_layers": 1, "decoder_num_heads": 4, "decoder_d_ff": 10, "decoder_d_k": 3, "attention_bias": True},
    ],
)
def test_parameters_by_part_equal_the_model(changes):
    config = ModelConfig(vocab_size=50, d_model=16, num_layers=2, num_heads=2, d_ff=24, max_length=32, **changes)
    parts, params = parameters_by_part(config), abstract_params(config)
    for stack in ("encoder", "decoder"):
        assert parts[stack] == sum(leaf.size for leaf in jax.tree.leaves(params[stack]))
    assert parts["total"] == sum(parts[name] for name in ("embeddings", "encoder", "decoder"))
    assert parts["total"] == count_parameters(config)


SMALL = {"vocab_size": 1_000, "d_model": 128, "num_layers": 2, "num_heads": 4, "d_ff": 512}


def flops_of(function, *args) -> float:
    """Return the operations that XLA counts in the compiled function."""
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def tokens(length):
    return jax.ShapeDtypeStruct((4, length), jnp.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"d_k": 16, "d_v": 48},
        {"decoder_num_layers": 3, "decoder_num_heads": 8, "decoder_d_ff": 256},
        {"tie_embeddings": "none", "source_vocab_size": 500},
    ],
)
def test_forward_operations_equal_xla(changes):
    config = ModelConfig(**(SMALL | changes))
    model = Transformer(config)
    src_length, tgt_length = 64, 24
    counted = training_flops(config, src_length, tgt_length)
    ours = 4 * (src_length * counted.source + tgt_length * counted.target) / 3
    xla = flops_of(
        lambda params, src, tgt_in: model.apply({"params": params}, src, tgt_in),
        *(abstract_params(config), tokens(src_length), tokens(tgt_length)),
    )
    assert ours < xla < 1.03 * ours  # XLA also counts softmax, LayerNorm and other elementwise operations


def test_backward_costs_twice_the_forward():
    config = ModelConfig(**SMALL)
    model = Transformer(config)
    counted = training_flops(config, 64, 24)
    ours = 4 * (64 * counted.source + 24 * counted.target)

    def loss(params, src, tgt_in):
        return jnp.sum(jax.nn.logsumexp(model.apply({"params": params}, src, tgt_in), axis=-1))

    xla = flops_of(jax.grad(loss), abstract_params(config), tokens(64), tokens(24))
    assert 0.98 * ours < xla < 1.05 * ours


def test_matrix_entries_of_base_by_hand():
    config = ModelConfig.base(37_000)
    assert matrix_entries(config) == (
        6 * (4 * 512**2 + 2 * 512 * 2048) + 6 * 2 * 512**2,
        6 * (6 * 512**2 + 2 * 512 * 2048) + 512 * 37_000,
    )
    assert attention_products(config, 30, 20) == (6 * 2 * 512 * 30, 6 * 2 * 512 * (30 + 20))


def test_paper_cost_is_time_times_gpus_times_rate():
    assert PAPER_COSTS["base"].recomputed == 12 * 3600 * 8 * 9.5e12
    assert PAPER_COSTS["big"].recomputed == 3.5 * 24 * 3600 * 8 * 9.5e12
    assert [f"{cost.recomputed:.1e}" for cost in PAPER_COSTS.values()] == ["3.3e+18", "2.3e+19"]
    assert [cost.flops for cost in PAPER_COSTS.values()] == [3.3e18, 2.3e19]


def test_costs_are_per_token_times_tokens_times_steps(report):
    base, big = report["flops"]
    assert (base["name"], big["name"]) == ("base", "big")
    for cost, name in ((base, "base"), (big, "big")):
        per_token = training_flops(row_config(name).model, 30, 30)
        assert cost["total"] == sum(per_token) * 25_000 * row_config(name).training.num_steps
        # The model's operations are 29 % and 42 % of the operations that the GPUs could sustain in that time.
        assert 0.25 < cost["total"] / PAPER_COSTS[name].flops < 0.45


def test_table_as_text():
    report, text = params_report(RECIPE, flops=True)
    assert json.loads(json.dumps(report)) == report
    lines = {line.split()[0]: line for line in text.splitlines()[:22]}
    assert lines["C6"].split() == ["C6", "d_ff", "1024", "52.51", "50.49", "53", "yes"]
    assert lines["A1"].split() == ["A1", "num_heads", "1", "65.11", "63.08", "-", "-"]
    assert lines["big"].split()[-4:] == ["218.30", "214.25", "213", "no"]
    assert "12 h x 3,600 s x 8 GPUs x 9.5e+12 FLOPS (P100) = 3.28e+18; the paper states 3.3e+18" in text
    assert "84 h x 3,600 s x 8 GPUs x 9.5e+12 FLOPS (P100) = 2.30e+19; the paper states 2.3e+19" in text
    assert max(map(len, text.splitlines())) <= 130


def test_parameters_of_any_recipe_by_part():
    report, text = params_report(f"{RECIPE}:B1", vocab_size=40_000)
    model = dataclasses.replace(row_config("B1").model, vocab_size=40_000)
    assert report == {
        "recipe": f"{RECIPE}:B1",
        "vocab_size": 40_000,
        "parameters": parameters_by_part(model),
    }
    assert f"total          {count_parameters(model):,}" in text
    assert "flops" not in report


def test_operations_of_any_recipe(tmp_path):
    recipe = tmp_path / "small.py"
    recipe.write_text(
        "from transformer_jax import Config, ModelConfig\n"
        f"def get_config(): return Config(model=ModelConfig(**{SMALL}, tie_embeddings='target'))"
    )
    report, text = params_report(str(recipe), flops=True)
    (cost,) = report["flops"]
    per_token = training_flops(ModelConfig(**SMALL, tie_embeddings="target"), 30, 30)
    assert cost["total"] == sum(per_token) * 25_000 * 100_000
    assert "of the paper's 3.3e+18 (base)" in text
    assert "of the paper's 2.3e+19 (big)" in text
    assert params_report(str(recipe), vocab_size=600)[0]["parameters"]["embeddings"] == 2 * 600 * 128


def test_default_recipe():
    report, _ = params_report("")
    assert report["recipe"] == "numbers"
    assert report["parameters"] == parameters_by_part(numbers_config().model)


def test_invalid_arguments_are_rejected():
    with pytest.raises(UserError, match="no such recipe"):
        params_report("nowhere.py")
    with pytest.raises(UserError, match=r"model.eos_id=2 must be below 2"):
        params_report(f"{RECIPE}:base", vocab_size=2)
