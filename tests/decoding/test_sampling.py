"""Sampled tokens against exact probabilities in NumPy, and against Hugging Face's logits warpers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from search_cases import EOS, PAD, UNK, Model, penalty, quick_jit, spec

from transformer_jax.config import Sampling
from transformer_jax.decoding.search import SearchResult, greedy_search, sample, sample_tokens
from transformer_jax.decoding.top_k import Constraints
from transformer_jax.types import UserError

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, top_k=4),
    Sampling(top_p=0.6),
    Sampling(temperature=1.5, top_k=6, top_p=0.7),
    Sampling(top_k=99, top_p=0.999),
]


def exact(log_probs: np.ndarray, sampling: Sampling, forbidden: tuple[int, ...]) -> np.ndarray:
    """Return the sampling probabilities, computed token by token from the definitions."""
    weights = np.exp(log_probs / sampling.temperature)
    weights[list(forbidden)] = 0
    order = [token for token in np.argsort(-weights, kind="stable") if weights[token] > 0]
    order = order[: sampling.top_k or None]
    total, kept, reached = weights[order].sum(), [], 0.0
    for token in order:
        kept.append(token)
        reached += weights[token] / total
        if reached >= sampling.top_p:
            break
    probs = np.zeros_like(weights)
    probs[kept] = weights[kept] / weights[kept].sum()
    return probs


def among(v: int, *ids: int) -> jax.Array:
    """Return a mask of these ids over a vocabulary of v tokens."""
    return jnp.isin(jnp.arange(v), jnp.array(ids, jnp.int32))


def keys(seed: int, *shape: int) -> jax.Array:
    return jax.random.split(jax.random.key(seed), shape)


@pytest.mark.parametrize(
    ("sampling", "renormalize_logits"), [*((one, False) for one in SAMPLINGS), (SAMPLINGS[4], True)], ids=str
)
def test_sample_frequencies_equal_the_probabilities(sampling, renormalize_logits):
    """In 5,000 samples, tokens of probability 0 never occur and the others pass a chi-square test (p > 1e-4)."""
    logits = np.random.default_rng(1).normal(0, 1.5, 12)
    count, forbidden = 5_000, (PAD, 5)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, 12))
    constraints = Constraints(among(12, 5), PAD, renormalize_logits)
    draw = jax.jit(lambda keys: sample_tokens(rows, keys, sampling, constraints))
    log_probs, drawn = jax.device_get(draw(keys(0, count)))
    model_log_probs = logits - np.log(np.exp(np.delete(logits, 5) if renormalize_logits else logits).sum())
    np.testing.assert_allclose(log_probs, model_log_probs[drawn], rtol=1e-4)
    expected = exact(logits, sampling, forbidden) * count
    found = np.bincount(drawn, minlength=12)
    assert found[expected == 0].sum() == 0
    possible = expected > 0
    statistic = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    # The 99.99 % point of chi-square, by Wilson and Hilferty.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("sampling", SAMPLINGS[1:], ids=str)
def test_sampling_support_equals_hugging_face_warpers(sampling):
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(2).normal(0, 2, (40, 30)).astype(np.float32)
    logits[:, PAD] = -1e4  # padding is never sampled
    scores = process.TemperatureLogitsWarper(sampling.temperature)(None, torch.tensor(logits))
    if sampling.top_k:
        scores = process.TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = process.TopPLogitsWarper(sampling.top_p)(None, scores)
    expected = torch.softmax(scores, dim=-1).numpy()
    ours = np.stack([exact(row.astype(float), sampling, ()) for row in logits])
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
    # `sample_tokens` itself draws only tokens of nonzero probability.
    count = 100
    rows = jnp.repeat(jnp.asarray(logits), count, axis=0)
    drawn = jax.jit(lambda keys: sample_tokens(rows, keys, sampling, Constraints(among(30), PAD))[1])(
        keys(1, 40 * count)
    )
    assert np.all(expected[np.repeat(np.arange(40), count), drawn] > 0)


def test_impossible_and_forced_tokens():
    logits = jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [-jnp.inf] * 3])
    forced = jnp.array([2, -1, -1])
    for renormalize_logits in (False, True):  # the forced token keeps its probability among all tokens
        constraints = Constraints(among(3, 1, 2), 0, renormalize_logits, forced)
        log_probs, drawn = sample_tokens(logits, keys(0, 3), Sampling(), constraints)
        assert drawn[0] == 2
        assert log_probs[0] == pytest.approx(3 - math.log(math.e + math.e**2 + math.e**3), rel=1e-5)
        assert log_probs[1] == log_probs[2] == -jnp.inf
    for temperature in (1e-6, 1e6):
        values = jnp.array([[-90.0, -30.0, -60.0, 90.0]])
        sampling = Sampling(temperature=temperature, top_k=2)
        log_probs, drawn = sample_tokens(values, keys(0, 1), sampling, Constraints(among(4), 3))
        assert np.isfinite(log_probs).all()
        assert drawn[0] in (1, 2)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0; it must be at least 1e-6"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
    ],
)
def test_invalid_sampling_settings_are_rejected(wrong, message):
    with pytest.raises(UserError, match=message):
        Sampling(**wrong)


# -------------------------------------------------------------------------------------------------- complete sentences


def draws(model, sentences, limits, width, row_keys, sampling=Sampling(), **options) -> SearchResult:  # noqa: B008  frozen
    """`sample`, jitted, as NumPy arrays."""

    @quick_jit
    def run(state, limits, row_keys):
        return sample(model.step, state, spec(limits, width, **options), sampling, row_keys)

    state = model.state(sentences, row_keys.shape[1])
    return jax.tree.map(np.asarray, run(state, jnp.asarray(limits), row_keys))


def test_samples_are_scored_by_the_model_and_sorted_by_score():
    model = Model(9, 1.0)
    result = draws(model, [3, 4], [6, 0], 6, keys(0, 2, 50), Sampling(temperature=1.3, top_k=5), forbidden_ids=(UNK,))
    assert np.all(np.diff(result.scores[0]) <= 0)
    for place in range(50):
        tokens = result.tokens[0, place, : result.lengths[0, place]].tolist()
        assert len(tokens) == 6 or tokens[-1] == EOS
        assert not {PAD, UNK} & set(tokens)
        total = sum(model.log_probs(3, tokens[:i])[token] for i, token in enumerate(tokens))
        assert result.log_probs[0, place] == pytest.approx(total, rel=1e-5)
        assert result.scores[0, place] == pytest.approx(total / penalty("gnmt", len(tokens), 0.6), rel=1e-5)
    assert len({tuple(tokens) for tokens in result.tokens[0].tolist()}) > 20
    assert not result.lengths[1].any()


def test_samples_have_min_length_tokens_before_eos():
    """EOS is probable here: without the setting most samples are shorter."""
    model = Model(9, 3.0)
    free, longer = (draws(model, [3], [6], 6, keys(0, 1, 50), min_length=length) for length in (0, 3))
    assert free.lengths.min() == 1
    assert longer.lengths.min() == 4
    assert not np.any(longer.tokens[0, :, :3] == EOS)


def test_sentence_frequencies_equal_their_probabilities():
    """Frequencies of sentences of two tokens equal the products of their token probabilities."""
    model, count = Model(6), 10_000
    result = draws(model, [1], [2], 2, keys(4, 1, count))
    found = {}
    for tokens in result.tokens[0].tolist():
        found[tuple(tokens)] = found.get(tuple(tokens), 0) + 1
    expected = {}
    first = exact(np.array(model.log_probs(1, ())), Sampling(), (PAD,))
    for token in range(1, 6):
        if token == EOS:
            expected[(EOS, PAD)] = first[EOS]
            continue
        second = exact(np.array(model.log_probs(1, (token,))), Sampling(), (PAD,))
        expected |= {(token, other): first[token] * second[other] for other in range(1, 6)}
    assert set(found) <= set(expected)
    statistic = sum((found.get(one, 0) - p * count) ** 2 / (p * count) for one, p in expected.items())
    assert statistic < 50  # 20 degrees of freedom: p < 0.0003


def test_each_sample_depends_only_on_its_own_key():
    model, row_keys = Model(12, 0.5), keys(7, 5, 3)
    together = draws(model, range(5), [3, 9, 9, 1, 9], 9, row_keys)
    for row, limit in enumerate((3, 9, 9, 1, 9)):
        alone = draws(model, [row], [limit], 9, row_keys[row : row + 1])
        jax.tree.map(lambda one, all_: np.testing.assert_array_equal(one[0], all_[row]), alone, together)  # noqa: B023  called at once
    other = draws(model, range(5), [9] * 5, 9, keys(8, 5, 3))
    assert np.any(other.tokens[1:3] != together.tokens[1:3])


def test_top_1_sampling_equals_greedy_search_and_samples_start_with_the_prefix():
    model, limits = Model(9, 0.5), jnp.array([7] * 10)
    search = quick_jit(lambda state: greedy_search(model.step, state, spec(limits, 7)))
    expected = jax.device_get(search(model.state(range(10))))
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)):
        found = draws(model, range(10), limits, 7, keys(0, 10, 1), sampling)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-5)
    prefix = jnp.array([[5, 6], [7, -1]] * 5)
    found = draws(model, range(10), limits, 7, keys(0, 10, 4), prefix=prefix)
    assert np.all(found.tokens[::2, :, :2] == [5, 6])
    assert np.all(found.tokens[1::2, :, 0] == 7)
    assert len(np.unique(found.tokens[1::2, :, 1])) > 3
