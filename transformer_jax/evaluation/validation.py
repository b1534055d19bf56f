"""Evaluate parameters on sentence pairs: loss, perplexity, translation scores and speed."""

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import Config
from transformer_jax.data.encoding import EncodedPairs, encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import CorpusScores, check_tokenization, score_corpus, tokenization_of
from transformer_jax.evaluation.scoring import check_lengths, corpus_loss, perplexity, score_pairs, validation_batches
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.files import JsonObject
from transformer_jax.training.metrics import Evaluation
from transformer_jax.training.sharding import gather_params, row_multiple, row_parts
from transformer_jax.training.step import loss_spec
from transformer_jax.types import Params, UserError


@dataclasses.dataclass(frozen=True)
class CorpusEvaluation:
    """Everything that `evaluate` reports about a run on a corpus."""

    scores: CorpusScores
    loss: float
    """Mean negative log-likelihood of a target token, including EOS, in nats, without label smoothing."""
    perplexity: float
    """exp(loss), per token of the run's tokenizer; not comparable with another tokenizer."""
    sentences_per_second: float
    tokens_per_second: float
    """Target tokens generated, including EOS, without the time of compilation."""
    translations: list[str]
    references: list[str]

    def to_dict(self) -> JsonObject:
        """Return the numbers as values that JSON can hold, without the sentences."""
        tree = dataclasses.asdict(self)
        del tree["translations"], tree["references"]
        return tree.pop("scores") | tree


def reference_texts(pairs: Pairs, tokenizers: TokenizerPair) -> list[str]:
    """Return the references in the form of translations: word pieces are joined if the corpus consists of pieces."""
    return [tokenizers.target.plain(text) for text in pairs.target]


def evaluate_pairs(
    translator: Translator,
    pairs: Pairs,
    *,
    tokenize: str | None = None,
    lowercase: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> CorpusEvaluation:
    """Translate the sources, score the translations against the targets, and compute the loss of the targets.

    With several processes, all call it with the same pairs, and all get the result. `clock` returns seconds.
    """
    config, tokenizers = translator.config, translator.tokenizers
    tokenize = tokenize or tokenization_of(config)
    check_tokenization(tokenize)  # before the work
    if len(translator.members) == 1:
        loss = _loss(translator, pairs)[0]
    else:
        scored = score_pairs(translator, pairs)
        loss = -math.fsum(pair.log_prob for pair in scored) / sum(pair.num_tokens for pair in scored)
    start = clock()
    with _compilation_spans(clock) as spans:
        hypotheses = [ranked[0] for ranked in translator.translate_n_best(list(pairs.source), 1, shared=True)]
    seconds = max(clock() - start - total_length(spans), 1e-9)
    translations = [hypothesis.text for hypothesis in hypotheses]
    references = reference_texts(pairs, tokenizers)
    return CorpusEvaluation(
        scores=score_corpus(translations, references, tokenize, lowercase),
        loss=loss,
        perplexity=perplexity(loss),
        sentences_per_second=len(translations) / seconds,
        tokens_per_second=sum(hypothesis.num_tokens for hypothesis in hypotheses) / seconds,
        translations=translations,
        references=references,
    )


@contextmanager
def _compilation_spans(clock: Callable[[], float]) -> Iterator[list[tuple[float, float]]]:
    """Collect when JAX traces and compiles while the context is open: (start, end) in seconds."""
    spans: list[tuple[float, float]] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            end = clock()
            spans.append((end - duration_secs, end))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield spans
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def total_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals, which may be nested.

    >>> total_length([(0, 4), (1, 2), (3, 5), (7, 8)])
    6.0
    """
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _loss(translator: Translator, pairs: Pairs) -> tuple[float, EncodedPairs]:
    """Return the loss of pairs under the translator's first model, and the encoded pairs."""
    config = translator.config
    encoded = encode_pairs(pairs, translator.tokenizers, config.model)
    check_lengths(encoded, pairs, config.model)
    batches, limit = validation_batches(encoded, config), loss_spec(config.training).max_logits
    return corpus_loss(translator.params, batches, Transformer(config.model), max_logits=limit), encoded


def check_complete(translations: Sequence[str], pairs: Pairs) -> None:
    """Warn about sentences whose translation is empty."""
    both = zip(pairs.source, translations, strict=True)
    count = sum(bool(source.strip()) and not translation for source, translation in both)
    if count:
        warnings.warn(f"{count} of {len(pairs)} sentences have an empty translation", stacklevel=2)


def check_direction(translator: Translator, pairs: Pairs, max_pairs: int = 100) -> None:
    """Warn if the run assigns a higher likelihood to the reverse direction of the first `max_pairs` pairs."""
    sides = list(pairs.source)[:max_pairs], list(pairs.target)[:max_pairs]
    loss, encoded = _loss(translator, Pairs(*sides, pairs.origin))
    try:
        reverse_loss, reverse = _loss(translator, Pairs(*sides[::-1], pairs.origin))
    except UserError:  # the reverse direction may have unknown words, or more tokens than the model has positions
        return
    unknown, reverse_unknown = (
        (side.target_ids == translator.tokenizers.target.unk_id).sum() for side in (encoded, reverse)
    )
    # The reverse loss of a trained run is several times higher. Unknown words are probable in either direction.
    if reverse_loss < 0.8 * loss and reverse_unknown <= unknown:
        warnings.warn(
            f"{pairs.origin}: the model assigns higher likelihood to the reverse direction: are --source and "
            "--reference swapped?",
            stacklevel=2,
        )


class Validation:
    """Evaluate during training: loss on the validation split, and BLEU and sample translations on part of it."""

    def __init__(self, config: Config, pairs: Pairs, encoded: EncodedPairs, tokenizers: TokenizerPair, mesh: Mesh):
        training = config.training
        self._config, self._tokenizers, self._mesh = config, tokenizers, mesh
        self._model = Transformer(config.model)
        check_lengths(encoded, pairs, config.model)
        self._batches = list(validation_batches(encoded, config, row_multiple(mesh), row_parts(mesh)))
        count = min(max(training.valid_sentences, training.num_samples), len(pairs))
        indices = np.linspace(0, len(pairs) - 1, count).astype(int)  # evenly, because the split may be sorted
        self._sources = [pairs.source[index] for index in indices]
        self._references = [tokenizers.target.plain(pairs.target[index]) for index in indices]

    def __call__(self, params: Params, step: int) -> Evaluation:
        """Return the metrics and the samples of parameters at a step."""
        limit = loss_spec(self._config.training, self._mesh).max_logits
        loss = corpus_loss(params, self._batches, self._model, self._mesh, limit)
        metrics = {"valid_loss": loss, "valid_perplexity": perplexity(loss)}
        translations: Sequence[str] = []
        if self._sources:
            translator = Translator(self._config, gather_params(params, self._mesh), self._tokenizers)
            translations = translator.translate(self._sources, shared=True)
        if self._config.training.valid_sentences:
            scores = score_corpus(translations, self._references, tokenization_of(self._config))
            metrics |= {f"valid_{name}": getattr(scores, name) for name in ("bleu", "chrf", "exact_match")}
        samples = [
            {"source": source, "reference": reference, "translation": translation}
            for source, reference, translation in zip(self._sources, self._references, translations, strict=True)
        ]
        # Each validation shows other sentences, so that the samples cover the split over time.
        first = step // self._config.training.validate_every * self._config.training.num_samples
        shown = [samples[(first + i) % len(samples)] for i in range(self._config.training.num_samples) if samples]
        return Evaluation(metrics, shown)
