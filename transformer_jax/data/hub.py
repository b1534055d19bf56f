"""Read sentence pairs with the libraries that also download data sets: Hugging Face datasets and TensorFlow Datasets.

As SECURITY.md promises, no code that comes with a data set is executed, whatever its files name.
"""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from transformer_jax.config import DataConfig
from transformer_jax.data.pairs import LazyColumn, Pairs, Split, check_column, clean_sentence, column_names
from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError, first_line, library_errors

if TYPE_CHECKING:
    import datasets
    import tensorflow_datasets


def read_huggingface(config: DataConfig, split: Split) -> Pairs:
    """Read a split from the Hugging Face Hub, or from a folder that `save_to_disk` wrote.

    Rows have one column for each side, or the column `translation` of WMT: {"en": "...", "de": "..."}.
    """
    split_name = getattr(config, split)
    rows = _load_dataset(config, split, split_name)
    origin = f"{config.directory or config.name}{f'/{config.subset}' if config.subset else ''} ({split_name})"
    source, target = (_huggingface_column(rows, name, origin) for name in column_names(config))
    return Pairs(source, target, origin)


def _load_dataset(config: DataConfig, split: Split, split_name: str) -> "datasets.Dataset":
    import datasets

    if not config.directory:
        where = f"data.name {config.name!r}, data.subset {config.subset!r}, split {split_name!r}"
        with library_errors(f"{where}: the data set cannot be loaded"):  # no network, data set, subset, split or file
            return datasets.load_dataset(config.name, config.subset or None, split=split_name)
    directory = str(Path(config.directory).expanduser())
    with library_errors(f"data.directory {directory!r}: not a data set written by save_to_disk"):
        loaded = datasets.load_from_disk(directory)
    if isinstance(loaded, datasets.DatasetDict):
        wanted = f"data.directory {directory!r}: no split {split_name!r} (data.{split})"
        require(split_name in loaded, f"{wanted} among {list(loaded)}")
        return loaded[split_name]
    if split != "train":
        raise UserError(
            f"data.directory {directory!r} holds a data set without splits, which serves for training: "
            f"set data.{split} to '', or save a DatasetDict with a split {split_name!r}"
        )
    return loaded


def _huggingface_column(rows: "datasets.Dataset", name: str, origin: str) -> LazyColumn:
    nested = rows.features.get("translation")
    languages = list(getattr(nested, "languages", None) or (nested if isinstance(nested, dict) else ()))
    check_column(name, rows.column_names + languages, origin)
    column = name if name in rows.column_names else "translation"
    table = rows.select_columns([column]).with_format(None)

    def fetch(start: int, stop: int) -> list[str]:
        values = table[start:stop][column]
        if column != name:
            values = [(value or {}).get(name) for value in values]
        return [clean_sentence(v, f"{origin}, row {row}, column {name!r}") for row, v in enumerate(values, start)]

    return LazyColumn(fetch, len(table))


def read_tfds(config: DataConfig, split: Split) -> Pairs:
    """Read a split of the data set `data.name`, such as wmt14_translate/de-en, with one text feature for each side.

    `data.directory` replaces the library's own folder. A data set of the library is downloaded if it is missing.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise UserError(
            f"data.source 'tfds' needs tensorflow-datasets: pip install 'transformer-jax[tfds]' ({error})"
        ) from error
    split_name = getattr(config, split)
    origin = f"{config.name} ({split_name})"
    with _library_features_only(tensorflow_datasets):
        builder = _tfds_builder(tensorflow_datasets, config)
        try:
            if not builder.info.splits:
                builder.download_and_prepare()
            rows = builder.as_data_source(split=split_name)
        except UserError:
            raise
        except Exception as error:  # no network, unknown split, another file format, TensorFlow needed to prepare, ...
            raise UserError(
                f"data.name {config.name!r}, split {split_name!r}: cannot be read: {first_line(error)}; "
                f"existing splits: {sorted(builder.info.splits)}"
            ) from error
        features = sorted(builder.info.features)
    for name in column_names(config):
        check_column(name, features, origin, "feature")
    source, target = (_tfds_column(rows, name, origin) for name in column_names(config))
    return Pairs(source, target, origin)


@contextmanager
def _library_features_only(tensorflow_datasets: ModuleType) -> Iterator[None]:
    """Reject feature types from outside tensorflow-datasets while a data set is opened.

    `features.json` and `dataset_info.json` name the class of each feature, and the library imports its module: all
    names pass through `FeatureConnector.cls_from_name`.
    """
    connector = tensorflow_datasets.features.FeatureConnector
    class_of = connector.cls_from_name

    def library_class_of(name: str) -> type:
        if not name.startswith("tensorflow_datasets.core.features."):
            raise UserError(
                f"the data set names the feature type {name!r:.200}, which is not part of tensorflow-datasets; to load "
                "it would execute code. Build the data set with the library's own Text or Translation features"
            )
        return class_of(name)

    original = vars(connector)["cls_from_name"]
    connector.cls_from_name = staticmethod(library_class_of)
    try:
        yield
    finally:
        connector.cls_from_name = original


def _tfds_builder(tensorflow_datasets: ModuleType, config: DataConfig) -> "tensorflow_datasets.core.DatasetBuilder":
    if re.match(r"[^/:]*:(?![\d*])", config.name):  # what follows a colon and is not a version
        raise UserError(
            f"data.name {config.name!r}: data sets of a namespace are programs that the library downloads and runs; "
            "name a data set of the library, such as wmt14_translate/de-en"
        )
    directory = {"data_dir": config.directory} if config.directory else {}
    # Data sets for translation are registered when their module is imported: wmt14_translate by .wmt14.
    module = config.name.split("/")[0].split(":")[0].removesuffix("_translate")
    with suppress(ImportError, ValueError):
        importlib.import_module(f"tensorflow_datasets.translate.{module}")
    try:
        return tensorflow_datasets.builder(config.name, file_format="array_record", **directory)
    except Exception as error:  # no such data set, folder or version: each a type of its own
        reason = error if isinstance(error, UserError) else f"no such data set: {first_line(error)}"
        raise UserError(f"data.name {config.name!r}, data.directory {config.directory!r}: {reason}") from error


def _tfds_column(rows: "tensorflow_datasets.core.data_sources.BaseDataSource", name: str, origin: str) -> LazyColumn:
    def fetch(start: int, stop: int) -> list[str]:
        batch = rows.__getitems__(list(range(start, stop)))  # one call reads many rows; plain indexing reads one
        return [clean_sentence(r[name], f"{origin}, row {row}, {name!r}") for row, r in enumerate(batch, start)]

    return LazyColumn(fetch, len(rows))
