"""A corpus as token ids: filtered, flat, cached on disk and memory-mapped."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from transformer_jax.config import Config, DataConfig, ModelConfig
from transformer_jax.data.pairs import Pairs, Split
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.runtime.files import FolderInUseError, atomic_dir, file_sha256, read_json
from transformer_jax.types import UserError

_FORMAT = 2  # of the cache; count up when the files or the filter change
_ARRAYS = ("source_ids", "source_offsets", "target_ids", "target_offsets")


@dataclass(frozen=True)
class FilterReport:
    """Number of pairs in a split, and number of pairs that each filter removed. Each pair is counted once."""

    pairs: int
    empty: int
    long: int
    length_ratio: int
    max_length: int
    max_length_ratio: float

    @property
    def kept(self) -> int:
        """Number of pairs that are used."""
        return self.pairs - self.empty - self.long - self.length_ratio

    def __str__(self) -> str:
        return (
            f"{self.pairs} pairs: {self.kept} kept, {self.empty} empty, {self.long} longer than {self.max_length} "
            f"tokens, {self.length_ratio} of a length ratio above {self.max_length_ratio:g}"
        )


@dataclass(frozen=True)
class EncodedPairs:
    """Sentence pairs as ids (uint16 or int32) without special tokens.

    Source sentence i is source_ids[source_offsets[i] : source_offsets[i + 1]]. `source_eos` and `source_bos`: whether
    batches add EOS and BOS to it. `report` says what the filter left out; None if nothing is filtered.
    """

    source_ids: np.ndarray
    source_offsets: np.ndarray
    target_ids: np.ndarray
    target_offsets: np.ndarray
    source_eos: bool
    source_bos: bool = False
    report: FilterReport | None = None

    def __len__(self) -> int:
        return len(self.source_offsets) - 1

    def sha256(self) -> str:
        """Return a digest of all token ids and lengths, the data that determine training."""
        digest = hashlib.sha256()
        for name in _ARRAYS:
            digest.update(np.ascontiguousarray(getattr(self, name)).data)
        return digest.hexdigest()

    def source(self, index: int) -> np.ndarray:
        """Return the ids of source sentence `index`."""
        return self.source_ids[self.source_offsets[index] : self.source_offsets[index + 1]]

    def target(self, index: int) -> np.ndarray:
        """Return the ids of target sentence `index`."""
        return self.target_ids[self.target_offsets[index] : self.target_offsets[index + 1]]

    @property
    def source_lengths(self) -> np.ndarray:
        """Number of tokens in each source sentence, int64, with the BOS and EOS that batches add."""
        return np.diff(self.source_offsets) + self.source_bos + self.source_eos

    @property
    def target_lengths(self) -> np.ndarray:
        """Number of tokens in each target sentence, int64, EOS included."""
        return np.diff(self.target_offsets) + 1


def encode_pairs(
    pairs: Pairs, tokenizers: TokenizerPair, model: ModelConfig, keep: DataConfig | None = None
) -> EncodedPairs:
    """Encode pairs as token ids. `keep` filters training pairs; None keeps every pair.

    A pair is left out if a side is empty or white space, if a side is longer than `keep.max_length` with its BOS and
    EOS, or if one side has more than `keep.max_length_ratio` times the tokens of the other.
    """
    tokenizers.check_fits(model)
    sides = tokenizers.source, tokenizers.target
    types = [np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32 for tokenizer in sides]
    ids = [[np.zeros(0, dtype)] for dtype in types]
    lengths = [np.zeros((2, 1), np.int64)]  # so that the first offset is 0
    added = np.array([[model.source_bos + model.source_eos], [1]])
    dropped = np.zeros(4, int)
    for texts in pairs.chunks():
        rows = [tokenizer.encode(side) for tokenizer, side in zip(sides, texts, strict=True)]
        counts = np.array([[len(row) for row in side] for side in rows], np.int64)
        reasons = _filter(texts, counts + added, keep)
        dropped += np.bincount(reasons, minlength=4)
        kept = reasons == 0
        for chunks, side, dtype in zip(ids, rows, types, strict=True):
            chunks.append(np.fromiter(itertools.chain.from_iterable(itertools.compress(side, kept)), dtype))
        lengths.append(counts[:, kept])
    report = None
    if keep is not None:
        _, empty, long, length_ratio = dropped.tolist()
        report = FilterReport(len(pairs), empty, long, length_ratio, keep.max_length, keep.max_length_ratio)
        if not report.kept:
            raise UserError(
                f"{pairs.origin}: no pair is left for training: {report}. Check the files, or raise data.max_length "
                "and data.max_length_ratio"
            )
    source, target = map(np.concatenate, ids)
    offsets = np.cumsum(np.concatenate(lengths, axis=1), axis=1)
    return EncodedPairs(source, offsets[0], target, offsets[1], model.source_eos, model.source_bos, report)


def _filter(texts: tuple[Sequence[str], Sequence[str]], lengths: np.ndarray, keep: DataConfig | None) -> np.ndarray:
    """Return for each pair 0, or the position of the filter in `FilterReport` that removes it: empty, long, ratio."""
    if keep is None:
        return np.zeros(lengths.shape[1], int)
    blank = [not source.strip() or not target.strip() for source, target in zip(*texts, strict=True)]
    longer, shorter = lengths.max(0), lengths.min(0)
    return np.select([blank, longer > keep.max_length, longer > keep.max_length_ratio * shorter], [1, 2, 3])


def load_or_encode(
    config: Config, split: Split, tokenizers: TokenizerPair, cache_directory: Path, pairs: Pairs
) -> EncodedPairs:
    """Encode a split with `encode_pairs`, or load it from the cache. The training split is filtered.

    Its folder is named after everything that decides its content: an outdated folder is not found, a damaged one is
    written again. The arrays are memory-mapped.
    """
    keep = config.data if split == "train" else None
    directory = cache_directory / f"{split}-{_fingerprint(pairs, tokenizers, config.model, keep)[:16]}"
    cached = _load(directory, config.model)
    if cached is not None:
        return cached
    encoded = encode_pairs(pairs, tokenizers, config.model, keep)
    _save(encoded, directory)
    return _load(directory, config.model) or encoded


def load_cached(cache_directory: Path, split: Split, sha256: str, model: ModelConfig) -> EncodedPairs | None:
    """Return the cached split whose ids have this `EncodedPairs.sha256`, or None. The text is not needed."""
    cached = (_load(directory, model) for directory in sorted(cache_directory.glob(f"{split}-*")))
    return next((pairs for pairs in cached if pairs is not None and pairs.sha256() == sha256), None)


def _fingerprint(pairs: Pairs, tokenizers: TokenizerPair, model: ModelConfig, keep: DataConfig | None) -> str:
    policy = None if keep is None else (keep.max_length, keep.max_length_ratio)
    added = (model.source_eos, "bos") if model.source_bos else (model.source_eos,)
    digest = hashlib.sha256(json.dumps([_FORMAT, len(pairs), policy, *added]).encode())
    for tokenizer in (tokenizers.source, tokenizers.target):
        digest.update(tokenizer.to_json().encode())
    for texts in pairs.chunks():
        for side in texts:
            digest.update(("\n".join(side) + "\n").encode())
    return digest.hexdigest()


def _save(encoded: EncodedPairs, directory: Path) -> None:
    """Write the arrays and their manifest. Another process that is writing the same folder writes the same arrays."""
    with suppress(FolderInUseError), atomic_dir(directory, replace=True) as unfinished:
        for name in _ARRAYS:
            np.save(unfinished / f"{name}.npy", getattr(encoded, name))
        manifest = {
            "report": encoded.report and asdict(encoded.report),
            "sha256": {name: file_sha256(unfinished / f"{name}.npy") for name in _ARRAYS},
        }
        (unfinished / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _load(directory: Path, model: ModelConfig) -> EncodedPairs | None:
    """Memory-map a folder's arrays. Return None if the folder is missing, truncated or damaged."""
    try:
        manifest = read_json(directory / "manifest.json")
        arrays = {}
        for name in _ARRAYS:
            path = directory / f"{name}.npy"
            if file_sha256(path) != manifest["sha256"][name]:
                return None
            arrays[name] = np.load(path, mmap_mode="r", allow_pickle=False)
        report = manifest["report"] and FilterReport(**manifest["report"])
        return EncodedPairs(**arrays, source_eos=model.source_eos, source_bos=model.source_bos, report=report)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
