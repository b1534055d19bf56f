"""A search that is watched: what it says it did is what it did, and being watched changes nothing."""

import io
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from search_cases import EOS, PAD, REFERENCES, START, STOPPINGS, UNK, Model, beams, continuations, penalty, quick_jit
from translator_cases import make

from transformer_jax import cli
from transformer_jax.config import DecodingConfig
from transformer_jax.decoding import explain as module
from transformer_jax.decoding.beam_search import beam_search
from transformer_jax.decoding.explain import explain
from transformer_jax.decoding.search import Watched, greedy_search
from transformer_jax.decoding.translator import Translator
from transformer_jax.types import UserError


def watched_searches(model, sentences, limit, **options):
    """For each sentence the result, and what its steps said."""
    seen = []

    @quick_jit
    def search(state):
        return beam_search(
            model.step,
            state,
            max_lengths=jnp.array([limit]),
            max_length=limit,
            start_id=START,
            eos_id=EOS,
            pad_id=PAD,
            watch=seen.append,
            **options,
        )

    for sentence in sentences:
        seen.clear()
        result = jax.tree.map(np.asarray, search(model.state([sentence], options["beam_size"])))
        jax.effects_barrier()
        yield result, list(seen)


def listed(found):
    """[(score, tokens, log-probability), ...] of the only sentence."""
    places = [place for place in range(found.scores.shape[1]) if found.log_probs[0, place] > -np.inf]
    return [
        (found.scores[0, i], found.tokens[0, i, : found.lengths[0, i]].tolist(), found.log_probs[0, i]) for i in places
    ]


@pytest.mark.parametrize("stopping", STOPPINGS)
def test_steps_are_those_of_plain_loops(stopping):
    """Every list of every step, against continuations found by NumPy; and the result is that of an unwatched search."""
    model, k, limit, sentence = Model(13, 2.0), 3, 9, 5
    options = {"beam_size": k, "stopping": stopping, "n_best": 2, "forbidden_ids": (UNK,), "length_penalty": "power"}
    ((result, steps),) = watched_searches(model, [sentence], limit, alpha=1.0, **options)

    translator, fates = make(decoding={"beam_size": k, "stopping": stopping}), set()  # whose pieces alone are used
    live, ended = [(0.0, [])], []
    for length, step in enumerate(steps, 1):
        assert (int(step.length), bool(step.skipped[0])) == (length, False)
        assert bool(step.done[0]) == (length == len(steps))
        found = continuations(model, sentence, live, k, renormalize_logits=stopping == "ctranslate2")
        said = listed(step.candidates)
        assert [tokens for _, tokens, _ in said] == [tokens for _, tokens in found]
        np.testing.assert_allclose([p for _, _, p in said], [p for p, _ in found], rtol=2e-5)
        np.testing.assert_allclose([s for s, _, _ in said], [p / length for p, _ in found], rtol=2e-5)
        for (_, tokens, _), parent in zip(said, step.parents[0], strict=False):
            assert live[parent][1] == tokens[:-1]
        looked_at = found if stopping == "paper" else found[:k]
        ends = [tokens[-1] == EOS or (stopping != "paper" and length == limit) for _, tokens in looked_at]
        assert step.finishes[0, : len(ends)].tolist() == ends
        assert not step.finishes[0, len(ends) :].any()
        ended += [(p / length, tokens) for (p, tokens), ends_here in zip(looked_at, ends, strict=True) if ends_here]
        ended = sorted(ended, reverse=True)[:k]
        assert [tokens for _, tokens, _ in listed(step.finished)] == [tokens for _, tokens in ended]
        live = [(p, tokens) for p, tokens in found if tokens[-1] != EOS][:k]
        if length < limit or stopping == "paper":
            assert [tokens for _, tokens, _ in listed(step.live)] == [tokens for _, tokens in live]
            kept = [tokens for _, tokens in ended]
            for candidate, (_, tokens) in zip(module._step(step, translator, 2).candidates, found, strict=True):
                ends_here = tokens in [looked[1] for looked, end in zip(looked_at, ends, strict=True) if end]
                ended_as = "ended" if tokens in kept else "dropped"
                lives_as = "lives" if tokens in [tokens for _, tokens in live] else "pruned"
                assert candidate.fate == (ended_as if ends_here else lives_as)
                fates.add(candidate.fate)

    assert fates >= {"lives", "pruned", "ended"} | ({"dropped"} if stopping == "paper" else set())
    expected = REFERENCES[stopping](model, sentence, limit, k, 2, "power", 1.0)
    assert [tokens for _, tokens, _ in listed(result)] == [tokens for _, tokens, _ in expected]
    alone = beams(model, [sentence], [limit], k=k, alpha=1.0, **{n: v for n, v in options.items() if n != "beam_size"})
    jax.tree.map(np.testing.assert_array_equal, result, alone)


