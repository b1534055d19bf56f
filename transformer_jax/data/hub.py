"""Sentence pairs from Hugging Face datasets and from TensorFlow Datasets."""

import importlib
from pathlib import Path
from typing import Any

import datasets

from transformer_jax.config import DataConfig
from transformer_jax.data.pairs import LazyColumn, Pairs, Split, clean_sentence
from transformer_jax.types import UserError, first_line


def read_huggingface(config: DataConfig, split: Split) -> Pairs:
    """Rows with a column for each side, or with the column `translation` of WMT: {"en": "...", "de": "..."}.

    Newlines in a sentence become spaces.

    Raises:
        UserError: the data set, split or column is missing (what there is, is listed), or a value is not text.
    """
    split_name = getattr(config, split)
    rows = _from_disk(config, split, split_name) if config.directory else _by_name(config, split_name)
    origin = f"{config.directory or config.name}{f'/{config.subset}' if config.subset else ''} ({split_name})"
    names = [config.source_column or config.source_language, config.target_column or config.target_language]
    source, target = (_column(rows, name, origin) for name in names)
    return Pairs(source, target, origin)


def _by_name(config: DataConfig, split_name: str) -> Any:
    try:
        return datasets.load_dataset(config.name, config.subset or None, split=split_name)
    except Exception as error:  # the library raises a dozen kinds: no network, no such set, subset, split or file
        raise UserError(
            f"data.name {config.name!r}, data.subset {config.subset!r}, split {split_name!r}: the data set cannot be "
            f"loaded: {first_line(error)}"
        ) from error


def _from_disk(config: DataConfig, split: Split, split_name: str) -> Any:
    directory = Path(config.directory).expanduser()
    try:
        loaded = datasets.load_from_disk(str(directory))
    except Exception as error:  # as many kinds: no such folder, another format, a file that is damaged
        raise UserError(
            f"data.directory {str(directory)!r}: not a data set written by save_to_disk: {first_line(error)}"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split_name not in loaded:
            raise UserError(
                f"data.directory {str(directory)!r}: no split {split_name!r} (data.{split}) among {list(loaded)}"
            )
        return loaded[split_name]
    if split != "train":
        raise UserError(
            f"data.directory {str(directory)!r} holds a data set without splits, which serves for training: "
            f"set data.{split} to '', or save a DatasetDict with a split {split_name!r}"
        )
    return loaded


def _column(rows: Any, name: str, origin: str) -> LazyColumn:
    nested = rows.features.get("translation")
    inner = list(getattr(nested, "languages", None) or (nested if isinstance(nested, dict) else ()))
    if name not in rows.column_names and name not in inner:
        raise UserError(
            f"{origin}: no column {name!r} among {rows.column_names + inner}; "
            "set data.source_column and data.target_column"
        )
    outer = name if name in rows.column_names else "translation"
    table = rows.select_columns([outer]).with_format(None)

    def fetch(start: int, stop: int) -> list[str]:
        values = table[start:stop][outer]
        if outer != name:
            values = [(value or {}).get(name) for value in values]
        return [clean_sentence(v, f"{origin}, row {row}, column {name!r}") for row, v in enumerate(values, start)]

    return LazyColumn(fetch, len(table))


def read_tfds(config: DataConfig, split: Split) -> Pairs:
    """The split of the data set `data.name`, such as wmt14_translate/de-en, with a text feature for each side.

    It is looked for in `data.directory`, or where the library keeps its data; one that is known to the library but
    not there yet is downloaded. Newlines in a sentence become spaces.

    Raises:
        UserError: the library is not installed, or the data set, split or feature is missing.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise UserError(
            f"data.source 'tfds' needs tensorflow-datasets: pip install 'transformer-jax[tfds]' ({error})"
        ) from error
    builder = _builder(tensorflow_datasets, config)
    split_name = getattr(config, split)
    origin = f"{config.name} ({split_name})"
    try:
        if not builder.info.splits:
            builder.download_and_prepare()
        rows = builder.as_data_source(split=split_name)
    except Exception as error:  # no network, unknown split, another file format, TensorFlow needed to prepare, ...
        raise UserError(
            f"data.name {config.name!r}, split {split_name!r}: cannot be read: {first_line(error)}; "
            f"splits there are: {sorted(builder.info.splits)}"
        ) from error
    features = sorted(builder.info.features)
    names = [config.source_column or config.source_language, config.target_column or config.target_language]
    for name in names:
        if name not in features:
            raise UserError(
                f"{origin}: no feature {name!r} among {features}; set data.source_column and data.target_column"
            )
    source, target = (_tfds_column(rows, name, origin) for name in names)
    return Pairs(source, target, origin)


def _builder(tensorflow_datasets: Any, config: DataConfig) -> Any:
    place = {"data_dir": config.directory} if config.directory else {}
    for attempt in range(2):
        try:
            return tensorflow_datasets.builder(config.name, file_format="array_record", **place)
        except Exception as error:  # no such set, folder or version, each a kind of its own
            # Data sets for translation are registered only when their module is loaded: wmt14_translate by .wmt14.
            module = config.name.split("/")[0].split(":")[0].removesuffix("_translate")
            if attempt == 0 and _imported(f"tensorflow_datasets.translate.{module}"):
                continue
            raise UserError(
                f"data.name {config.name!r}, data.directory {config.directory!r}: no such data set: {first_line(error)}"
            ) from error
    raise AssertionError("unreachable")


def _imported(module: str) -> bool:
    try:
        importlib.import_module(module)
    except (ImportError, ValueError):
        return False
    return True


def _tfds_column(rows: Any, name: str, origin: str) -> LazyColumn:
    def fetch(start: int, stop: int) -> list[str]:
        found = rows.__getitems__(list(range(start, stop)))  # one call reads many rows; plain indexing reads one
        return [clean_sentence(r[name], f"{origin}, row {row}, {name!r}") for row, r in enumerate(found, start)]

    return LazyColumn(fetch, len(rows))
