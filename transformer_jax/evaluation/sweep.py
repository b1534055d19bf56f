"""Decoding settings tried one after the other on the development set, as the paper chose beam size and alpha."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.config import DecodingConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import CorpusScores, score_corpus, tokenization_of
from transformer_jax.evaluation.validation import check_complete, check_direction, reference_texts
from transformer_jax.types import UserError


def parse_grid(items: Sequence[str]) -> dict[str, list[Any]]:
    """`beam-size=1,4,8` as a field of `DecodingConfig` and its values.

    >>> parse_grid(["beam-size=1,4", "alpha=0,0.6"])
    {'beam_size': [1, 4], 'alpha': [0.0, 0.6]}

    Raises:
        UserError: an item of another form, a field that is not there or given twice, a value of another type.
    """
    fields, grid = {item.name: item for item in dataclasses.fields(DecodingConfig)}, {}
    for item in items:
        name, equals, values = item.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not equals or name not in fields or name in grid:
            raise UserError(f"sweep has {item!r}; it must be FIELD=VALUE,VALUE..., each once, of {', '.join(fields)}")
        default = fields[name].default
        if not isinstance(default, int | float | str) or isinstance(default, bool):
            raise UserError(f"sweep has {item!r}; {name} is no number and no word, and cannot be swept")
        try:
            grid[name] = [type(default)(value) for value in values.split(",")]
        except ValueError:
            raise UserError(f"sweep has {item!r}; every value must be like {default!r}") from None
    return grid


def sweep(
    run: str | Path,
    pairs: Pairs,
    grid: Mapping[str, Sequence[Any]],
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    is_given: bool = False,
    **decoding: Any,
) -> Iterator[tuple[dict[str, Any], CorpusScores]]:
    """Translates the pairs under each combination of the settings. With several processes, all call it alike.

    Args:
        run: its folder.
        pairs: of the development set.
        grid: fields of `DecodingConfig` and their values; the last field changes fastest.
        tokenize, lowercase: as for `score_corpus`.
        is_given: the pairs are not of the run's own corpus, so that their sides may have been swapped.
        decoding: more fields, the same for all, or another argument of `Translator.load`.

    Yields:
        The settings and the scores.
    """
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for setting in combinations:
        DecodingConfig(**setting)  # a value that is not legal is found before the work
    translator, checkpoint = None, None
    for number, setting in enumerate(combinations):
        # The checkpoint is the only setting that needs other files.
        if translator is None or setting.get("checkpoint") != checkpoint:
            translator = Translator.load(run, **(decoding | setting))
            checkpoint = setting.get("checkpoint")
        if is_given and number == 0:
            check_direction(translator, pairs)
        translator = translator.with_decoding(**setting)
        translations = translator.translate(list(pairs.source), shared=True)
        check_complete(translations, pairs)
        references = reference_texts(pairs, translator.tokenizers)
        yield setting, score_corpus(translations, references, tokenize or tokenization_of(translator.config), lowercase)
