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

from transformer_jax.config import Config, DecodingConfig
from transformer_jax.data.tokenizer import TokenizerPair
from transformer_jax.decoding.cached_search import Prepared, prepare, search
from transformer_jax.decoding.hypotheses import SearchResult
from transformer_jax.decoding.search import Watch
from transformer_jax.distributed import gather
from transformer_jax.errors import UserError
from transformer_jax.model.transformer import Transformer
from transformer_jax.run.checkpoint import load_params, resolve_checkpoint
from transformer_jax.run.folder import RunFolder
from transformer_jax.types import Params


class Hypothesis(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """What hypotheses are ranked by: log-probability / length penalty."""
    log_prob: float
    """log P(target | source), in nats."""
    num_tokens: int
    """Tokens, EOS counted."""
    token_ids: tuple[int, ...] = ()
    """The tokens, with EOS where it came to one."""


class Translator:
    """Translates with the parameters, the tokenizers and the decoding settings of a run.

    >>> translator = Translator.load("runs/numbers")                          # doctest: +SKIP
    >>> translator.translate(["twenty-one", ""])                              # doctest: +SKIP
    ['einundzwanzig', '']
    """

    def __init__(self, config: Config, params: Params, tokenizers: TokenizerPair) -> None:
        """Takes what `load` reads.

        Raises:
            UserError: the tokenizers do not fit the model.
        """
        tokenizers.check_fits(config.model)
        self.config, self.params, self.tokenizers = config, params, tokenizers
        self._model = Transformer(config.model)
        self._prepared: tuple[Params, Prepared] | None = None

    @classmethod
    def load(cls, run: str | Path, **decoding: Any) -> "Translator":
        """From a run folder. Keyword arguments replace fields of its `decoding` section: `beam_size=1`.

        Raises:
            UserError: no such run, checkpoint or field.
        """
        folder = RunFolder(Path(run))
        config = folder.load_config()
        unknown = set(decoding) - {item.name for item in dataclasses.fields(DecodingConfig)}
        if unknown:
            raise UserError(f"DecodingConfig has no field {', '.join(sorted(unknown))}")
        config = dataclasses.replace(config, decoding=dataclasses.replace(config.decoding, **decoding))
        checkpoint = resolve_checkpoint(folder, config.decoding.checkpoint, config.training.best_by)
        return cls(config, load_params(checkpoint, config.model), TokenizerPair.load(folder.tokenizer))

    def translate(self, texts: Sequence[str], *, shared: bool = False) -> list[str]:
        """The best translation of each text, in the order of the texts; an empty line stays empty."""
        return [hypotheses[0].text for hypotheses in self.translate_n_best(texts, 1, shared=shared)]

    def translate_n_best(
        self,
        texts: Sequence[str],
        n_best: int,
        *,
        shared: bool = False,
        watch: Watch | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> list[list[Hypothesis]]:
        """The best translations of each text, best first: `n_best` of them where the search found so many.

        With `stopping` paper, one that came to no EOS within its limit stands behind those that did. With `shared` all
        processes of a job call this with the same texts: each translates its share, and all get the whole. `watch` is
        told what each step of a search did, as in `explain`; `progress`, each time that some are done, how many.

        Raises:
            UserError: n_best is more than the beam, or the texts are one string.
        """
        if isinstance(texts, str):
            raise UserError(f"texts is the string {texts!r:.80}; a list of strings is needed")
        beam_size = self.config.decoding.beam_size
        if not 1 <= n_best <= beam_size:
            raise UserError(f"n_best is {n_best}; it must be at least 1 and at most decoding.beam_size {beam_size}")
        model, all_rows = self.config.model, self.encode(texts)
        mine = set(_share(all_rows) if shared else range(len(all_rows)))
        rows = [row if index in mine else [] for index, row in enumerate(all_rows)]
        results = [[Hypothesis("", 0.0, 0.0, 0)] for _ in texts]
        unnamed_ids = range(self.tokenizers.target.vocab_size, model.vocab_size)
        forbidden_ids = (*self.config.decoding.forbidden_ids, *unnamed_ids)
        room, prepared = self._room(), self._prepare()
        budget, workers = _budget(self.config.decoding, prepared)

        def find(batch: tuple[list[int], np.ndarray]) -> SearchResult:
            indices, src = batch
            lengths = np.zeros(len(src), np.int32)
            lengths[: len(indices)] = [len(rows[index]) + (not model.source_eos) for index in indices]
            limits = np.where(lengths > 0, np.minimum(lengths + self.config.decoding.max_extra, room), 0)
            result: SearchResult = jax.device_get(
                search(
                    prepared,
                    src,
                    limits.astype(np.int32),
                    model=self._model,
                    decoding=self.config.decoding,
                    max_length=int(min(src.shape[1] + (not model.source_eos) + self.config.decoding.max_extra, room)),
                    n_best=n_best,
                    forbidden_ids=forbidden_ids,
                    watch=watch,
                )
            )
            return result

        batches = list(_batches(rows, budget, model.pad_id, room))
        with ThreadPoolExecutor(workers) as pool:
            # One batch alone is searched here: a thread costs a single short sentence a tenth of its time.
            answers = pool.map(find, batches) if len(batches) > 1 else map(find, batches)
            try:
                for (indices, _), found in zip(batches, answers, strict=True):
                    for row, index in enumerate(indices):
                        results[index] = self._hypotheses(SearchResult(*(leaf[row] for leaf in found)))
                    progress(len(indices))
            except BaseException:
                pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the batches to come
                raise
        if shared:
            for found_there in gather([(index, results[index]) for index in mine]):
                for index, hypotheses in found_there:
                    results[index] = [Hypothesis(*one)._replace(token_ids=tuple(one[-1])) for one in hypotheses]
        return results

    def _prepare(self) -> Prepared:
        """The parameters laid out, once as long as they stay the same."""
        if self._prepared is None or self._prepared[0] is not self.params:
            self._prepared = self.params, prepare(self.params, self.config.model, self.config.decoding.weights)
        return self._prepared[1]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids as the model reads them, cut after `max_source`; nothing at all for an empty line."""
        model, decoding = self.config.model, self.config.decoding
        longest, reason = min((decoding.max_source, "decoding.max_source"), (self._room(), "model.max_length"))
        end = [model.eos_id] if model.source_eos else []
        encoded = self.tokenizers.source.encode([_well_formed(text) if text.strip() else "" for text in texts])
        for line, ids in enumerate(encoded):
            if len(ids) + len(end) > longest:
                warnings.warn(
                    f"line {line + 1} has {len(ids)} tokens; it is cut after {longest - len(end)} ({reason})",
                    stacklevel=4,
                )
        return [ids[: longest - len(end)] + end if ids else [] for ids in encoded]

    def _room(self) -> int:
        """The longest sequence the model takes: learned positions have an end."""
        model = self.config.model
        return model.max_length - model.position_offset if model.positions == "learned" else 1 << 30

    def _hypotheses(self, found: SearchResult) -> list[Hypothesis]:
        """The hypotheses of one sentence, as text."""
        places = [place for place in range(len(found.scores)) if np.isfinite(found.scores[place])] or [0]
        ids = [found.tokens[place, : found.lengths[place]].tolist() for place in places]
        texts = self.tokenizers.target.decode(ids)
        return [
            # A line break in a translation would be taken for two lines, by some readers a carriage return too.
            Hypothesis(
                text.replace("\n", " ").replace("\r", " "),
                float(found.scores[place]),
                float(found.log_probs[place]),
                int(found.lengths[place]),
                tuple(row),
            )
            for place, text, row in zip(places, texts, ids, strict=True)
        ]


def _share(rows: Sequence[Sequence[int]]) -> list[int]:
    """The rows that this process translates: every n-th by length, so that all have about as much to do."""
    return _longest_first(rows)[jax.process_index() :: jax.process_count()]


def _longest_first(rows: Sequence[Sequence[int]]) -> list[int]:
    return sorted(range(len(rows)), key=lambda index: -len(rows[index]))


def _well_formed(text: str) -> str:
    """The text, with U+FFFD for half a surrogate pair, which no UTF-8 can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _budget(decoding: DecodingConfig, prepared: Prepared) -> tuple[int, int]:
    """Source tokens of a batch, and how many batches are searched at the same time.

    On a CPU one loop of many small operations does not keep all cores busy, several do; and small batches stay in its
    caches and wait less for their last sentence. But if the weights are too many for the caches, each batch reads them
    again for the few products of a greedy step.
    """
    if jax.default_backend() != "cpu":
        return decoding.batch_tokens, 1
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(prepared.decoder))
    most = 1024 if decoding.beam_size == 1 and num_bytes > 100 * 10**6 else 512
    return min(decoding.batch_tokens, most), os.cpu_count() or 1


def padded_length(length: int) -> int:
    """The few lengths that sources are padded to: steps of 8 up to 64, then about a fifth more each time.

    >>> [padded_length(n) for n in (1, 8, 9, 64, 65, 200)]
    [8, 8, 16, 64, 80, 224]
    """
    if length <= 64:
        return -(-length // 8) * 8
    step = 1 << (length - 1).bit_length() - 3
    return -(-length // step) * step


def _batches(
    rows: Sequence[Sequence[int]], batch_tokens: int, pad_id: int, room: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """(which rows, their ids padded), longest first; one shape for each padded length, empty rows left out."""
    groups: dict[int, list[int]] = {}
    for index in _longest_first(rows):
        if rows[index]:
            groups.setdefault(min(padded_length(len(rows[index])), room), []).append(index)
    for length, indices in groups.items():
        # A power of two, so that small inputs share shapes too.
        size = min(_power_of_two(len(indices)), max(1, batch_tokens // length))
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            src = np.full((size, length), pad_id, np.int32)
            for row, index in enumerate(chosen):
                src[row, : len(rows[index])] = rows[index]
            yield chosen, src


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
