"""BLEU and chrF with their signatures, and exact match: the only file that knows sacreBLEU."""

from collections.abc import Sequence
from dataclasses import dataclass

from sacrebleu.metrics import BLEU, CHRF

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
    check_tokenization(tokenize)
    if len(translations) != len(references) or not references:
        raise UserError(
            f"{len(translations)} translations and {len(references)} references; as many of both are needed"
        )
    bleu, chrf = BLEU(tokenize=tokenize, lowercase=lowercase, force=True), CHRF(lowercase=lowercase)
    bleu_score = bleu.corpus_score(list(translations), [list(references)]).score
    chrf_score = chrf.corpus_score(list(translations), [list(references)]).score
    folded = [[text.lower() if lowercase else text for text in texts] for texts in (translations, references)]
    equal = sum(translation == reference for translation, reference in zip(*folded, strict=True))
    return CorpusScores(
        bleu=bleu_score,
        bleu_signature=str(bleu.get_signature()),
        chrf=chrf_score,
        chrf_signature=str(chrf.get_signature()),
        exact_match=100 * equal / len(references),
        num_sentences=len(references),
    )


def check_tokenization(tokenize: str) -> None:
    """Raises UserError unless sacreBLEU knows this tokenisation."""
    if tokenize not in BLEU.TOKENIZERS:
        raise UserError(f"tokenize is {tokenize!r}; legal: {', '.join(BLEU.TOKENIZERS)}")


def tokenization_of(config: Config) -> str:
    """How sacreBLEU is to tokenise: not at all where the corpus is tokenised already (`presegmented`), else 13a."""
    return "none" if config.tokenizer.kind == "presegmented" else "13a"
