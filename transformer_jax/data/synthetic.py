"""Generate corpora without files: numbers spelled out in English and German, and the copy task."""

import functools

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.pairs import Pairs, Split
from transformer_jax.runtime.fields import require

LIMIT = 1_000_000  # numbers are drawn from 0 to LIMIT - 1
SYMBOLS, LENGTH = 10, 10  # number of different symbols, and number of symbols in each row of the copy task
_SEED = 2017  # of the corpora; independent of the training seed, so that scores are comparable
_LANGUAGES = ("en", "de")


def read_numbers(config: DataConfig, split: Split) -> Pairs | None:
    """Sample distinct numbers uniformly from 0 to 999,999 for a split, and spell them out in the two languages."""
    for name in ("source_language", "target_language"):
        is_legal, legal = getattr(config, name) in _LANGUAGES, ", ".join(_LANGUAGES)
        require(is_legal, f"data.{name} is {getattr(config, name)!r} and data.source 'numbers'; legal: {legal}")
    values = _share(np.random.default_rng(_SEED).permutation(LIMIT).tolist(), config, split)
    source, target = (spell_numbers(values, name) for name in (config.source_language, config.target_language))
    return Pairs(source, target, f"numbers ({split})") if values else None


def read_copy_task(config: DataConfig, split: Split) -> Pairs | None:
    """Sample distinct sequences of ten symbols, each from "1" to "10", uniformly for a split."""
    wanted = config.synthetic_train_size + config.synthetic_valid_size + config.synthetic_test_size
    # A sequence is a number of ten digits. Duplicates are dropped: about 50 in a million.
    drawn = np.random.default_rng(_SEED).integers(0, SYMBOLS**LENGTH, wanted + 1_000).tolist()
    values = _share(list(dict.fromkeys(drawn)), config, split)
    rows = [" ".join(str(int(digit) + 1) for digit in f"{value:0{LENGTH}d}") for value in values]
    return Pairs(rows, rows, f"copy task ({split})") if rows else None


def _share(values: list[int], config: DataConfig, split: Split) -> list[int]:
    """Return the values of a split. The test split comes first, so that it is independent of the other sizes."""
    splits = ("test", "valid", "train")
    ends = np.cumsum([0, *(getattr(config, f"synthetic_{name}_size") for name in splits)])
    return values[ends[splits.index(split)] : ends[splits.index(split) + 1]]


def spell_numbers(values: list[int], language: str) -> list[str]:
    """Return each number from 0 to 999,999 in words, as num2words spells it.

    >>> spell_numbers([300_021], "en"), spell_numbers([300_021], "de")
    (['three hundred thousand and twenty-one'], ['dreihunderttausendeinundzwanzig'])
    """
    from num2words import num2words

    # num2words takes 0.1 ms for each number. Both languages spell the thousands, a conjunction and the rest, so 2,000
    # calls suffice for a million numbers. A test compares this with num2words itself.
    spell = functools.cache(functools.partial(num2words, lang=language))
    lines = []
    for value in values:
        thousands, rest = divmod(value, 1000)
        if thousands and rest:
            conjunction = "" if language == "de" else " and " if rest < 100 else ", "
            lines.append(spell(1000 * thousands) + conjunction + spell(rest))
        else:
            lines.append(spell(value))
    return lines