def test_nothing_that_ends_later_is_better_than_the_papers_bound():
    """Of a search that is made to go on to its limit; and an unhindered one stops at the first step it may."""
    model, k, limit = Model(12, 1.0), 4, 12
    for _, steps in watched_searches(model, range(3), limit, beam_size=k, n_best=k, alpha=2.0):
        bounds = [step.bound[0] for step in steps]
        for place, bound in enumerate(bounds):
            later = [
                candidate / penalty("gnmt", int(step.length), 2.0)
                for step in steps[place + 1 :]
                for candidate in step.candidates.log_probs[0][step.finishes[0]]
            ]
            assert all(score <= bound + 1e-6 for score in later)
        kth = [step.finished.scores[0, -1] for step in steps]
        assert [worst >= bound for worst, bound in zip(kth, bounds, strict=True)][:-1] == [False] * (len(steps) - 1)
        assert kth[-1] >= bounds[-1] or steps[-1].at_limit[0]


def test_greedy_search_is_watched_too():
    model, seen = Model(9, 1.0), []
    result = greedy_search(
        model.step,
        model.state([10]),
        max_lengths=jnp.array([20]),
        max_length=20,
        start_id=START,
        eos_id=EOS,
        pad_id=PAD,
        watch=seen.append,
    )
    jax.effects_barrier()
    tokens = result.tokens[0, 0, : int(result.lengths[0, 0])].tolist()
    assert [step.candidates.tokens[0, 0, int(step.length) - 1] for step in seen] == tokens
    assert tokens[-1] == EOS
    assert [bool(step.finishes[0, 0]) for step in seen] == [False] * (len(tokens) - 1) + [True]
    assert listed(seen[-1].finished) == listed(jax.tree.map(np.asarray, result))
    assert listed(seen[-1].live) == [] != listed(seen[0].live)


# ---------------------------------------------------------------------------------------------------- with a translator


def check_explanation(one, text, translator, n_best):
    """The hypotheses are those of the search that nobody watches; the steps lead to them."""
    (expected,) = translator.translate_n_best([text], n_best)
    assert [found.token_ids for found in one.hypotheses] == [found.token_ids for found in expected]
    for name in ("score", "log_prob"):
        np.testing.assert_allclose(
            [getattr(found, name) for found in one.hypotheses], [getattr(found, name) for found in expected], rtol=1e-5
        )
    assert [found.text for found in one.hypotheses] == [found.text for found in expected]
    assert list(one.source_pieces) == [*text.split(), "</s>"]
    k = translator.config.decoding.beam_size
    live, ended = [()], {}
    for number, step in enumerate(one.steps, 1):
        assert step.length == number
        assert bool(step.stopped_by) == (number == len(one.steps))
        fates = [candidate.fate for candidate in step.candidates]
        assert fates.count("lives") <= k
        assert set(fates) <= {"lives", "ended", "pruned", "dropped"}
        for candidate in step.candidates:
            assert live[candidate.parent - 1] == candidate.token_ids[:-1]
            assert candidate.pieces == tuple(translator.tokenizers.target.pieces(candidate.token_ids))
        live = [candidate.token_ids for candidate in step.candidates if candidate.fate == "lives"]
        ended |= {c.token_ids: (c.score, c.log_prob) for c in step.candidates if c.fate == "ended"}
        best = sorted((score for score, _ in ended.values()), reverse=True)[:k]
        assert [found.score for found in step.ended] == best
    # What was returned is what was said to have ended, or else what was alive at the end.
    last = {c.token_ids: (c.score, c.log_prob) for c in one.steps[-1].candidates}
    for found in one.hypotheses:
        assert (found.score, found.log_prob) == (last | ended)[found.token_ids]
    returned = [found.token_ids for found in one.hypotheses]
    assert returned[: len(ended)] == sorted(ended, key=lambda ids: ended[ids][0], reverse=True)[:n_best]


