"""Score a run with each combination of decoding settings, as the paper chose beam size and alpha (section 6.1)."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import DecodingConfig
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import score_corpus, tokenization_of
from transformer_jax.evaluation.evaluate import split_of
from transformer_jax.evaluation.validation import check_complete, check_direction, reference_texts
from transformer_jax.types import UserError


def parse_grid(items: Sequence[str]) -> dict[str, list[Any]]:
    """Return fields of `DecodingConfig` and their values from items such as `beam-size=1,4,8`.

    >>> parse_grid(["beam-size=1,4", "alpha=0,0.6"])
    {'beam_size': [1, 4], 'alpha': [0.0, 0.6]}

    Raises:
        UserError: An item is not `FIELD=VALUE,...`, names an unknown or repeated field, or has a value of the wrong
            type.
    """
    fields, grid = {field.name: field for field in dataclasses.fields(DecodingConfig)}, {}
    for item in items:
        name, equals, values = item.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        if not equals or name not in fields or name in grid:
            raise UserError(f"sweep has {item!r}; it must be FIELD=VALUE,VALUE..., each once, of {', '.join(fields)}")
        default = fields[name].default
        if not isinstance(default, int | float | str) or isinstance(default, bool):
            raise UserError(f"sweep has {item!r}; {name} is neither a number nor a word, and cannot be swept")
        try:
            grid[name] = [type(default)(value) for value in values.split(",")]
        except ValueError:
            raise UserError(f"sweep has {item!r}; every value must be like {default!r}") from None
    return grid


def sweep(
    run: str | Path,
    settings: Sequence[str],
    pairs: Pairs | None = None,
    split: str = "valid",
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    ensemble: Sequence[str | Path] = (),
    **decoding: Any,
) -> Iterator[dict[str, Any]]:
    """Translate the pairs with each combination of decoding settings. Every process of a job must call it.

    Args:
        run: Folder of the run.
        settings: Items `FIELD=VALUE,VALUE...`; the last field changes fastest.
        pairs: Sources and references. None uses the split.
        split: Split of the run's corpus.
        tokenize: SacreBLEU's tokenization. None selects it as `tokenization_of` does.
        lowercase: Whether to score without case.
        ensemble: Other runs, which translate together with `run`.
        decoding: Further fields of `DecodingConfig`, equal for all combinations.

    Yields:
        The settings and the scores of each combination.

    Raises:
        UserError: The run, the split or a field does not exist, or a value is not legal.
    """
    grid = parse_grid(settings)
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for setting in combinations:
        DecodingConfig(**setting)  # raises before the work starts
    is_own = pairs is None
    pairs = pairs or split_of(RunDir(Path(run)).load_config(), split, run)
    names = {"run": str(run)} | ({"ensemble": [{"run": str(member)} for member in ensemble]} if ensemble else {})
    translator, checkpoint = None, None
    for number, setting in enumerate(combinations):
        # Only another checkpoint needs other files.
        if translator is None or setting.get("checkpoint") != checkpoint:
            translator = Translator.load(run, ensemble=ensemble, **(decoding | setting))
            checkpoint = setting.get("checkpoint")
        if not is_own and number == 0:
            check_direction(translator, pairs)
        translator = translator.with_decoding(**setting)
        translations = translator.translate(list(pairs.source), shared=True)
        check_complete(translations, pairs)
        references = reference_texts(pairs, translator.tokenizers)
        scores = score_corpus(translations, references, tokenize or tokenization_of(translator.config), lowercase)
        yield {**names, "split": pairs.origin, "setting": setting, **dataclasses.asdict(scores)}
