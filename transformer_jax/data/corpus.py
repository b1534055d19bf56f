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
    """Read the split that `config.train`, `.valid` or `.test` names in the source; None if that name is empty."""
    return _READERS[config.source](config, split) if getattr(config, split) else None
