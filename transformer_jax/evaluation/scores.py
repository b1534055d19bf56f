"""BLEU and chrF with their signatures, exact match, intervals and significance: the only file that knows sacreBLEU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest

from transformer_jax.config import Config
from transformer_jax.errors import UserError


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
        tokenize: sacreBLEU's tokenisation; `none` for text that is tokenised already.
        lowercase: score without case.

    Raises:
        UserError: not as many references as translations, or none; no such tokenisation.
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
    named = [(name, list(translations)) for name, translations in systems.items()]
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
    """Raises UserError unless sacreBLEU knows this tokenisation."""
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"tokenize is {tokenize!r}; legal: {', '.join(BLEU.TOKENIZERS)}")


def tokenization_of(config: Config) -> str:
    """How sacreBLEU is to tokenise: not at all where the corpus is tokenised already (`presegmented`), else 13a."""
    return "none" if config.tokenizer.kind == "presegmented" else "13a"
