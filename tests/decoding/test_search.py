"""Greedy and beam search against enumeration and plain loops, with models that depend on the complete prefix."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from search_cases import (
    EOS,
    PAD,
    PENALTIES,
    REFERENCES,
    START,
    STOPPINGS,
    UNK,
    Model,
    beams,
    check,
    enumerate_all,
    penalty,
    quick_jit,
    reference_paper,
    spec,
)

from transformer_jax.decoding.beam_search import STOPPING_RULES, reorder_rows
from transformer_jax.decoding.search import SearchResult, greedy_search


@pytest.mark.parametrize(("kind", "alpha"), PENALTIES)
@pytest.mark.parametrize(("v", "limit", "k"), [(4, 2, 4), (4, 3, 16), (5, 3, 25)])
def test_wide_beam_equals_enumeration(v, limit, k, kind, alpha):
    """With k = V and k = V^(L-1), no hypothesis is dropped. Compare the n best and scores, truncated ones included."""
    model = Model(v)
    sentences = range(5)
    lists = [enumerate_all(model, sentence, limit, kind, alpha) for sentence in sentences]
    n = min(k, len(lists[0]))
    result = beams(model, sentences, [limit] * 5, k=k, n_best=n, length_penalty=kind, alpha=alpha)
    for row, expected in enumerate(lists):
        check(result, row, expected[:n], limit)


def test_forbidden_ids_are_never_generated():
    model = Model(6)
    result = beams(model, [3], [3], k=36, n_best=7, forbidden_ids=(4, 5))
    check(result, 0, enumerate_all(model, 3, 3, "gnmt", 0.6, forbidden=(PAD, 4, 5))[:7], 3)


@pytest.mark.parametrize("stopping", STOPPINGS)
@pytest.mark.parametrize(
    ("k", "n", "eos_bonus", "kind", "alpha"),
    [
        (1, 1, 1.0, "gnmt", 0.6),
        (3, 1, 3.0, "none", 0.6),
        (3, 3, 2.0, "power", 1.0),
        (3, 2, 2.0, "gnmt", 0.0),
        (4, 1, 2.5, "power", 2.0),
        (5, 5, 0.0, "gnmt", 1.5),
    ],
)
def test_stopping_rules_equal_plain_loops(stopping, kind, alpha, k, n, eos_bonus):
    """Each sentence of a batch with different limits equals the loop over that sentence alone."""
    model = Model(13, eos_bonus)
    sentences = list(range(100, 132))
    limits = [1 + i % 9 for i in range(32)]
    options = {"stopping": stopping, "length_penalty": kind, "alpha": alpha, "forbidden_ids": (UNK,)}
    result = beams(model, sentences, limits, k=k, n_best=n, width=11, **options)
    for row, (sentence, limit) in enumerate(zip(sentences, limits, strict=True)):
        check(result, row, REFERENCES[stopping](model, sentence, limit, k, n, kind, alpha)[:n], 11)


@pytest.mark.parametrize("min_length", [1, 3])
def test_wide_beam_with_min_length_equals_enumeration(min_length):
    """EOS is preceded by at least `min_length` tokens, and no other hypothesis is missed."""
    lists = [enumerate_all(Model(5), row, 4, "gnmt", 0.6, min_length=min_length) for row in range(5)]
    result = beams(Model(5), range(5), [4] * 5, k=125, n_best=5, min_length=min_length)
    for row, expected in enumerate(lists):
        check(result, row, expected[:5], 4)


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_stopping_rules_with_min_length_equal_plain_loops(stopping):
    """A limit below `min_length` truncates the hypothesis without EOS."""
    model, k, n = Model(13, 3.0), 3, 2
    limits = [1 + i % 9 for i in range(32)]
    options = {"stopping": stopping, "length_penalty": "power", "alpha": 1.0, "forbidden_ids": (UNK,)}
    result = beams(model, range(32), limits, k=k, n_best=n, width=9, min_length=2, **options)
    for row, limit in enumerate(limits):
        expected = REFERENCES[stopping](model, row, limit, k, n, "power", 1.0, min_length=2)[:n]
        check(result, row, expected, 9)
    free = beams(model, range(32), limits, k=k, n_best=n, width=9, **options)
    assert np.any(free.tokens != result.tokens)


def test_stopping_rules_give_different_results():
    """Guard the comparison with plain loops, which would prove little if all rules gave equal results."""
    model = Model(12, 2.0)
    results = [
        beams(model, range(60), [12] * 60, k=3, n_best=3, stopping=stopping, length_penalty="power", alpha=1.0)
        for stopping in STOPPINGS
    ]
    for one, other in itertools.combinations(results, 2):
        assert np.any(one.tokens != other.tokens)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.6, 2.0])
@pytest.mark.parametrize("n", [1, 4])
def test_paper_rule_stops_early_without_changing_the_result(monkeypatch, alpha, n):
    model = Model(12, 2.5)
    options = {"k": 4, "n_best": n, "alpha": alpha, "width": 40}
    early = beams(model, range(20), [40] * 20, **options)
    jax.effects_barrier()
    early_steps = model.steps

    # A rule that never stops, with another model, because the function of the first model is compiled.
    def never(beam, length, spec):
        return jnp.zeros_like(spec.limits, bool)

    monkeypatch.setitem(STOPPING_RULES, "paper", STOPPING_RULES["paper"]._replace(is_done=never))
    model = Model(12, 2.5)
    full = beams(model, range(20), [40] * 20, **options)
    jax.effects_barrier()
    assert model.steps == 40
    # With a large alpha a long hypothesis gains so much that little can be ruled out early.
    assert alpha > 0.6 or early_steps < 20
    jax.tree.map(np.testing.assert_array_equal, early, full)


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_beam_search_result_does_not_depend_on_the_batch(stopping):
    model = Model(12, 1.5)
    sentences, limits = list(range(8)), [3, 15, 1, 8, 15, 6, 15, 2]
    together = beams(model, sentences, limits, k=3, n_best=2, width=15, stopping=stopping)
    for row, (sentence, limit) in enumerate(zip(sentences, limits, strict=True)):
        alone = beams(model, [sentence], [limit], k=3, n_best=2, width=15, stopping=stopping)
        jax.tree.map(lambda one, all_: np.testing.assert_array_equal(one[0], all_[row]), alone, together)  # noqa: B023  called at once


def test_length_limits_hold_per_sentence():
    """EOS is rare, so hypotheses are truncated at the limit of their sentence. The width fits the longest."""
    result = beams(Model(9, -30.0), range(4), [1, 4, 0, 99], k=2, width=6)
    assert result.lengths[:, 0].tolist() == [1, 4, 0, 6]
    assert not np.any(result.tokens == EOS)
    assert ((result.tokens != PAD).sum(axis=-1) == result.lengths).all()
    assert result.scores[2, 0] == 0  # the empty hypothesis
    np.testing.assert_allclose(result.scores[3], result.log_probs[3] / penalty("gnmt", 6, 0.6), rtol=1e-6)


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_padding_follows_eos(stopping):
    result = beams(Model(9, 2.0), range(30), [9] * 30, k=4, n_best=4, stopping=stopping)
    for tokens, length in zip(result.tokens.reshape(-1, 9), result.lengths.reshape(-1), strict=True):
        assert not np.any(tokens[:length] == PAD)
        assert np.all(tokens[length:] == PAD)
        assert not np.any(tokens[: length - 1] == EOS)
    assert len(np.unique(result.lengths)) > 2
    assert np.all(np.diff(result.scores, axis=1) <= 0)


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_ties_are_resolved_by_beam_then_id(stopping):
    """All tokens have equal probability, so the lowest ids win at each step."""

    def step(tokens, state):
        return jnp.zeros((tokens.shape[0], 6)), state

    model = Model(6)
    model.step = step
    result = beams(model, [0], [2], k=3, n_best=3, stopping=stopping, alpha=0.0)
    assert (
        result.tokens[0].tolist()
        == {
            "paper": [[EOS, PAD], [2, EOS], [3, EOS]],
            "huggingface": [[EOS, PAD], [2, EOS], [2, 2]],
            "ctranslate2": [[EOS, PAD], [2, EOS], [2, 2]],
        }[stopping]
    )


def test_beam_search_compiles_once_per_shape():
    model = Model(9)
    beams(model, [1, 2], [7, 3], k=3, width=7)
    traces = model.traces
    beams(model, [3, 4], [1, 5], k=3, width=7)
    assert model.traces == traces
    beams(model, [3, 4, 5], [1, 5, 2], k=3, width=7)
    assert model.traces > traces


def test_state_is_reordered_by_the_callers_function():
    """The given function is called with k rows per sentence, all from that sentence."""
    seen = []

    def reorder(state, rows):
        jax.debug.callback(lambda rows: seen.append(np.asarray(rows)), rows)
        return reorder_rows(state, rows)

    model = Model(12)
    given = beams(model, range(3), [5] * 3, k=4, reorder_fn=reorder)
    jax.effects_barrier()
    jax.tree.map(np.testing.assert_array_equal, given, beams(model, range(3), [5] * 3, k=4))
    assert all((rows.reshape(3, 4) // 4 == np.arange(3)[:, None]).all() for rows in seen)
    assert any((rows != np.arange(12)).any() for rows in seen)


def test_invalid_beam_search_arguments_are_rejected():
    with pytest.raises(ValueError, match=r"n_best=3 is out of range for beam_size=2\. Set n_best"):
        beams(Model(5), [0], [2], k=2, n_best=3)
    with pytest.raises(Exception, match="never"):
        beams(Model(5), [0], [2], k=2, stopping="never")


# ----------------------------------------------------------------------------------------------------------- prefixes


def prefixed(model, sentences, limits, prefixes, **options) -> SearchResult:
    """Run the jitted `beam_search` with prefixes, and return NumPy arrays."""
    width = max(map(len, prefixes))
    rows = tuple((*prefix, *[-1] * (width - len(prefix))) for prefix in prefixes)
    return beams(model, sentences, limits, prefix=rows, **options)


@pytest.mark.parametrize(("kind", "alpha"), PENALTIES)
def test_wide_beam_with_prefix_equals_enumeration(kind, alpha):
    """One batch has prefixes of several lengths, an empty prefix, and an improbable prefix."""
    model = Model(5)
    prefixes = [(), (4,), (2, 3), (3, 4, 2), (4, 4)]
    worst = int(np.argmin(model.log_probs(0, ())[1:]) + 1)
    prefixes[1] = (worst,) if worst != EOS else (4,)
    result = prefixed(model, range(5), [4] * 5, prefixes, k=125, n_best=3, length_penalty=kind, alpha=alpha)
    for row, prefix in enumerate(prefixes):
        check(result, row, enumerate_all(model, row, 4, kind, alpha, prefix=prefix)[:3], 4)


@pytest.mark.parametrize("stopping", STOPPINGS)
@pytest.mark.parametrize(("k", "n", "kind", "alpha"), [(1, 1, "gnmt", 0.6), (3, 2, "power", 1.0), (4, 4, "none", 0.6)])
def test_stopping_rules_with_prefixes_equal_plain_loops(stopping, k, n, kind, alpha):
    """One batch has an empty prefix, short ones, one with forbidden ids, and one as long as the limit."""
    model = Model(13, 1.5)
    sentences, limits = list(range(12)), [9, 9, 9, 4] * 3
    prefixes = [(), (5, 7), (UNK,), (8, 4, 4, 9)] * 3
    options = {"stopping": stopping, "length_penalty": kind, "alpha": alpha, "forbidden_ids": (UNK,)}
    result = prefixed(model, sentences, limits, prefixes, k=k, n_best=n, **options)
    for row, (sentence, limit, prefix) in enumerate(zip(sentences, limits, prefixes, strict=True)):
        expected = REFERENCES[stopping](model, sentence, limit, k, n, kind, alpha, prefix=prefix)[:n]
        if len(expected) == n:
            check(result, row, expected, 9)
        else:  # a prefix up to the limit leaves one hypothesis and empties the other slots
            assert prefix == (8, 4, 4, 9)
            assert result.tokens[row, 0, :4].tolist() == expected[0][1]
            assert np.all(result.scores[row, len(expected) :] == -np.inf)


@pytest.mark.parametrize("renormalize_logits", [False, True])
def test_prefix_may_contain_forbidden_ids(renormalize_logits):
    model = Model(9)
    result = prefixed(model, [3], [6], [(UNK, 5)], k=2, forbidden_ids=(UNK,), renormalize_logits=renormalize_logits)
    assert result.tokens[0, 0, :2].tolist() == [UNK, 5]
    assert UNK not in result.tokens[0, 0, 2:]
    total = 0.0
    for place, token in enumerate(result.tokens[0, 0, : result.lengths[0, 0]].tolist()):
        log_probs = model.log_probs(3, result.tokens[0, 0, :place].tolist())
        # Forced tokens keep the model's probabilities. Later tokens exclude the forbidden ids.
        total += log_probs[token] - (np.log1p(-np.exp(log_probs[UNK])) if renormalize_logits and place >= 2 else 0)
    assert result.log_probs[0, 0] == pytest.approx(total, rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- greedy


def greedy(model, sentences, limits, width, **options) -> SearchResult:
    """Run the jitted `greedy_search`, and return NumPy arrays."""

    @quick_jit
    def run(state, limits):
        return greedy_search(model.step, state, spec(limits, width, **options))

    return jax.tree.map(np.asarray, run(model.state(sentences), jnp.asarray(limits)))


@pytest.mark.parametrize(
    ("forbidden", "prefix", "min_length"), [((), (), 0), ((3, 4), (), 2), ((3, 4), (4, 6), 0), ((), (4,), 3)]
)
def test_greedy_search_equals_an_argmax_loop(forbidden, prefix, min_length):
    model = Model(9, 0.5)
    limits = [i % 8 for i in range(24)]
    begins = jnp.array([prefix] * 24, jnp.int32) if prefix else None
    result = greedy(model, range(24), limits, 7, forbidden_ids=forbidden, prefix=begins, min_length=min_length)
    ended = 0
    for sentence, limit in enumerate(limits):
        tokens, total = [], 0.0
        while len(tokens) < limit and EOS not in tokens:
            log_probs = np.array(model.log_probs(sentence, tokens))
            if len(tokens) < len(prefix):
                tokens.append(prefix[len(tokens)])
            else:
                log_probs[[PAD, *forbidden, *([EOS] if len(tokens) < min_length else [])]] = -np.inf
                tokens.append(int(np.argmax(log_probs)))
            total += log_probs[tokens[-1]]
        check(result, sentence, [(total / penalty("gnmt", max(len(tokens), 1), 0.6), tokens, total)], 7)
        ended += EOS in tokens
    assert 4 < ended < 20  # both ways to stop occurred


def test_greedy_stops_when_all_sentences_are_done():
    model = Model(9, 4.0)
    result = greedy(model, range(10), [50] * 10, 50)
    jax.effects_barrier()
    assert model.steps == result.lengths.max() < 20


# ------------------------------------------------------------------------------------------------------------ numbers


def test_float64_stays_float64():
    with jax.enable_x64(True):
        model = Model(12, 1.0, jnp.float64)
        result = beams(model, [7], [9], k=3, n_best=3, forbidden_ids=(UNK,))
        assert result.scores.dtype == result.log_probs.dtype == np.float64
        expected = reference_paper(model, 7, 9, 3, 3, "gnmt", 0.6)
        np.testing.assert_allclose(result.scores[0], [score for score, _, _ in expected], rtol=1e-13)
        assert greedy(model, [7], [9], 9).log_probs.dtype == np.float64
        # The switch alone changes no dtype.
        single = Model(12, 1.0)
        assert beams(single, [7], [9], k=3).scores.dtype == greedy(single, [7], [9], 9).scores.dtype == np.float32


def test_bfloat16_logits_are_summed_in_float32():
    model = Model(12, 1.0, jnp.bfloat16)
    assert beams(model, [7], [9], k=3).scores.dtype == np.float32
    assert greedy(model, [7], [9], 9).scores.dtype == np.float32


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_search_without_possible_tokens_gives_no_nan(stopping):
    """No token is possible after the first one: the result is marked as having no hypothesis, without NaN."""

    class DeadEnd(Model):
        def step(self, tokens, state):
            logits, state = super().step(tokens, state)
            return jnp.where((tokens == START)[:, None] & (jnp.arange(self.v) != EOS)[None], logits, -jnp.inf), state

    model = DeadEnd(9)
    result = beams(model, [1, 2], [4, 1], k=2, stopping=stopping)
    assert result.scores[0, 0] == -np.inf
    assert result.lengths[0, 0] == 0
    assert not np.any(result.tokens[0])
    assert result.lengths[1, 0] == 1  # truncated before the first impossible step
    assert np.isfinite(result.scores[1, 0])
    result = greedy(model, [1, 2], [4, 1], 4)
    assert result.scores[0, 0] == -np.inf
    assert result.tokens[0, 0, 1:].tolist() == [PAD] * 3
    assert result.lengths[0, 0] == 1
    assert np.isfinite(result.scores[1, 0])


class Without(Model):
    """A model whose logits of padding and UNK are -inf, so the other tokens share all probability."""

    def step(self, tokens, state):
        logits, state = super().step(tokens, state)
        return logits.at[:, np.array([PAD, UNK])].set(-jnp.inf), state


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_renormalized_beams_equal_a_model_without_the_forbidden_ids(stopping):
    options = {"k": 3, "n_best": 3, "stopping": stopping, "alpha": 1.0, "length_penalty": "power"}
    found = beams(Model(7), [4, 5, 6], [5, 5, 5], forbidden_ids=(PAD, UNK), renormalize_logits=True, **options)
    expected = beams(Without(7), [4, 5, 6], [5, 5, 5], **options)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, rtol=1e-6)
