"""Sentence pairs from TensorFlow Datasets, read as a random-access data source: TensorFlow is not needed.

The data set must be in the format ArrayRecord: `tfds.builder(NAME, file_format="array_record").download_and_prepare()`.
"""

import importlib
from typing import Any

from transformer_jax.config import DataConfig
from transformer_jax.data.pairs import LazyColumn, Pairs, Split, clean_sentence
from transformer_jax.errors import UserError, first_line


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
    source, target = (_column(rows, name, origin) for name in names)
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


def _column(rows: Any, name: str, origin: str) -> LazyColumn:
    def fetch(start: int, stop: int) -> list[str]:
        found = rows.__getitems__(list(range(start, stop)))  # one call reads many rows; plain indexing reads one
        return [clean_sentence(r[name], f"{origin}, row {row}, {name!r}") for row, r in enumerate(found, start)]

    return LazyColumn(fetch, len(rows))
