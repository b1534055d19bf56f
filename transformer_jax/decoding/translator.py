"""Text in, text out: a trained run as a function on lists of sentences."""

import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, DecodingConfig, Sampling
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.batches import longest_first, pad, source_batches
from transformer_jax.decoding.decode import Member, Prepared, load_member, prepare, run_params, search
from transformer_jax.decoding.search import SearchResult, Watch
from transformer_jax.model.positional import longest_sequence
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.distributed import gather
from transformer_jax.types import Params, UserError


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

    def __init__(
        self, config: Config, params: Params, tokenizers: TokenizerPair, others: Sequence[Member] = ()
    ) -> None:
        """Takes what `load` reads.

        Raises:
            UserError: the tokenizers do not fit the models.
        """
        self.config, self.params, self.tokenizers, self._others = config, params, tokenizers, tuple(others)
        for member in self.members:
            tokenizers.check_fits(member.config)
        self._prepared: tuple[Params, tuple[Prepared, ...]] | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """The models of the ensemble, of which the first is the run's own; or that alone."""
        return Member(self.config.model, self.params, self.config.decoding.checkpoint), *self._others

    @classmethod
    def load(cls, run: str | Path, *, ensemble: Sequence[str | Path] = (), **decoding: Any) -> "Translator":
        """From a run folder. Keyword arguments replace fields of its `decoding` section: `beam_size=1`.

        With other runs as `ensemble`, the probability of each token is the mean of all runs'. Their sizes may differ,
        their tokenizers may not. Each has its own checkpoint, or the one that is asked for; the other settings are
        those of the first.

        Raises:
            UserError: no such run, checkpoint or field, or runs that cannot work together.
        """
        folder = RunDir(Path(run))
        config = folder.load_config()
        unknown = set(decoding) - {item.name for item in dataclasses.fields(DecodingConfig)}
        if unknown:
            raise UserError(f"DecodingConfig has no field {', '.join(sorted(unknown))}")
        config = dataclasses.replace(config, decoding=dataclasses.replace(config.decoding, **decoding))
        if isinstance(ensemble, str):
            raise UserError(f"ensemble is the string {ensemble!r:.80}; a list of runs is needed")
        tokenizers, checkpoint = TokenizerPair.load(folder.tokenizer), decoding.get("checkpoint")
        others = [load_member(other, folder.path, config, tokenizers, checkpoint) for other in ensemble]
        return cls(config, run_params(folder, config), tokenizers, others)

    def with_decoding(self, **fields: Any) -> "Translator":
        """The same models with other decoding settings; the checkpoint stays what was loaded."""
        decoding = dataclasses.replace(self.config.decoding, **fields)
        config = dataclasses.replace(self.config, decoding=decoding)
        return Translator(config, self.params, self.tokenizers, self._others)

    def translate(self, texts: Sequence[str], *, shared: bool = False) -> list[str]:
        """The best translation of each text, in the order of the texts; an empty line stays empty."""
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
        watch: Watch | None = None,
        progress: Callable[[int], None] = lambda count: None,
    ) -> list[list[Hypothesis]]:
        """The best translations of each text, best first: `n_best` of them where the search found so many.

        With `stopping` paper, one that came to no EOS within its limit stands behind those that did.

        Args:
            texts: one sentence each; an empty one stays empty.
            n_best: how many translations of each.
            prefixes: what each translation begins with. It is cut into tokens by itself and others follow, so it had
                better end where a word does. Scores count it.
            sampling: draw `n_best` translations from this, rather than search for the most probable; the most probable
                of them first, scored by their log-probability.
            seed: from 0 to 2^32 - 1. What is drawn for a text depends on it and on the place of the text, and on
                nothing else that is drawn.
            first_line: the place of the first of the texts: where texts come one by one, the number of those before.
            shared: all processes of a job call this with the same texts: each translates its share, all get the whole.
            watch: is told what each step of a search did, as in `explain`.
            progress: is told, each time that some are done, how many.

        Raises:
            UserError: n_best is more than the beam, the texts are one string, there are not as many prefixes, or one
                has more tokens than the model has positions for; or no such seed.
        """
        if isinstance(texts, str):
            raise UserError(f"texts is the string {texts!r:.80}; a list of strings is needed")
        if prefixes is not None:
            check_prefixes(prefixes, texts)
        beam_size = self.config.decoding.beam_size
        if n_best < 1 or (sampling is None and n_best > beam_size):
            most = "" if sampling else f" and at most decoding.beam_size {beam_size}"
            raise UserError(f"n_best is {n_best}; it must be at least 1{most}")
        if not 0 <= seed < 2**32:
            raise UserError(f"seed is {seed}; it must be from 0 to {2**32 - 1}")
        if watch is not None and sampling is not None:
            raise UserError("watch is told of a search; with sampling there is none")
        model, all_rows = self.config.model, self.encode(texts)
        starts = self._encode_prefixes(prefixes, len(texts))
        mine = set(_share(all_rows) if shared else range(len(all_rows)))
        rows = [row if index in mine else [] for index, row in enumerate(all_rows)]
        results = [[Hypothesis("", 0.0, 0.0, 0)] for _ in texts]
        unnamed_ids = range(self.tokenizers.target.vocab_size, model.vocab_size)
        forbidden_ids = (*self.config.decoding.forbidden_ids, *unnamed_ids)
        room, prepared = self.room, self._prepare()
        budget, workers = _budget(self.config.decoding, prepared)
        if sampling is not None:  # each draw is a row
            budget //= n_best
        models = tuple(Transformer(member.config) for member in self.members)
        # The limit counts the source's words and EOS, whatever the model reads: EOS always, BOS never.
        uncounted = (not model.source_eos) - model.source_bos

        def find(batch: tuple[list[int], np.ndarray]) -> SearchResult:
            indices, src = batch
            lengths = np.zeros(len(src), np.int32)
            lengths[: len(indices)] = [len(rows[index]) + uncounted for index in indices]
            limits = np.where(lengths > 0, np.minimum(lengths + self.config.decoding.max_length_offset, room), 0)
            max_length = int(min(src.shape[1] + uncounted + self.config.decoding.max_length_offset, room))
            prefix, widest = None, max(len(starts[index]) for index in indices)
            if widest:  # in steps of 8, to share shapes; never cut, and followed by one token at least
                prefix = pad([starts[index] for index in indices], (len(src), -(-widest // 8) * 8), -1)
                limits = np.where(lengths > 0, np.maximum(limits, (prefix >= 0).sum(axis=1) + 1), 0)
                max_length = min(max(max_length, prefix.shape[1] + 1), room)
            result: SearchResult = jax.device_get(
                search(
                    prepared,
                    src,
                    limits.astype(np.int32),
                    model=models,
                    decoding=self.config.decoding,
                    max_length=max_length,
                    n_best=n_best,
                    forbidden_ids=forbidden_ids,
                    prefix=prefix,
                    sampling=sampling,
                    keys=None if sampling is None else _keys(seed, first_line, indices, len(src), n_best),
                    watch=watch,
                )
            )
            return result

        batches = list(source_batches(rows, budget, model.pad_id, room))
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

    def _prepare(self) -> tuple[Prepared, ...]:
        """The members' parameters laid out, once as long as those of the first stay the same."""
        if self._prepared is None or self._prepared[0] is not self.params:
            quantization = self.config.decoding.quantization
            laid_out = tuple(prepare(member.params, member.config, quantization) for member in self.members)
            self._prepared = self.params, laid_out
        return self._prepared[1]

    def encode(self, texts: Sequence[str], *, warn: bool = True) -> list[list[int]]:
        """Token ids as the model reads them, cut after `max_source`; nothing at all for an empty line.

        Args:
            texts: the lines.
            warn: of each line that is cut; not where that was said before.
        """
        model, decoding = self.config.model, self.config.decoding
        longest, reason = min((decoding.max_source, "decoding.max_source"), (self.room, "model.max_length"))
        start, end = [model.bos_id] * model.source_bos, [model.eos_id] * model.source_eos
        capacity = max(0, longest - len(start) - len(end))
        encoded = self.tokenizers.source.encode([_well_formed(text) if text.strip() else "" for text in texts])
        for line, ids in enumerate(encoded):
            if warn and len(ids) > capacity:
                warnings.warn(
                    f"line {line + 1} has {len(ids)} tokens; it is cut after {capacity} ({reason})",
                    stacklevel=4,
                )
        return [start + ids[:capacity] + end if ids else [] for ids in encoded]

    def _encode_prefixes(self, prefixes: Sequence[str] | None, count: int) -> list[list[int]]:
        """Token ids of each prefix, without EOS."""
        if prefixes is None:
            return [[]] * count
        texts = [_well_formed(prefix) if prefix.strip() else "" for prefix in prefixes]
        encoded = self.tokenizers.target.encode(texts)
        for line, ids in enumerate(encoded, 1):
            if len(ids) + 1 > self.room:
                raise UserError(
                    f"the prefix of line {line} has {len(ids)} tokens; with the next one that is more than the "
                    f"{self.room} positions of the model"
                )
        return encoded

    @property
    def room(self) -> int:
        """The longest sequence the models take: learned positions have an end."""
        return min(longest_sequence(member.config) for member in self.members)

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


def _keys(seed: int, first_line: int, indices: Sequence[int], count: int, n: int) -> jax.Array:
    """A random key for each of n draws of each of so many rows; row i is text `indices[i]`."""
    lines = np.zeros(count, np.uint32)
    lines[: len(indices)] = np.asarray(indices) + first_line
    each = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(each, (0, None))(each(jax.random.key(seed), lines), np.arange(n, dtype=np.uint32))


def check_prefixes(prefixes: Sequence[str], texts: Sequence[str]) -> None:
    """Raises UserError unless there is one for each text."""
    if isinstance(prefixes, str):
        raise UserError(f"prefixes is the string {prefixes!r:.80}; a list of strings is needed")
    if len(prefixes) != len(texts):
        raise UserError(f"{len(prefixes)} prefixes for {len(texts)} texts; each text needs one, which may be empty")


def _share(rows: Sequence[Sequence[int]]) -> list[int]:
    """The rows that this process translates: every n-th by length, so that all have about as much to do."""
    return longest_first(rows)[jax.process_index() :: jax.process_count()]


def _well_formed(text: str) -> str:
    """The text, with U+FFFD for half a surrogate pair, which no UTF-8 can hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _budget(decoding: DecodingConfig, prepared: Sequence[Prepared]) -> tuple[int, int]:
    """Source tokens of a batch, and how many batches are searched at the same time.

    On a CPU one loop of many small operations does not keep all cores busy, several do; and small batches stay in its
    caches and wait less for their last sentence. But if the weights are too many for the caches, each batch reads them
    again for the few products of a greedy step.
    """
    if jax.default_backend() != "cpu":
        return decoding.batch_tokens, 1
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves([member.decoder for member in prepared]))
    most = 1024 if decoding.beam_size == 1 and num_bytes > 100 * 10**6 else 512
    return min(decoding.batch_tokens, most), os.cpu_count() or 1
