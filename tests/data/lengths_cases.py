"""Corpora of ids, and lengths of sentence pairs like those of real ones."""

import itertools

import numpy as np
from hypothesis import strategies as st

from transformer_jax.data.encoding import EncodedPairs


def corpus(source, target, source_eos=True, source_bos=False):
    """Return EncodedPairs of lists of ids."""

    def flat(rows):
        ids = np.array(list(itertools.chain.from_iterable(rows)), np.uint16)
        return ids, np.cumsum([0, *map(len, rows)])

    return EncodedPairs(*flat(source), *flat(target), source_eos=source_eos, source_bos=source_bos)


lengths = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=120).map(
    lambda pairs: tuple(np.array(pairs).T)
)


def random_lengths(number, seed=0, longest=256):
    """Return lengths like those of news text: a long tail, and sides of similar length."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.gamma(2.2, 12, number) + 2, 2, longest)
    target = np.clip(source * rng.lognormal(0.03, 0.15, number) + 1, 2, longest)
    return source.astype(int), target.astype(int)


def caption_lengths(number=29_000, seed=0):
    """Return lengths like those of Multi30k in byte pairs: mean 14.7 and deviation 4.4 (source), 14.8 and 4.9 (target),
    log-ratio of deviation 0.163; the means and deviations are counted from the corpus."""
    rng = np.random.default_rng(seed)
    source = 5.5 + rng.gamma(4.4, 2.1, number)
    target = source * rng.lognormal(-0.01, 0.163, number)
    return np.rint(source).clip(4, 46).astype(int), np.rint(target).clip(4, 52).astype(int)