def test_an_explanation_is_of_the_real_search_and_can_be_read():
    translator = make(decoding={"max_length_offset": 4, "beam_size": 3})
    texts = ["two three", "", "one"]
    one, empty, other = explain(translator, texts, 2)
    assert (empty.steps, empty.source_pieces, empty.hypotheses[0].text) == ((), (), "")
    check_explanation(one, texts[0], translator, 2)
    check_explanation(other, texts[2], translator, 2)

    lines = str(one).splitlines()
    assert lines[0] == "source  two three </s>"
    assert lines[1] == "search  beam 3, penalty ((5 + length) / 6)^0.6, stopping paper"
    first = one.steps[0].candidates[0]
    assert lines[4].split() == ["from", "log", "P", "score", "fate"]
    assert lines[5].split() == ["1", f"{first.log_prob:.4f}", f"{first.score:.4f}", first.fate, *first.pieces]
    assert sum(line.startswith("step ") for line in lines) == len(one.steps)
    assert f"  stops: {one.steps[-1].stopped_by}" in lines
    assert lines[-1].endswith(one.hypotheses[1].text)


def test_greedy_search_is_explained_too():
    translator = make(decoding={"beam_size": 1, "max_length_offset": 1})
    (one,) = explain(translator, ["two"])
    check_explanation(one, "two", translator, 1)
    assert "greedy search" in str(one)
    with pytest.raises(UserError, match="texts is the string 'two'"):
        explain(translator, "two")


def test_the_command(monkeypatch, capsysbinary, tmp_path):
    seen = []
    monkeypatch.setattr(Translator, "load", lambda *run, **decoding: (run, decoding))
    monkeypatch.setattr(module, "explain", lambda *given: seen.append(given) or ["first\nsecond \ud83d", "third"])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"two\n\n"), isatty=lambda: False))
    assert cli.main(["translate", str(tmp_path), "--explain", "--beam-size", "2", "--no-compilation-cache"]) == 0
    assert seen == [(((tmp_path,), {"ensemble": (), "beam_size": 2}), ["two", ""], 1, None)]
    assert capsysbinary.readouterr().out.decode() == "first\nsecond ?\n\nthird\n"


@pytest.mark.parametrize(
    ("stopping", "k", "changes", "reason"),
    [
        ("paper", 2, {}, "a live one can score -1.5000 at most, which is no better than the best that ended"),
        ("huggingface", 2, {}, "2 ended, none of which is worse than -1.5000, the best live one scored as it is"),
        ("ctranslate2", 2, {}, "2 ended"),
        ("paper", 2, {"at_limit": [True]}, "7 tokens are the limit"),
        ("paper", 2, {"live": -np.inf}, "no hypothesis can be continued"),
        ("paper", 1, {}, "it ended"),
    ],
)
def test_why_it_stopped(stopping, k, changes, reason):
    live = SimpleNamespace(log_probs=np.array([[changes.pop("live", -3.0)]]))
    nothing = Watched(*[None] * len(Watched._fields))
    watched = nothing._replace(**{"length": np.int32(7), "at_limit": [False], "live": live} | changes)
    decoding = DecodingConfig(beam_size=k, stopping=stopping)
    assert module._reason(watched, 2, -1.5, decoding, 1) == reason
