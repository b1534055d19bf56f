"""Recipes: the built-in recipe, those of configs/, and errors in recipe files."""

import dataclasses
from pathlib import Path

import pytest

from transformer_jax.config import Config
from transformer_jax.data.corpus import read_split
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.presets import load_recipe, numbers_config
from transformer_jax.types import UserError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def write(folder, text, name="recipe.py"):
    names = "Config, DecodingConfig, ModelConfig, TrainingConfig"
    (folder / name).write_text(f"from dataclasses import replace; from transformer_jax import {names}\n{text}")
    return str(folder / name)


def test_builtin_default_recipe_equals_its_file():
    assert load_recipe(str(CONFIGS / "numbers.py")) == numbers_config()


def test_default_recipe_meets_the_limits_of_its_task():
    config = numbers_config()
    assert config.data.source == "numbers"
    assert config.data.synthetic_train_size <= 50_000, "at most 5 % of the numbers below a million are seen"
    assert config.data.synthetic_test_size == 2_000
    assert config.training.checkpoint_seconds <= 5


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_round_trip_through_json(path):
    config = load_recipe(str(path))
    assert Config.from_json(config.to_json()) == config


def test_recipe_name_selects_one_of_several_in_a_file(tmp_path):
    recipe = write(tmp_path, "def get_config(name='512'): return Config(model=ModelConfig(d_model=int(name)))")
    assert load_recipe(recipe).model.d_model == 512
    assert load_recipe(f"{recipe}:64").model.d_model == 64


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("config = Config()", "", r"recipe\.py defines no get_config\(\)"),
        ("get_config = Config()", "", r"recipe\.py defines no get_config\(\)"),
        ("def get_config(): return {}", "", r"get_config\(\) returned dict; it must return a Config"),
        ("def get_config(): return Config()", ":big", r"only one recipe\. Remove ':big'"),
        ("def get_config(name): return Config()", "", r"several recipes\. Pass .*recipe\.py:NAME"),
        (
            "def get_config(): return Config(decoding=DecodingConfig(weights=1))",
            "",
            "weights was renamed to quantization",
        ),
        (
            "TRAINING = TrainingConfig(logits_megabytes=1)",
            "",
            r"recipe\.py: .* logits_megabytes was renamed to loss_chunk_mb",
        ),
        (
            "CONFIG = replace(Config().training, smoothing_mass='all')",
            "",
            r"recipe\.py: .* smoothing_mass was renamed to label_smoothing_over",
        ),
        ("def get_config(:", "", r"recipe\.py, line 2: "),
        ("def get_config(): return Config(model=ModelConfig(d_model=0))", "", r"model\.d_model is 0"),
    ],
)
def test_invalid_recipe_is_rejected_with_the_reason(tmp_path, text, suffix, message):
    with pytest.raises(UserError, match=message):
        load_recipe(write(tmp_path, text) + suffix)


def test_missing_or_invalid_python_recipe_is_rejected(tmp_path):
    with pytest.raises(UserError, match=r"no such recipe\. Pass a Python file"):
        load_recipe(str(tmp_path / "nothing.py"))
    with pytest.raises(UserError, match="is not a Python file"):
        load_recipe(write(tmp_path, "", "recipe.txt"))
    with pytest.raises(UserError, match="no such recipe"):
        load_recipe(str(tmp_path))


def test_unknown_name_in_a_shipped_recipe_is_rejected_with_the_valid_ones():
    with pytest.raises(UserError, match="no recipe 'nope'; legal: raw, bpe10k"):
        load_recipe(str(CONFIGS / "multi30k_en_de.py") + ":nope")


@pytest.mark.parametrize("name", ["en_de.py:raw", "en_de.py:bpe10k", "en_fr.py:bpe10k"])
def test_multi30k_fits_its_vocabulary(data_folder, name):
    config = load_recipe(f"{CONFIGS}/multi30k_{name}")
    folder = data_folder / "multi30k" / Path(config.data.directory).name
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, directory=str(folder)))
    train = read_split(config.data, "train")
    tokenizers = train_tokenizers(config, train)
    tokenizers.check_fits(config.model)
    assert tokenizers.source.vocab_size == config.model.vocab_size
    for side in (train.source, train.target):
        assert not any(config.model.unk_id in row for row in tokenizers.source.encode(side))
    for split, size in (("train", 29_000), ("valid", 1_014), ("test", 1_000)):
        assert len(read_split(config.data, split)) == size
