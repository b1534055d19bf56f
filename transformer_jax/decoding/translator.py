"""Text in, text out: a trained run as a function on lists of sentences."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, DecodingConfig, Sampling
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.decode import Member, load_member, prepare, run_params, search, search_spec
from transformer_jax.decoding.search import SearchResult, SearchSpec, sample_keys
from transformer_jax.model.positional import max_sequence_length
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.distributed import gather
from transformer_jax.runtime.fields import require
from transformer_jax.types import Params, UserError

_MAX_PAIR_TOKENS = 4096  # tokens of the longer side in a batch of pairs


class Hypothesis(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """Log-probability / length penalty, by which hypotheses are ranked."""
    log_prob: float
    """log P(target | source) in nats, the sum over the tokens."""
    num_tokens: int
    """Number of tokens, including EOS."""
    token_ids: tuple[int, ...] = ()
    """Token ids, including EOS unless the limit ended the translation."""


class Translator:
    """Translate with the parameters, the tokenizers and the decoding settings of a run.

    >>> translator = Translator.load("runs/numbers")                          # doctest: +SKIP
    >>> translator.translate(["twenty-one", ""])                              # doctest: +SKIP
    ['einundzwanzig', '']
    """

    def __init__(
        self, config: Config, params: Params, tokenizers: TokenizerPair, others: Sequence[Member] = ()
    ) -> None:
        """Create a translator from the parts that `load` reads. Raise UserError if the tokenizers do not fit."""
        self.config, self.params, self.tokenizers, self._others = config, params, tokenizers, tuple(others)
        for member in self.members:
            tokenizers.check_fits(member.config)
        self._prepared: tuple[Params, tuple[Params, ...], tuple[int, int]] | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """The models of the ensemble, beginning with the run's own model."""
        return Member(self.config.model, self.params, self.config.decoding.checkpoint), *self._others

    @property
    def max_sequence_length(self) -> int:
        """Maximum number of tokens that every model of the ensemble accepts; learned position tables limit it."""
        return min(max_sequence_length(member.config) for member in self.members)

    @classmethod
    def load(cls, run: str | Path, *, ensemble: Sequence[str | Path] = (), **decoding: Any) -> "Translator":
        """Load a run folder.

        Args:
            run: The run's folder.
            ensemble: Folders of additional runs. The probability of each token is the mean over all runs. The models
                may have different sizes but need equal tokenizers. Each run uses the checkpoint of its own
                configuration unless `checkpoint` is given. All other decoding settings come from `run`.
            **decoding: Fields of the run's `decoding` section to replace, for example `beam_size=1`.

        Raises:
            UserError: A run, checkpoint or field does not exist, or the tokenizers of the runs differ.
        """
        run_dir = RunDir(Path(run))
        config = run_dir.load_config()
        unknown = set(decoding) - {item.name for item in dataclasses.fields(DecodingConfig)}
        require(not unknown, f"DecodingConfig has no field {', '.join(sorted(unknown))}")
        config = dataclasses.replace(config, decoding=dataclasses.replace(config.decoding, **decoding))
        require(not isinstance(ensemble, str), f"ensemble is the string {ensemble!r:.80}; a list of runs is needed")
        tokenizers, checkpoint = TokenizerPair.load(run_dir.tokenizer), decoding.get("checkpoint")
        others = [load_member(other, run_dir, config, tokenizers, checkpoint) for other in ensemble]
        return cls(config, run_params(run_dir, config), tokenizers, others)

    def with_decoding(self, **fields: Any) -> "Translator":
        """Return a translator with the same parameters and other decoding settings."""
        config = dataclasses.replace(self.config, decoding=dataclasses.replace(self.config.decoding, **fields))
        return Translator(config, self.params, self.tokenizers, self._others)

    def translate(self, texts: Sequence[str], *, shared: bool = False) -> list[str]:
        """Return the best translation of each text, in the order of the texts. An empty line stays empty."""
        return [hypotheses[0].text for hypotheses in self.translate_n_best(texts, 1, shared=shared)]

    def translate_n_best(
        self,
        texts: Sequence[str],
        n_best: int,
        *,
        prefixes: Sequence[str] | None = None,
        sampling: Sampling | None = None,
        seed: int = 0,
        first_line: int = 0,
        shared: bool = False,
        progress: Callable[[int], None] = lambda count: None,
    ) -> list[list[Hypothesis]]:
        """Return the best translations of each text, best first.

        Args:
            texts: One sentence each. An empty text has one empty translation.
            n_best: Number of translations of each text. A search that finds fewer returns fewer.
            prefixes: Beginning of each translation. It is tokenized separately, so it should end at a word boundary.
                Scores include it.
            sampling: Sample `n_best` translations from this distribution, instead of searching for the most probable.
            seed: Seed of the samples, from 0 to 2^32 - 1. A sample depends on the seed, the index of its text and its
                own number, and on nothing else.
            first_line: Index of the first text in the complete input, for a caller that translates it in pieces.
            shared: Distribute the texts over the processes of a job. Every process passes the same texts and gets all
                translations.
            progress: Called with the number of texts translated since its previous call.

        Raises:
            UserError: `texts` or `prefixes` is a string, their lengths differ, a prefix is longer than the learned
                position table, or `n_best` or `seed` is out of range.
        """
        self._check_request(texts, n_best, prefixes, sampling, seed)
        all_rows, prefix_rows = self.encode(texts), self._encode_prefixes(prefixes, len(texts))
        part = slice(jax.process_index(), None, jax.process_count()) if shared else slice(None)
        mine = set(_longest_first(all_rows)[part])  # every n-th by length, so that all processes have equal work
        rows = [row if index in mine else [] for index, row in enumerate(all_rows)]
        results = [[Hypothesis("", 0.0, 0.0, 0)] for _ in texts]
        prepared, (budget, num_workers) = self._prepare()
        models = tuple(Transformer(member.config) for member in self.members)
        if sampling is not None:  # each sample is a row of the batch
            budget //= n_best

        def search_batch(batch: tuple[list[int], np.ndarray]) -> SearchResult:
            indices, src = batch
            source_lengths = [len(rows[index]) for index in indices]
            lines = [first_line + index for index in indices]
            keys = None if sampling is None else sample_keys(seed, lines, len(src), n_best)
            spec = self._search_spec(src.shape, source_lengths, [prefix_rows[index] for index in indices], n_best)
            options = {"quantization": self.config.decoding.quantization, "sampling": sampling, "keys": keys}
            result: SearchResult = jax.device_get(search(prepared, src, spec, models=models, **options))
            return result

        batches = list(source_batches(rows, budget, self.config.model.pad_id, self.max_sequence_length))
        with ThreadPoolExecutor(num_workers) as pool:
            # A single batch is searched in this thread: a second thread costs a short sentence a tenth of its time.
            answers = pool.map(search_batch, batches) if len(batches) > 1 else map(search_batch, batches)
            try:
                for (indices, _), result in zip(batches, answers, strict=True):
                    for row, index in enumerate(indices):
                        results[index] = self._hypotheses(SearchResult(*(leaf[row] for leaf in result)))
                    progress(len(indices))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the remaining batches
                raise
        if shared:
            for gathered in gather([(index, results[index]) for index in mine]):
                for index, hypotheses in gathered:
                    results[index] = [Hypothesis._make((*fields, tuple(ids))) for *fields, ids in hypotheses]
        return results

    def _check_request(
        self, texts: Sequence[str], n_best: int, prefixes: Sequence[str] | None, sampling: Sampling | None, seed: int
    ) -> None:
        """Raise UserError for illegal arguments of `translate_n_best`."""
        for name, value in (("texts", texts), ("prefixes", prefixes)):
            if isinstance(value, str):
                raise UserError(f"{name} is the string {value!r:.80}; a list of strings is needed")
        if prefixes is not None and len(prefixes) != len(texts):
            raise UserError(f"{len(prefixes)} prefixes for {len(texts)} texts; each text needs one, which may be empty")
        beam_size = self.config.decoding.beam_size
        if n_best < 1 or (sampling is None and n_best > beam_size):
            upper_bound = "" if sampling else f" and at most decoding.beam_size {beam_size}"
            raise UserError(f"n_best is {n_best}; it must be at least 1{upper_bound}")
        require(0 <= seed < 2**32, f"seed is {seed}; it must be from 0 to {2**32 - 1}")

    def _search_spec(
        self, shape: tuple[int, ...], source_lengths: Sequence[int], prefixes: Sequence[Sequence[int]], n_best: int
    ) -> SearchSpec:
        """Return the search specification of a batch of shape `b s`, whose last rows may be padding."""
        model, decoding = self.config.model, self.config.decoding
        # The limit counts the source's words and EOS, whatever the model reads: EOS always, BOS never.
        offset = (not model.source_eos) - model.source_bos + decoding.max_length_offset
        lengths = np.zeros(shape[0], np.int32)
        lengths[: len(source_lengths)] = source_lengths
        limits = np.where(lengths > 0, np.minimum(lengths + offset, self.max_sequence_length), 0)
        max_length = int(min(shape[1] + offset, self.max_sequence_length))
        prefix, longest = None, max(map(len, prefixes))
        if longest:  # padded to a multiple of 8, so that few shapes are compiled; at least one token follows a prefix
            prefix = pad(prefixes, (shape[0], -(-longest // 8) * 8), -1)
            limits = np.where(lengths > 0, np.maximum(limits, (prefix >= 0).sum(axis=1) + 1), 0)
            max_length = min(max(max_length, prefix.shape[1] + 1), self.max_sequence_length)
        unknown_ids = range(self.tokenizers.target.vocab_size, model.vocab_size)
        return search_spec(
            model,
            decoding,
            max_lengths=limits.astype(np.int32),
            max_length=max_length,
            n_best=min(n_best, decoding.beam_size),  # any number of samples is legal
            forbidden_ids=(*decoding.forbidden_ids, *unknown_ids),
            prefix=prefix,
        )

    def _prepare(self) -> tuple[tuple[Params, ...], tuple[int, int]]:
        """Return the members' parameters in the layout of `search` and `_budget`, both kept while `params` stays."""
        if self._prepared is None or self._prepared[0] is not self.params:
            quantization = self.config.decoding.quantization
            converted = tuple(prepare(member.params, member.config, quantization) for member in self.members)
            self._prepared = self.params, converted, _budget(self.config.decoding, converted)
        return self._prepared[1:]

    def encode(self, texts: Sequence[str], *, warn: bool = True) -> list[list[int]]:
        """Return the source token ids of each text, truncated to `max_source`; an empty list for an empty line."""
        model, decoding = self.config.model, self.config.decoding
        longest, setting = min(
            (decoding.max_source, "decoding.max_source"), (self.max_sequence_length, "model.max_length")
        )
        start, end = [model.bos_id] * model.source_bos, [model.eos_id] * model.source_eos
        capacity = max(0, longest - len(start) - len(end))
        encoded = self.tokenizers.source.encode([_well_formed(text) for text in texts])
        for line, ids in enumerate(encoded, 1):
            if warn and len(ids) > capacity:
                warnings.warn(
                    f"line {line} has {len(ids)} tokens; it is truncated to {capacity} tokens ({setting})",
                    stacklevel=3,  # the caller of `translate_n_best`
                )
        return [start + ids[:capacity] + end if ids else [] for ids in encoded]

    def _encode_prefixes(self, prefixes: Sequence[str] | None, count: int) -> list[list[int]]:
        """Return the token ids of each prefix, without EOS."""
        if prefixes is None:
            return [[]] * count
        encoded = self.tokenizers.target.encode([_well_formed(prefix) for prefix in prefixes])
        for line, ids in enumerate(encoded, 1):
            if len(ids) + 1 > self.max_sequence_length:
                raise UserError(
                    f"the prefix of line {line} has {len(ids)} tokens; with the next one that is more than the "
                    f"{self.max_sequence_length} positions of the model"
                )
        return encoded

    def _hypotheses(self, result: SearchResult) -> list[Hypothesis]:
        """Return the hypotheses of one sentence as text."""
        ranks = np.flatnonzero(np.isfinite(result.scores)).tolist() or [0]
        ids = [result.tokens[rank, : result.lengths[rank]].tolist() for rank in ranks]
        # Line breaks are replaced because readers of the output count lines.
        texts = [text.replace("\n", " ").replace("\r", " ") for text in self.tokenizers.target.decode(ids)]
        numbers = [column[ranks].tolist() for column in (result.scores, result.log_probs, result.lengths)]
        return [Hypothesis(*fields) for fields in zip(texts, *numbers, map(tuple, ids), strict=True)]


def _well_formed(text: str) -> str:
    """Return the text with U+FFFD in place of lone surrogates, which UTF-8 cannot encode; "" if it is only spaces."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if text.strip() else ""


def _budget(decoding: DecodingConfig, prepared: Sequence[Params]) -> tuple[int, int]:
    """Return the number of source tokens per batch and the number of batches to search at the same time.

    On a CPU several loops of many small operations keep all cores busy. Small batches stay in the caches and wait less
    for their last sentence, unless weights that exceed the caches are read again for each batch's few greedy products.
    """
    if jax.default_backend() != "cpu":
        return decoding.batch_tokens, 1
    parts = [
        value for member in prepared for name, value in member.items() if not name.startswith(("encoder", "source_"))
    ]
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(parts))
    max_tokens = 1024 if decoding.beam_size == 1 and num_bytes > 100 * 10**6 else 512
    return min(decoding.batch_tokens, max_tokens), os.cpu_count() or 1


def padded_length(length: int) -> int:
    """Return a multiple of 8 up to 64, then one of four lengths per power of two, so that few shapes are compiled.

    >>> [padded_length(n) for n in (1, 8, 9, 64, 65, 200)]
    [8, 8, 16, 64, 80, 224]
    """
    if length <= 64:
        return -(-length // 8) * 8
    step = 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


def _longest_first(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the indices of the rows, longest row first."""
    return sorted(range(len(rows)), key=lambda index: -len(rows[index]))


def source_batches(
    rows: Sequence[Sequence[int]], batch_tokens: int, pad_id: int, max_length: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the indices and the padded ids of batches of non-empty rows of similar length, longest first.

    There is one shape per padded length; the last rows of an array may be padding.
    """
    groups: dict[int, list[int]] = {}
    for index in _longest_first(rows):
        if rows[index]:
            groups.setdefault(min(padded_length(len(rows[index])), max_length), []).append(index)
    for length, indices in groups.items():
        # A power of two, so that inputs of few lines have few shapes too.
        size = min(1 << (len(indices) - 1).bit_length(), max(1, batch_tokens // length))
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            yield chosen, pad([rows[index] for index in chosen], (size, length), pad_id)


def pair_batches(
    source_lengths: Sequence[int], target_lengths: Sequence[int], max_length: int, max_rows: Callable[[int, int], int]
) -> Iterator[tuple[list[int], tuple[int, int, int]]]:
    """Yield batches of pairs of similar lengths: the indices, and (number of rows, source length, target length).

    There is one shape per combination of padded lengths, for which `max_rows` returns how many pairs memory suffices.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, lengths in enumerate(zip(source_lengths, target_lengths, strict=True)):
        source, target = (min(padded_length(max(length, 1)), max_length) for length in lengths)
        groups.setdefault((source, target), []).append(index)
    for (source, target), indices in groups.items():
        num_rows = min(_MAX_PAIR_TOKENS // max(source, target), max_rows(source, target))
        size = max(1, min(num_rows, len(indices)))
        for start in range(0, len(indices), size):
            yield indices[start : start + size], (size, source, target)


def pad(rows: Sequence[Sequence[int]], shape: tuple[int, int], value: int) -> np.ndarray:
    """Return the rows as an int32 array of this shape, filled up with `value`."""
    padded = np.full(shape, value, np.int32)
    for row, ids in zip(padded, rows, strict=False):
        row[: len(ids)] = ids
    return padded
