"""Read a small data set of tensorflow-datasets, built offline, by name and folder, without TensorFlow."""

import dataclasses
import json
import shutil
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
    """A data set with the features of wmt14_translate: 5 pairs for training, 2 for validation, 3 for the test."""

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


def test_rows_of_both_sides_match(folder):
    pairs = read(folder)
    assert sorted(pairs.source) == [f"hello {i}" for i in range(5)]
    assert [line[-1] for line in pairs.source] == [line[-1] for line in pairs.target]
    assert all(line.startswith("grüß dich") for line in pairs.target)
    assert len(read(folder, "valid", valid="validation")) == 2
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("size", ["base", "big"])
def test_wmt14_recipe_reads_its_splits(folder, size):
    data = load_recipe(f"{CONFIGS / f'wmt14_en_de_{size}.py'}:tfds").data
    data = dataclasses.replace(data, name="toy_translate", directory=folder)
    pairs = [read_split(data, split) for split in ("train", "valid", "test")]
    assert [len(split) for split in pairs] == [5, 2, 3]
    assert pairs[2].source[0].startswith("hello")
    assert pairs[2].target[0].startswith("grüß")


def test_missing_split_feature_and_data_set_are_rejected(folder):
    with pytest.raises(UserError, match=r"split 'nope': cannot be read: .*existing splits: \['test', 'train', 'val"):
        read(folder, train="nope")
    with pytest.raises(UserError, match=r"toy_translate \(train\): no feature 'fr' among \['de', 'en'\]"):
        read(folder, target_language="fr")
    with pytest.raises(UserError, match=r"data.name 'no_such_set', .*: no such data set: .*no_such_set not found"):
        read(folder, name="no_such_set")


def test_translation_data_set_is_registered_on_demand(folder, monkeypatch):
    def offline(self, *arguments, **keywords):
        raise ConnectionError("no network")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", offline)
    with pytest.raises(UserError, match=r"wmt14_translate/de-en.*cannot be read: ConnectionError: no network"):
        read(folder, name="wmt14_translate/de-en")


def test_missing_library_names_the_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'transformer-jax\[tfds\]'"):
        read(folder)


EVIL = "transformer_jax_stranger"


def with_foreign_feature(folder, tmp_path, where):
    """Copy the data set, and let its files name a class of a module that writes a file when it is imported."""
    copy = tmp_path / "stranger"
    shutil.copytree(Path(folder) / "toy_translate", copy / "foreign_translate")  # a name without a registered class
    (tmp_path / f"{EVIL}.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    version = copy / "foreign_translate" / "1.0.0"
    trees = {name: json.loads((version / name).read_text()) for name in ("features.json", "dataset_info.json")}
    foreign = trees["features.json"] | {"pythonClassName": f"{EVIL}.Feature"}
    library_class = "tensorflow_datasets.core.features.features_dict.FeaturesDict"
    nested = {"pythonClassName": library_class, "featuresDict": {"features": {"en": foreign}}}
    name, tree = {
        "features.json": ("features.json", foreign),
        "nested": ("features.json", nested),
        "legacy": ("features.json", {"type": f"{EVIL}.Feature", "content": {}}),
        "dataset_info.json": ("dataset_info.json", trees["dataset_info.json"] | {"features": foreign}),
    }[where]
    (version / name).write_text(json.dumps(tree))
    return copy


@pytest.mark.parametrize("where", ["features.json", "nested", "legacy", "dataset_info.json"])
def test_module_named_by_a_data_set_is_not_imported(folder, tmp_path, monkeypatch, where):
    copy = with_foreign_feature(folder, tmp_path, where)
    monkeypatch.syspath_prepend(tmp_path)  # like the current folder with `python train.py`
    with pytest.raises(UserError, match=f"foreign_translate.*'{EVIL}.Feature', which is not part of tensorflow-data"):
        read(str(copy), name="foreign_translate")
    assert not (tmp_path / "marker").exists()
    assert EVIL not in sys.modules
    assert len(read(folder)) == 5


@pytest.mark.parametrize("name", ["kaggle:toy", "kaggle:toy/config:1.0.0", "huggingface:toy/de"])
def test_data_set_of_a_namespace_is_rejected(folder, name):
    with pytest.raises(UserError, match=r"data\.name .* programs that the library downloads and runs"):
        read(folder, name=name)
    assert len(read(folder, name="toy_translate:1.0.0")) == 5
