"""Loss, perplexity and translation scores of parameters on sentence pairs."""

import dataclasses
import itertools
import math
import time
import warnings
from collections.abc import Iterable, Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from transformer_jax.config import Config
from transformer_jax.data.batching import choose_shapes, eval_batches
from transformer_jax.data.encoding import EncodedPairs, encode_pairs
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.bleu import CorpusScores, check_tokenization, score_corpus, tokenization_of
from transformer_jax.evaluation.scoring import MAX_TOKENS, check_lengths, score_pairs
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.distributed import gather
from transformer_jax.training.metrics import Evaluation
from transformer_jax.training.sharding import gather_params, put_batch, row_multiple, row_parts
from transformer_jax.training.step import eval_step, loss_spec
from transformer_jax.types import ALL_ROWS, Batch, Params, RowParts


@dataclasses.dataclass(frozen=True)
class Report:
    """All that `evaluate` says of a run on a corpus."""

    scores: CorpusScores
    loss: float
    """Mean negative log-likelihood of a target token, EOS counted, in nats, without label smoothing."""
    perplexity: float
    """exp(loss): per token of this tokenizer, not comparable with another's."""
    sentences_per_second: float
    tokens_per_second: float
    """Target tokens generated, EOS counted, in a second of translating, compilation included."""
    translations: list[str]
    references: list[str]


_eval_step = partial(jax.jit, static_argnames=("model", "max_logits"))(eval_step)


def corpus_loss(
    params: Params,
    batches: Iterable[Batch],
    model: Transformer,
    mesh: Mesh | None = None,
    max_logits: int | None = None,
) -> float:
    """Mean negative log-likelihood of a target token, in nats. Sums are added up on the host in float64.

    With several processes, all call it: with a mesh they compute each batch together, of which each has its rows;
    without one they have the same batches and share them out.
    """
    loss_sum, num_tokens = 0.0, 0
    alone = mesh is None
    for batch in itertools.islice(batches, jax.process_index(), None, jax.process_count()) if alone else batches:
        sums = jax.device_get(
            _eval_step(params, put_batch(batch, mesh) if mesh else batch, model=model, max_logits=max_logits)
        )
        loss_sum, num_tokens = loss_sum + float(sums.loss_sum), num_tokens + int(sums.num_tokens)
    if alone:
        loss_sum, num_tokens = (sum(values) for values in zip(*gather([loss_sum, num_tokens]), strict=True))
    return loss_sum / max(num_tokens, 1)


