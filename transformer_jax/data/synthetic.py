"""Generate corpora without files: numbers spelled out in English and German, and the copy task."""

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.pairs import Pairs, Split
from transformer_jax.types import UserError

LIMIT = 1_000_000
"""Numbers are drawn from 0 to LIMIT - 1."""

_DRAW_SEED = 2017  # of the splits; independent of the training seed, so that scores are comparable
_LANGUAGES = ("en", "de")


def numbers_corpus(config: DataConfig) -> dict[Split, Pairs]:
    """Draw distinct numbers uniformly from 0 to 999,999 and spell them out, for training, validation and test.

    The test numbers do not depend on `synthetic_valid_size` and `synthetic_train_size`. A split of size 0 is omitted.

    >>> corpus = numbers_corpus(DataConfig(synthetic_train_size=2, synthetic_valid_size=0, synthetic_test_size=1))
    >>> sorted(corpus), len(corpus["train"])
    (['test', 'train'], 2)

    Raises:
        UserError: a language is neither en nor de.
    """
    for name in ("source_language", "target_language"):
        if getattr(config, name) not in _LANGUAGES:
            raise UserError(
                f"data.{name} is {getattr(config, name)!r} and data.source 'numbers'; legal: {', '.join(_LANGUAGES)}"
            )
    corpus: dict[Split, Pairs] = {}
    for split, values in share_out(np.random.default_rng(_DRAW_SEED).permutation(LIMIT).tolist(), config).items():
        source, target = (spell_numbers(values, name) for name in (config.source_language, config.target_language))
        corpus[split] = Pairs(source, target, f"numbers ({split})")
    return corpus


def share_out(values: list[int], config: DataConfig) -> dict[Split, list[int]]:
    """Split values into test (the first `synthetic_test_size`), validation and training. Empty splits are omitted.

    >>> share_out([5, 6, 7, 8], DataConfig(synthetic_train_size=2, synthetic_valid_size=0, synthetic_test_size=1))
    {'test': [5], 'train': [6, 7]}
    """
    sizes: dict[Split, int] = {
        "test": config.synthetic_test_size,
        "valid": config.synthetic_valid_size,
        "train": config.synthetic_train_size,
    }
    shares: dict[Split, list[int]] = {}
    start = 0
    for split, size in sizes.items():
        if size:
            shares[split] = values[start : start + size]
        start += size
    return shares


def spell_numbers(values: list[int], language: str) -> list[str]:
    """Return each number from 0 to 999,999 in words, as num2words spells it.

    >>> spell_numbers([21, 300_021], "en")
    ['twenty-one', 'three hundred thousand and twenty-one']
    >>> spell_numbers([21, 300_021], "de")
    ['einundzwanzig', 'dreihunderttausendeinundzwanzig']
    """
    from num2words import num2words

    # num2words takes 0.1 ms for each number. Both languages spell the thousands, a conjunction and the rest, so 2,000
    # calls suffice for a million numbers. A test compares this with num2words itself.
    words: dict[int, str] = {}

    def spell(value: int) -> str:
        if value not in words:
            words[value] = num2words(value, lang=language)
        return words[value]

    def joint(rest: int) -> str:
        if language == "de":
            return ""
        return " and " if rest < 100 else ", "

    lines = []
    for value in values:
        thousands, rest = divmod(value, 1000)
        if thousands and rest:
            lines.append(spell(1000 * thousands) + joint(rest) + spell(rest))
        else:
            lines.append(spell(value))
    return lines


SYMBOLS, LENGTH = 10, 10
"""Number of different symbols, and number of symbols in each row of the copy task."""

_COPY_SEED = 2017  # independent of the training seed, so that scores are comparable


def copy_corpus(config: DataConfig) -> dict[Split, Pairs]:
    """Draw distinct rows of ten symbols, "1" to "10", uniformly. Sizes are those of `DataConfig.synthetic_*_size`.

    >>> corpus = copy_corpus(DataConfig(synthetic_train_size=2, synthetic_valid_size=0, synthetic_test_size=1))
    >>> corpus["test"].source == corpus["test"].target, len(corpus["train"]), corpus["train"].source[0].count(" ")
    (True, 2, 9)
    """
    wanted = config.synthetic_train_size + config.synthetic_valid_size + config.synthetic_test_size
    # A row is a number of ten digits. Duplicates are dropped: about 50 in a million.
    drawn = np.random.default_rng(_COPY_SEED).integers(0, SYMBOLS**LENGTH, wanted + 1_000).tolist()
    corpus: dict[Split, Pairs] = {}
    for split, values in share_out(list(dict.fromkeys(drawn)), config).items():
        rows = [" ".join(str(int(digit) + 1) for digit in f"{value:0{LENGTH}d}") for value in values]
        corpus[split] = Pairs(rows, rows, f"copy task ({split})")
    return corpus
