"""Read data sets of the library `datasets` from disk and by name, offline."""

import datasets
import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data.corpus import read_split
from transformer_jax.types import UserError


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def read(split="train", **fields):
    return read_split(DataConfig(source="huggingface", **fields), split)


def test_columns_from_disk(tmp_path):
    rows = datasets.Dataset.from_dict({"en": ["a\nb", "c", "d"], "id": [1, 2, 3], "de": ["ü", "v", "w"]})
    datasets.DatasetDict(train=rows, validation=rows.select([1])).save_to_disk(str(tmp_path / "set"))
    pairs = read(directory=str(tmp_path / "set"))
    assert list(pairs.source) == ["a b", "c", "d"]
    assert pairs.target[:] == ["ü", "v", "w"]
    assert pairs.target[1:3] == ["v", "w"]
    assert pairs.target[::2] == ["ü", "w"]
    assert (pairs.target[-1], pairs.target[5:], len(pairs)) == ("w", [], 3)
    assert list(read("valid", valid="validation", directory=str(tmp_path / "set")).source) == ["c"]
    with pytest.raises(UserError, match=r"no split 'valid' \(data.valid\) among \['train', 'validation'\]"):
        read("valid", directory=str(tmp_path / "set"))
    with pytest.raises(UserError, match=r"set \(train\): no column 'fr' among \['en', 'id', 'de'\]"):
        read(directory=str(tmp_path / "set"), target_column="fr")
    numbers = read(directory=str(tmp_path / "set"), target_column="id")
    with pytest.raises(UserError, match="row 0, column 'id' is 1; it must be text"):
        list(numbers.target)


@pytest.mark.parametrize("library_type", [False, True])
def test_translation_column_and_data_set_without_splits(tmp_path, library_type):
    rows = datasets.Dataset.from_dict({"translation": [{"en": "a", "de": "b"}, {"en": "c", "de": "d"}]})
    if library_type:
        rows = rows.cast(datasets.Features({"translation": datasets.Translation(languages=["en", "de"])}))
    rows.save_to_disk(str(tmp_path))
    pairs = read(directory=str(tmp_path))
    assert (list(pairs.source), list(pairs.target)) == (["a", "c"], ["b", "d"])
    with pytest.raises(UserError, match=r"no column 'fr' among \['translation', 'en', 'de'\]"):
        read(directory=str(tmp_path), target_language="fr")
    with pytest.raises(UserError, match=r"without splits.*set data.test to ''"):
        read("test", directory=str(tmp_path))


def test_data_set_is_loaded_by_name(tmp_path, monkeypatch):
    (tmp_path / "train.json").write_text('{"en": "a", "de": "b"}\n', encoding="utf-8")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    pairs = read(name=str(tmp_path))
    assert (list(pairs.source), list(pairs.target)) == (["a"], ["b"])
    with pytest.raises(UserError, match="split 'nope': the data set cannot be loaded: ValueError: Unknown split"):
        read(name=str(tmp_path), train="nope")


def test_missing_data_sets_are_rejected(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not a data set written by save_to_disk: FileNotFoundError"):
        read(directory=str(tmp_path / "nowhere"))

    def offline(*arguments, **keywords):
        raise ConnectionError("Couldn't reach 'wmt14' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(UserError) as caught:
        read(name="wmt14", subset="de-en")
    assert str(caught.value) == (
        "data.name 'wmt14', data.subset 'de-en', split 'train': the data set cannot be loaded: "
        "ConnectionError: Couldn't reach 'wmt14' on the Hub"
    )
