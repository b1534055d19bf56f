"""BLEU and chrF with signatures, bootstrap intervals, and the usual variants of BLEU."""

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
    """What a corpus of translations scores against one reference each. Percentages."""

    bleu: float
    bleu_signature: str
    """sacreBLEU's: with another signature a BLEU is another figure."""
    chrf: float
    chrf_signature: str
    exact_match: float
    """Sentences that equal their reference."""
    num_sentences: int


@dataclass(frozen=True)
class Resampled:
    """A score among the scores of samples of the sentences, drawn with replacement."""

    metric: str
    """BLEU or chrF2."""
    score: float
    mean: float
    """Over the samples."""
    interval: float
    """Half the width of the interval that holds 95 % of the samples, around the mean."""
    p_value: float | None
    """Of the difference to the first system; None for that one."""
    signature: str


def score_corpus(
    translations: Sequence[str], references: Sequence[str], tokenize: str = "13a", lowercase: bool = False
) -> CorpusScores:
    """Corpus BLEU, chrF and exact match.

    Args:
        translations: one line each.
        references: as many.
        tokenize: sacreBLEU's tokenization; `none` for text that is tokenized already.
        lowercase: score without case.

    Raises:
        UserError: not as many references as translations, or none; no such tokenization.
    """
    bleu_score, bleu_signature = bleu(translations, references, tokenize, lowercase)
    chrf = CHRF(lowercase=lowercase)
    chrf_score = chrf.corpus_score(list(translations), [list(references)]).score
    folded = [[text.lower() if lowercase else text for text in texts] for texts in (translations, references)]
    equal = sum(translation == reference for translation, reference in zip(*folded, strict=True))
    return CorpusScores(
        bleu=bleu_score,
        bleu_signature=bleu_signature,
        chrf=chrf_score,
        chrf_signature=str(chrf.get_signature()),
        exact_match=100 * equal / len(references),
        num_sentences=len(references),
    )


def bleu(
    translations: Sequence[str], references: Sequence[str], tokenize: str = "13a", lowercase: bool = False
) -> tuple[float, str]:
    """Corpus BLEU and its signature; the rest as for `score_corpus`. With `none` it is multi-bleu's arithmetic, but
    that a length of n-gram without a match is smoothed."""
    check_tokenization(tokenize)
    if len(translations) != len(references) or not references:
        raise UserError(
            f"{len(translations)} translations and {len(references)} references; as many of both are needed"
        )
    metric = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    return metric.corpus_score(list(translations), [list(references)]).score, str(metric.get_signature())


def resample(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    tokenize: str = "13a",
    lowercase: bool = False,
    num_samples: int = 1000,
) -> dict[str, list[Resampled]]:
    """Intervals of BLEU and chrF by bootstrap, and the paired bootstrap test against the first system (Koehn 2004).

    Args:
        systems: translations by the system's name.
        references: one for each translation.
        tokenize, lowercase: as for `score_corpus`.
        num_samples: how many samples of the sentences. They are the same ones each time, unless the variable
            SACREBLEU_SEED has another number.

    Returns:
        For each system its BLEU and its chrF.
    """
    metrics = {
        "BLEU": BLEU(tokenize=tokenize, lowercase=lowercase, force=True, references=[list(references)]),
        "chrF2": CHRF(lowercase=lowercase, references=[list(references)]),
    }
    named: list[tuple[str, Sequence[str]]] = [(name, list(translations)) for name, translations in systems.items()]
    signatures, scores = PairedTest(named, metrics, references=None, test_type="bs", n_samples=num_samples)()
    return {
        name: [
            Resampled(metric, *_figures(scores[metric][place]), signature=str(signatures[metric])) for metric in metrics
        ]
        for place, (name, _) in enumerate(named)
    }


def _figures(result: object) -> tuple[float, float, float, float | None]:
    score, p_value, mean, interval = (getattr(result, name) for name in ("score", "p_value", "mean", "ci"))
    return float(score), float(mean), float(interval), None if p_value is None else float(p_value)


def check_tokenization(tokenize: str) -> None:
    """Raises UserError unless sacreBLEU knows this tokenization."""
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"tokenize is {tokenize!r}; legal: {', '.join(BLEU.TOKENIZERS)}")


def tokenization_of(config: Config) -> str:
    """How sacreBLEU is to tokenize: not at all where the corpus is tokenized already (`pretokenized`), else 13a."""
    return "none" if config.tokenizer.kind == "pretokenized" else "13a"


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

        sacreBLEU 13a, intl    on text as it is written, cased and lower-cased. Of a tokenized corpus both sides are
                               detokenized by Moses' rules first.
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
        prefix, name = f"detokenized ({VERSION}, {language}), ", "tokens of the corpus"
        changed = sum(again != line for again, line in zip(moses.tokenize(texts[1]), references, strict=True))
        if changed:
            warnings.warn(
                f"detokenizing loses something: {changed} of {len(references)} references are not what they were after "
                "detokenizing and tokenizing again; of sacreBLEU's 13a and intl think accordingly",
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


_QUOTES = str.maketrans("\u201c\u201d\u201e\u201f\u00ab\u00bb\u2018\u2019\u201a\u201b", '"' * 6 + "'" * 4)
VERSION = f"sacremoses {version('sacremoses')}"


def plain_quotes(text: str) -> str:
    """Typographic quotation marks and escaped ones as plain ones.

    >>> print(plain_quotes("&quot; \u201eso\u201c isn &apos;t"))
    " "so" isn 't
    """
    return text.translate(_QUOTES).replace("&quot;", '"').replace("&apos;", "'")


class Moses:
    """The tokenizer and the detokenizer of one language.

    >>> moses = Moses("en")
    >>> moses.tokenize(["It's a test, isn't it?"])
    ['It &apos;s a test , isn &apos;t it ?']
    >>> moses.detokenize(["It &apos;s a test , isn &apos;t it ?"])
    ["It's a test, isn't it?"]
    """

    def __init__(self, language: str) -> None:
        """Takes a two-letter code; of a language that Moses has no rules for, English's are used."""
        self._tokenizer, self._detokenizer = MosesTokenizer(language), MosesDetokenizer(language)

    def tokenize(self, texts: Sequence[str]) -> list[str]:
        """Tokens with spaces between them; `&`, quotes and brackets escaped, as the original script does."""
        return [self._tokenizer.tokenize(text, return_str=True) for text in texts]

    def detokenize(self, texts: Sequence[str]) -> list[str]:
        """The reverse, as well as it can be known."""
        return [self._detokenizer.detokenize(text.split()) for text in texts]


def split_compounds(text: str) -> str:
    """Hyphens between letters as tokens of their own, as in the scores of the paper's time.

    >>> split_compounds("rich-text format - that")
    'rich ##AT##-##AT## text format - that'
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", text)
