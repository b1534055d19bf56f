"""The offline default: spelled-out numbers, from English to German or back. No file, no network.

21 -> "twenty-one" -> "einundzwanzig". The ground truth is the package num2words.
"""

import numpy as np

from transformer_jax.config import DataConfig
from transformer_jax.data.pairs import Pairs, Split
from transformer_jax.errors import UserError

LIMIT = 1_000_000
"""Numbers are drawn from 0 to LIMIT - 1."""

_DRAW_SEED = 2017  # of the split into training, validation and test; not the training seed, so scores compare
_LANGUAGES = ("en", "de")


def numbers_corpus(config: DataConfig) -> dict[Split, Pairs]:
    """Training, validation and test numbers: drawn uniformly from 0 to 999,999, no number twice.

    The test numbers are the same for every `numbers_valid` and `numbers_train`. A split of no numbers is left out.

    >>> corpus = numbers_corpus(DataConfig(numbers_train=2, numbers_valid=0, numbers_test=1))
    >>> sorted(corpus), len(corpus["train"])
    (['test', 'train'], 2)

    Raises:
        UserError: a language other than en and de.
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
    """The first `numbers_test` values for the test, those that follow for validation and training; no empty split.

    >>> share_out([5, 6, 7, 8], DataConfig(numbers_train=2, numbers_valid=0, numbers_test=1))
    {'test': [5], 'train': [6, 7]}
    """
    sizes: dict[Split, int] = {
        "test": config.numbers_test,
        "valid": config.numbers_valid,
        "train": config.numbers_train,
    }
    shares: dict[Split, list[int]] = {}
    start = 0
    for split, size in sizes.items():
        if size:
            shares[split] = values[start : start + size]
        start += size
    return shares


def spell_numbers(values: list[int], language: str) -> list[str]:
    """Each number from 0 to 999,999 in words, as num2words spells it.

    >>> spell_numbers([21, 300_021], "en")
    ['twenty-one', 'three hundred thousand and twenty-one']
    >>> spell_numbers([21, 300_021], "de")
    ['einundzwanzig', 'dreihunderttausendeinundzwanzig']
    """
    from num2words import num2words

    # num2words takes 0.1 ms a number. Both languages spell thousands, a joint and the rest, so 2,000 calls suffice
    # for the whole million; a test holds this against num2words itself.
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
