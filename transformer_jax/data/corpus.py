"""Read a split of a corpus from any `data.source`."""

from transformer_jax.config import DataConfig
from transformer_jax.data.files import read_jsonl, read_text, read_tsv
from transformer_jax.data.hub import read_huggingface, read_tfds
from transformer_jax.data.pairs import Pairs, Split
from transformer_jax.data.synthetic import read_copy_task, read_numbers

_READERS = {
    "text": read_text,
    "tsv": read_tsv,
    "jsonl": read_jsonl,
    "huggingface": read_huggingface,
    "tfds": read_tfds,
    "numbers": read_numbers,
    "copy": read_copy_task,
}


def read_split(config: DataConfig, split: Split) -> Pairs | None:
    """Read the sentence pairs of a split, in the order of the source.

    `config.train`, `config.valid` or `config.test` names the split in the source. If the name is empty, the result is
    None.

    Raises:
        UserError: a file, data set, split or column is missing, damaged or empty; the sides have different lengths; or
            text is not UTF-8. The message names file and line, or data set and row.
    """
    return _READERS[config.source](config, split) if getattr(config, split) else None
