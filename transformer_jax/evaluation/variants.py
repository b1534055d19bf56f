"""The usual variants of BLEU on the same translations, each with its name: they differ by more than most models do."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from transformer_jax.evaluation.moses import VERSION, Moses, plain_quotes, split_compounds
from transformer_jax.evaluation.scores import bleu


@dataclass(frozen=True)
class Variant:
    """A BLEU and how it was computed."""

    name: str
    bleu: float
    signature: str
    """sacreBLEU's. Where it says tok:none the name says what the tokens are."""


def bleu_variants(
    translations: Sequence[str], references: Sequence[str], *, language: str, is_tokenized: bool
) -> list[Variant]:
    """BLEU as it is usually computed, and as the paper did.

        sacreBLEU 13a, intl    on text as it is written, cased and lower-cased. Of a tokenised corpus both sides are
                               detokenised by Moses' rules first.
        tokens                 on tokens, cased and lower-cased, with multi-bleu's arithmetic: those of the corpus, or
                               Moses' tokens of text.
        paper                  on tokens in which typographic quotes are plain ones and compounds are split at their
                               hyphens, cased: the script that was released with the paper. Higher than 13a.

    Args:
        translations: one line each.
        references: as many.
        language: of both, as a two-letter code.
        is_tokenized: whether the lines are tokens with spaces between them.

    Returns:
        The variants, seven in all.

    Raises:
        UserError: not as many references as translations, or none.
    """
    moses, sides = Moses(language), (list(translations), list(references))
    if is_tokenized:
        texts, tokens, plain = [moses.detokenize(lines) for lines in sides], list(sides), list(sides)
        prefix, name = f"detokenised ({VERSION}, {language}), ", "tokens of the corpus"
        changed = sum(again != line for again, line in zip(moses.tokenize(texts[1]), references, strict=True))
        if changed:
            warnings.warn(
                f"detokenising loses something: {changed} of {len(references)} references are not what they were after "
                "detokenising and tokenising again; of sacreBLEU's 13a and intl think accordingly",
                stacklevel=2,
            )
    else:
        texts, tokens = list(sides), [moses.tokenize(lines) for lines in sides]
        plain = [moses.tokenize([plain_quotes(line) for line in lines]) for lines in sides]
        prefix, name = "", f"Moses tokens ({VERSION}, {language})"
    found = []
    for label, (ours, theirs), tokenize in (
        (f"{prefix}sacreBLEU 13a", texts, "13a"),
        (f"{prefix}sacreBLEU intl", texts, "intl"),
        (name, tokens, "none"),
    ):
        found.append(Variant(label, *bleu(ours, theirs, tokenize)))
        found.append(Variant(f"{label}, lower-cased", *bleu(ours, theirs, tokenize, lowercase=True)))
    ours, theirs = ([split_compounds(plain_quotes(line)) for line in lines] for lines in plain)
    return [*found, Variant(f"paper: {name}, compounds split, plain quotes", *bleu(ours, theirs, "none"))]