def perplexity(loss: float) -> float:
    """exp(loss), or infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


def reference_texts(pairs: Pairs, tokenizers: TokenizerPair) -> list[str]:
    """The references as the translations are written: pieces of words joined where the corpus comes in pieces."""
    return [tokenizers.target.plain(text) for text in pairs.target]


def evaluate_pairs(
    translator: Translator, pairs: Pairs, *, tokenize: str | None = None, lowercase: bool = False
) -> Report:
    """Translates the sources, scores against the targets, and computes the loss of the targets.

    With several processes, all call it with the same pairs; each does its share, and all get the whole. The loss of an
    ensemble is computed whole by each.

    Args:
        translator: the run, or an ensemble.
        pairs: sources and references.
        tokenize: sacreBLEU's tokenization; None: as `tokenization_of` says.
        lowercase: score without case.
    """
    config, tokenizers = translator.config, translator.tokenizers
    tokenize = tokenize or tokenization_of(config)
    check_tokenization(tokenize)  # before the work
    if len(translator.members) == 1:
        encoded = encode_pairs(pairs, tokenizers, config.model)
        check_lengths(encoded, pairs, config.model)
        model, limit = Transformer(config.model), loss_spec(config.training).max_logits
        loss = corpus_loss(translator.params, _batches(encoded, config), model, max_logits=limit)
    else:
        scored = score_pairs(translator, pairs)
        loss = -math.fsum(one.log_prob for one in scored) / sum(one.num_tokens for one in scored)
    start = time.monotonic()
    hypotheses = [found[0] for found in translator.translate_n_best(list(pairs.source), 1, shared=True)]
    seconds = time.monotonic() - start
    translations = [hypothesis.text for hypothesis in hypotheses]
    references = reference_texts(pairs, tokenizers)
    return Report(
        scores=score_corpus(translations, references, tokenize, lowercase),
        loss=loss,
        perplexity=perplexity(loss),
        sentences_per_second=len(translations) / seconds,
        tokens_per_second=sum(hypothesis.num_tokens for hypothesis in hypotheses) / seconds,
        translations=translations,
        references=references,
    )


def check_complete(translations: Sequence[str], pairs: Pairs) -> None:
    """Warns of sentences that were translated into nothing at all."""
    both = zip(pairs.source, translations, strict=True)
    count = sum(bool(source.strip()) and not translation for source, translation in both)
    if count:
        warnings.warn(f"{count} of {len(pairs)} sentences were translated into nothing at all", stacklevel=2)


def check_direction(translator: Translator, pairs: Pairs, most: int = 100) -> None:
    """Warns if the run finds the pairs likelier the other way round: then the two files were probably swapped.

    Args:
        translator: the run.
        pairs: sources and references.
        most: of them, from the first on.
    """
    config, tokenizers = translator.config, translator.tokenizers
    sides = list(pairs.source)[:most], list(pairs.target)[:most]
    losses, unknown = [], []
    for source, target in (sides, sides[::-1]):
        encoded = encode_pairs(Pairs(source, target, pairs.origin), tokenizers, config.model)
        check_lengths(encoded, pairs, config.model)
        model, limit = Transformer(config.model), loss_spec(config.training).max_logits
        loss = corpus_loss(translator.params, _batches(encoded, config), model, max_logits=limit)
        losses.append(loss)
        unknown.append(int((encoded.target_ids == tokenizers.target.unk_id).sum()))
    # Of a trained run it is several times as much. A vocabulary that does not know the words makes any of them likely.
    if losses[1] < 0.8 * losses[0] and unknown[1] <= unknown[0]:
        warnings.warn(
            f"{pairs.origin}: the run finds the sentences likelier the other way round; is the source the reference?",
            stacklevel=2,
        )


class Validation:
    """The training loop's `evaluate`: loss on the validation split, BLEU and samples on its first sentences."""

    def __init__(self, config: Config, pairs: Pairs, encoded: EncodedPairs, tokenizers: TokenizerPair, mesh: Mesh):
        training = config.training
        self._config, self._tokenizers, self._mesh = config, tokenizers, mesh
        self._model = Transformer(config.model)
        check_lengths(encoded, pairs, config.model)
        self._batches = list(_batches(encoded, config, row_multiple(mesh), row_parts(mesh)))
        # Spread over the split, which may be sorted.
        count = min(max(training.valid_sentences, training.num_samples), len(pairs))
        chosen = np.linspace(0, len(pairs) - 1, count).astype(int)
        self._sources = [pairs.source[index] for index in chosen]
        references = reference_texts(pairs, tokenizers)
        self._references = [references[index] for index in chosen]

    def __call__(self, params: Params, step: int) -> Evaluation:
        """Figures and samples of these parameters."""
        limit = loss_spec(self._config.training, self._mesh).max_logits
        loss = corpus_loss(params, self._batches, self._model, self._mesh, limit)
        figures = {"valid_loss": loss, "valid_perplexity": perplexity(loss)}
        translations: Sequence[str] = []
        if self._sources:
            translator = Translator(self._config, gather_params(params, self._mesh), self._tokenizers)
            translations = translator.translate(self._sources, shared=True)
        if self._config.training.valid_sentences:
            scores = score_corpus(translations, self._references, tokenization_of(self._config))
            figures |= {
                "valid_bleu": scores.bleu,
                "valid_chrf": scores.chrf,
                "valid_exact_match": scores.exact_match,
            }
        samples = [
            {"source": source, "reference": reference, "translation": translation}
            for source, reference, translation in zip(self._sources, self._references, translations, strict=True)
        ]
        # Others each time: the same few sentences would say less.
        first = step // self._config.training.validate_every * self._config.training.num_samples
        shown = [samples[(first + i) % len(samples)] for i in range(self._config.training.num_samples) if samples]
        return Evaluation(figures, shown)


def _batches(encoded: EncodedPairs, config: Config, multiple: int = 1, parts: RowParts = ALL_ROWS) -> Iterable[Batch]:
    """Evaluation needs no gradients: a few shapes and a budget that stays small where training's is large."""
    budget = min(config.data.batch_tokens, MAX_TOKENS)
    shapes = choose_shapes(encoded.source_lengths, encoded.target_lengths, budget, max_shapes=4)
    return eval_batches(encoded, shapes, budget, config.model, multiple, parts)
