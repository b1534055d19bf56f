"""Compute BLEU and chrF with signatures, bootstrap intervals, and the usual variants of BLEU."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from sacremoses import MosesDetokenizer, MosesTokenizer

from transformer_jax.config import Config
from transformer_jax.types import UserError


@dataclass(frozen=True)
class CorpusScores:
    """Scores of translations against one reference each, in percent."""

    bleu: float
    bleu_signature: str
    """SacreBLEU's signature. BLEU scores compare only if their signatures are equal."""
    chrf: float
    chrf_signature: str
    exact_match: float
    """Share of translations that equal their reference."""
    num_sentences: int


@dataclass(frozen=True)
class Resampled:
    """A score (BLEU or chrF2), and its distribution over bootstrap samples of the sentences."""

    metric: str
    score: float
    mean: float
    interval: float
    """Half the width of the 95 % confidence interval around the mean."""
    p_value: float | None
    """Of the difference to the first system. None for the first system."""
    signature: str


def score_corpus(
    translations: Sequence[str], references: Sequence[str], tokenize: str = "13a", lowercase: bool = False
) -> CorpusScores:
    """Return corpus BLEU, chrF and exact match.

    Args:
        translations: Translations, one line each.
        references: References, one for each translation.
        tokenize: SacreBLEU's tokenization; `none` for text that is already tokenized.
        lowercase: Whether to score without case.

    Raises:
        UserError: The numbers of references and translations differ, both are zero, or the tokenization is unknown.
    """
    bleu_scores = bleu(translations, references, tokenize, lowercase)
    chrf_scores = _score(CHRF(lowercase=lowercase), translations, references)
    folded = [[text.lower() if lowercase else text for text in texts] for texts in (translations, references)]
    equal = sum(translation == reference for translation, reference in zip(*folded, strict=True))
    return CorpusScores(*bleu_scores, *chrf_scores, 100 * equal / len(references), len(references))


def bleu(
    translations: Sequence[str], references: Sequence[str], tokenize: str = "13a", lowercase: bool = False
) -> tuple[float, str]:
    """Return corpus BLEU and its signature. With `none` the arithmetic is multi-bleu's, but smoothed."""
    check_tokenization(tokenize)
    if len(translations) != len(references) or not references:
        raise UserError(
            f"{len(translations)} translations and {len(references)} references; the numbers must be equal and positive"
        )
    return _score(BLEU(tokenize=tokenize, lowercase=lowercase, force=True), translations, references)


def _score(metric: BLEU | CHRF, translations: Sequence[str], references: Sequence[str]) -> tuple[float, str]:
    """Return the corpus score and the signature of a metric, which knows its signature once it has scored."""
    return metric.corpus_score(list(translations), [list(references)]).score, str(metric.get_signature())


def resample(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    tokenize: str = "13a",
    lowercase: bool = False,
    num_samples: int = 1000,
) -> dict[str, list[Resampled]]:
    """Return bootstrap intervals of BLEU and chrF, and the paired test against the first system (Koehn 2004).

    `systems` are translations by system. The samples depend only on the environment variable SACREBLEU_SEED.
    """
    metrics = {
        "BLEU": BLEU(tokenize=tokenize, lowercase=lowercase, force=True, references=[list(references)]),
        "chrF2": CHRF(lowercase=lowercase, references=[list(references)]),
    }
    named: list[tuple[str, Sequence[str]]] = [(name, list(translations)) for name, translations in systems.items()]
    signatures, scores = PairedTest(named, metrics, references=None, test_type="bs", n_samples=num_samples)()

    def resampled(metric: str, index: int) -> Resampled:
        score, mean, interval, p = (getattr(scores[metric][index], name) for name in ("score", "mean", "ci", "p_value"))
        p_value = None if p is None else float(p)
        return Resampled(metric, float(score), float(mean), float(interval), p_value, str(signatures[metric]))

    return {name: [resampled(metric, index) for metric in metrics] for index, name in enumerate(systems)}


def check_tokenization(tokenize: str) -> None:
    """Raise a UserError unless sacreBLEU knows the tokenization."""
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"tokenize is {tokenize!r}; legal: {', '.join(BLEU.TOKENIZERS)}")


def tokenization_of(config: Config) -> str:
    """Return sacreBLEU's tokenization for a run: `none` if its corpus is already tokenized, otherwise `13a`."""
    return "none" if config.tokenizer.kind == "pretokenized" else "13a"


@dataclass(frozen=True)
class Variant:
    """A BLEU score and how it was computed."""

    name: str
    bleu: float
    signature: str
    """SacreBLEU's signature. With tok:none, the name states what the tokens are."""


def bleu_variants(
    translations: Sequence[str], references: Sequence[str], *, language: str, is_tokenized: bool
) -> list[Variant]:
    """Return seven variants of BLEU, as it is usually computed and as the paper computed it.

    - sacreBLEU 13a and intl, cased and lower-cased, on text; Moses' rules detokenize a tokenized corpus first.
    - With multi-bleu's arithmetic, cased and lower-cased, on the tokens of the corpus, or on Moses' tokens of text.
    - The script that was released with the paper: tokens with plain quotes and with compounds split at their hyphens,
      cased. Higher than 13a.
    """
    sides = [list(translations), list(references)]
    if is_tokenized:
        texts, tokens, plain = [moses_detokenize(lines, language) for lines in sides], sides, sides
        prefix, name = f"detokenized ({VERSION}, {language}), ", "tokens of the corpus"
        again = moses_tokenize(texts[1], language)
        changed = sum(tokenized != line for tokenized, line in zip(again, references, strict=True))
        if changed:
            warnings.warn(
                f"detokenization is not exact: {changed} of {len(references)} references differ after detokenizing and "
                "tokenizing again, so interpret sacreBLEU 13a and intl with care",
                stacklevel=2,
            )
    else:
        texts, tokens = sides, [moses_tokenize(lines, language) for lines in sides]
        plain = [moses_tokenize([plain_quotes(line) for line in lines], language) for lines in sides]
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


_QUOTES = str.maketrans("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2018\u2019\u201a\u201b", '"' * 6 + "'" * 4)
VERSION = f"sacremoses {version('sacremoses')}"


def plain_quotes(text: str) -> str:
    """Replace typographic and escaped quotation marks by plain ones.

    >>> print(plain_quotes("&quot; \u201eso\u201c isn &apos;t"))
    " "so" isn 't
    """
    return text.translate(_QUOTES).replace("&quot;", '"').replace("&apos;", "'")


def moses_tokenize(texts: Sequence[str], language: str) -> list[str]:
    """Return Moses' tokens separated by spaces, with `&`, quotes and brackets escaped as in the original script.

    Moses uses the rules of English for a two-letter code of a language that it does not have.

    >>> moses_tokenize(["It's a test, isn't it?"], "en")
    ['It &apos;s a test , isn &apos;t it ?']
    """
    moses = MosesTokenizer(language)
    return [moses.tokenize(text, return_str=True) for text in texts]


def moses_detokenize(texts: Sequence[str], language: str) -> list[str]:
    """Join Moses' tokens into plain text, which may differ from the text before tokenization."""
    moses = MosesDetokenizer(language)
    return [moses.detokenize(text.split()) for text in texts]


def split_compounds(text: str) -> str:
    """Make hyphens between letters separate tokens, as in the scores of the paper's time.

    >>> split_compounds("rich-text format - that")
    'rich ##AT##-##AT## text format - that'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)
