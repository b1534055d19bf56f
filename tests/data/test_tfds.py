"""A small data set of tensorflow-datasets, built offline, read by name and folder without TensorFlow."""

import dataclasses
import sys
from pathlib import Path

import pytest
import tensorflow_datasets as tfds

from transformer_jax.config import DataConfig
from transformer_jax.data.corpus import read_split
from transformer_jax.presets import load_recipe
from transformer_jax.types import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class ToyTranslate(tfds.core.GeneratorBasedBuilder):
    """Five sentence pairs for training, two for validation, three for the test; the features of wmt14_translate."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.Translation(languages=("de", "en"))
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, download_manager):
        sizes = {"train": 5, "validation": 2, "test": 3}
        return {split: self._generate_examples(size) for split, size in sizes.items()}

    def _generate_examples(self, count):
        for i in range(count):
            yield i, {"en": f"hello\n{i}", "de": f"grüß dich {i}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    ToyTranslate(data_dir=folder, file_format="array_record").download_and_prepare()
    return str(folder)


def read(folder, split="train", **fields):
    fields = {"name": "toy_translate"} | fields
    return read_split(DataConfig(source="tfds", directory=folder, **fields), split)


def test_reads_both_sides_in_step(folder):
    pairs = read(folder)
    assert sorted(pairs.source) == [f"hello {i}" for i in range(5)]
    assert [line[-1] for line in pairs.source] == [line[-1] for line in pairs.target]
    assert all(line.startswith("grüß dich") for line in pairs.target)
    assert len(read(folder, "valid", valid="validation")) == 2
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_recipe_of_wmt14_reads_the_splits_of_such_a_set(folder, size):
    data = load_recipe(f"{CONFIGS / f'wmt14_en_de_{size}.py'}:tfds").data
    data = dataclasses.replace(data, name="toy_translate", directory=folder)
    pairs = [read_split(data, split) for split in ("train", "valid", "test")]
    assert [len(split) for split in pairs] == [5, 2, 3]
    assert pairs[2].source[0].startswith("hello")
    assert pairs[2].target[0].startswith("grüß")


def test_mistakes(folder):
    with pytest.raises(UserError, match=r"split 'nope': cannot be read: .*splits there are: \['test', 'train', 'val"):
        read(folder, train="nope")
    with pytest.raises(UserError, match=r"toy_translate \(train\): no feature 'fr' among \['de', 'en'\]"):
        read(folder, target_language="fr")
    with pytest.raises(UserError, match=r"data.name 'no_such_set', .*: no such data set: .*no_such_set not found"):
        read(folder, name="no_such_set")


def test_translation_sets_are_found_without_importing_their_module(folder, monkeypatch):
    def offline(self, *arguments, **keywords):
        raise ConnectionError("no network")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", offline)
    with pytest.raises(UserError, match=r"wmt14_translate/de-en.*cannot be read: ConnectionError: no network"):
        read(folder, name="wmt14_translate/de-en")


def test_without_the_library(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'transformer-jax\[tfds\]'"):
        read(folder)
