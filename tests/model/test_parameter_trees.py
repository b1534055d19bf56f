"""The parameter tree of every shipped config is a contract: golden/*.json holds path -> [shape, dtype].

After a change that is meant: `python tests/model/test_parameter_trees.py` writes the files again.
"""

import json
from pathlib import Path

import jax
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import abstract_params, count_parameters
from transformer_jax.presets import load_recipe

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
# Every recipe of every file in configs/, and the presets.
RECIPES = {
    "numbers": "configs/numbers.py",
    "multi30k_en_de_raw": "configs/multi30k_en_de.py:raw",
    "multi30k_en_de_bpe10k": "configs/multi30k_en_de.py:bpe10k",
    "multi30k_en_fr_raw": "configs/multi30k_en_fr.py:raw",
    "multi30k_en_fr_bpe10k": "configs/multi30k_en_fr.py:bpe10k",
    "wmt14_en_de_base": "configs/wmt14_en_de_base.py",
    "wmt14_en_de_big": "configs/wmt14_en_de_big.py",
    "wmt14_en_fr_base": "configs/wmt14_en_fr_base.py",
    "wmt14_en_fr_big": "configs/wmt14_en_fr_big.py",
    "iwslt14_de_en": "configs/iwslt14_de_en.py",
    "opus_books_en_it": "configs/opus_books_en_it.py",
    "en_fr_small": "configs/en_fr_small.py",
    "own_text": "configs/own_text.py",
    "toy_pairs": "configs/toy_pairs.py",
    "copy_task_small": "configs/copy_task.py:small",
    "copy_task_annotated": "configs/copy_task.py:annotated",
    "parsing_wsj_paper": "configs/parsing_wsj.py:paper",
    "parsing_wsj_small": "configs/parsing_wsj.py:small",
    "table3_B1": "configs/table3.py:B1",
    "table3_E": "configs/table3.py:E",
}
PRESETS = {"base": ModelConfig.base(37_000), "big": ModelConfig.big(37_000)}
NAMES = [*RECIPES, *PRESETS]


def model_config(name: str) -> ModelConfig:
    if name in PRESETS:
        return PRESETS[name]
    path, _, recipe = RECIPES[name].partition(":")
    return load_recipe(str(ROOT / path) + (f":{recipe}" if recipe else "")).model


def parameter_tree(config: ModelConfig) -> dict[str, list]:
    """{"encoder/layer_0/...": [[512, 8, 64], "float32"], ...}"""
    leaves = jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]
    return {"/".join(key.key for key in path): [list(leaf.shape), str(leaf.dtype)] for path, leaf in leaves}


@pytest.mark.parametrize("name", NAMES)
def test_parameter_tree_equals_the_golden_tree(name):
    golden = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    assert parameter_tree(model_config(name)) == golden


def test_every_recipe_has_a_golden_tree():
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.json" for name in NAMES}
    files = {recipe.partition(":")[0].removeprefix("configs/") for recipe in RECIPES.values()}
    assert files == {path.name for path in (ROOT / "configs").glob("*.py")}


@pytest.mark.parametrize("name", ["base", "big"])
def test_counts(name):
    # 63.05M and 214.17M, without attention biases; section 3.4's one table is counted once.
    assert count_parameters(PRESETS[name]) == {"base": 63_045_632, "big": 214_171_648}[name]


def write(name: str) -> None:
    tree = parameter_tree(model_config(name))
    lines = ",\n".join(f"  {json.dumps(path)}: {json.dumps(value)}" for path, value in tree.items())
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / f"{name}.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    for each in NAMES:
        write(each)
