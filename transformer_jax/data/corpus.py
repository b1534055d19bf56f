"""Read a split of a corpus from any `data.source`."""

from transformer_jax.config import DataConfig
from transformer_jax.data.files import read_lines
from transformer_jax.data.pairs import Pairs, Split

__all__ = ["Pairs", "Split", "read_lines", "read_split"]


def read_split(config: DataConfig, split: Split) -> Pairs | None:
    """Read the sentence pairs of a split, in the order of the source.

    Args:
        config: the data section.
        split: role of the split; `config.train`, `config.valid` or `config.test` names it in the source.

    Returns:
        The pairs, or None if the configuration has no such split.

    Raises:
        UserError: a file, data set, split or column is missing, damaged or empty; the sides have different lengths; or
            text is not UTF-8. The message names file and line, or data set and row.
    """
    if not getattr(config, split):
        return None
    # Each library is imported only if it is the source.
    if config.source == "numbers":
        from transformer_jax.data.synthetic import numbers_corpus

        return numbers_corpus(config).get(split)
    if config.source == "copy":
        from transformer_jax.data.synthetic import copy_corpus

        return copy_corpus(config).get(split)
    if config.source == "huggingface":
        from transformer_jax.data.hub import read_huggingface

        return read_huggingface(config, split)
    if config.source == "tfds":
        from transformer_jax.data.hub import read_tfds

        return read_tfds(config, split)
    from transformer_jax.data import files as text_files

    readers = {"text": text_files.read_text, "tsv": text_files.read_tsv, "jsonl": text_files.read_jsonl}
    return readers[config.source](config, getattr(config, split))
