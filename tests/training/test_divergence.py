"""Nonfinite steps: their origin, the report, and stopping or skipping. They are provoked by numbers too large for
float32, and by token ids outside the embedding table."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_training import MODEL, batches_from, make_config, params_at, steps_of, train

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.model.transformer import Transformer
from transformer_jax.testing import assert_trees_identical, log_lines, random_batch
from transformer_jax.training import divergence
from transformer_jax.training.divergence import MAX_IN_A_ROW, locate_nonfinite
from transformer_jax.training.loss import PAPER_LOSS, LossSpec
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.step import dropout_rng, init_rng, init_state, train_step
from transformer_jax.types import UserError

LAYER = "encoder/layer_0/"


def strict_rows(text):
    """Parse JSON lines, and reject the words NaN and Infinity that Python would accept."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.removesuffix("\n").split("\n")]


def initial_params(config):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return jax.jit(Transformer(config).init)(jax.random.key(0), tokens, tokens)["params"]


@pytest.fixture(scope="module")
def params():
    return initial_params(MODEL)


def changed(params, path, value):
    """Return the tree with every entry of one leaf replaced."""
    name, _, rest = path.partition("/")
    return params | {name: changed(params[name], rest, value) if rest else jnp.full_like(params[name], value)}


@pytest.mark.parametrize(
    ("path", "value", "first"),
    [
        (LAYER + "feed_forward/outer/kernel", np.nan, f"the parameter {LAYER}feed_forward/outer/kernel"),
        # 1e38 is a number, but its sums are not.
        (LAYER + "feed_forward/outer/kernel", 1e38, f"the output of {LAYER}feed_forward"),
        ("decoder/layer_0/cross_attention/output/kernel", 1e38, "the output of decoder/layer_0/cross_attention"),
    ],
)
def test_report_names_the_first_nonfinite_layer_of_the_forward_pass(params, path, value, first):
    found = locate_nonfinite(
        make_config(), changed(params, path, value), random_batch(0), dropout_rng(0), 1, PAPER_LOSS
    )
    assert found["first"].startswith(first), found["first"]
    assert found["parameters"] == ([path] if np.isnan(value) else [])
    before, after = ("embedding", "encoder/layer_0/self_attention"), "decoder/layer_0/feed_forward_norm"
    assert after in found["outputs"]
    assert not set(before) & set(found["outputs"])
    assert found["outputs"].index(after) > 0


def test_report_names_an_overflowing_gradient_or_sum():
    """The largest weights give logits of zero: the loss is log 16, and its gradient is not finite."""
    config = dataclasses.replace(
        make_config(label_smoothing=0.0), model=dataclasses.replace(MODEL, tie_embeddings="none")
    )
    params = initial_params(config.model)
    norm = "decoder/layer_0/feed_forward_norm/"
    params = changed(changed(params, norm + "scale", 0.0), norm + "bias", 1.0)
    signs = np.array([1.0, -1.0] * 8, np.float32)  # orthogonal to the bias, at every position
    for size, first in ((4e37, f"the gradient of {norm}bias"), (1e30, "every value is finite but a sum is not")):
        params["output_projection"]["kernel"] = jnp.asarray(
            np.outer(signs * np.float32(size), np.arange(16) == 4), jnp.float32
        )
        batch = random_batch(0)
        batch = batch._replace(tgt_out=np.where(batch.tgt_out > 3, 4, batch.tgt_out))
        found = locate_nonfinite(config, params, batch, dropout_rng(0), 1, LossSpec(config.training.label_smoothing))
        assert found["first"].startswith(first), found
        assert found["parameters"] == found["outputs"] == []


def test_nonfinite_gradient_with_a_finite_loss_changes_nothing():
    """The squared differences of finite logits exceed float32, so the norm of the gradient overflows."""
    model, optimizer = Transformer(MODEL), make_optimizer(make_config().training, MODEL.d_model)
    state = init_state(model, optimizer, init_rng(0))
    table = state.params["embedding"]["table"]
    # Large activations make large gradients; the softmax keeps the loss finite.
    params = changed(state.params, "decoder/layer_0/feed_forward_norm/scale", 1e25)
    params["embedding"]["table"] = table * 1e-6
    state = state.replace(params=params)
    new, metrics = jax.jit(partial(train_step, model=model, optimizer=optimizer))(
        state, random_batch(0), dropout_rng(0)
    )
    assert jnp.isfinite(metrics.loss)
    assert not jnp.isfinite(metrics.grad_norm)
    assert not metrics.updated
    assert_trees_identical(new.params, state.params)
    assert_trees_identical(new.opt_state, state.opt_state)
    assert new.step == 1


def test_gradients_are_listed_in_the_order_of_the_backward_pass(params, monkeypatch):
    calls = ["embedding", LAYER + "self_attention", LAYER + "feed_forward", "decoder/layer_0/feed_forward_norm"]
    flags = {f"{number:06d} {name}": True for number, name in enumerate(calls)}
    largest = jax.tree.map(lambda leaf: np.float32(np.inf), params)
    finite = jax.tree.map(lambda leaf: True, params)
    found = divergence.Inspection(np.float32(1), finite, flags, largest)
    monkeypatch.setattr(divergence, "inspect_step", lambda *_: found)
    found = locate_nonfinite(make_config(), params, random_batch(0), dropout_rng(0), 1, PAPER_LOSS)
    places = [next(i for i, path in enumerate(found["gradients"]) if path.startswith(name + "/")) for name in calls]
    assert places == sorted(places, reverse=True)
    assert len(found["gradients"]) == len(jax.tree.leaves(params))


def test_microbatches_are_inspected_in_turn(params):
    batch = random_batch(0, rows=16)
    batch.src[3, 0] = MODEL.vocab_size + 7  # outside the embedding table
    found = locate_nonfinite(make_config(accumulate=2), params, batch, dropout_rng(0), 1, PAPER_LOSS)
    assert found["first"] == "the output of embedding"


def sentences(index):
    return [{"pair": index, "source": "a\u2028b", "target": "ä"}]


def invalid_ids_at(*steps):
    """Return the batches of `tiny`, with an id outside the embedding table at the given steps."""

    def batches(position):
        for index, batch in enumerate(batches_from(position), position + 1):
            if index in steps:
                batch.src[0, 0] = MODEL.vocab_size + 7
            yield batch

    return batches


def test_stopped_run_reports_layer_and_sentences_of_the_step(tmp_path, monkeypatch):
    inspected = []

    def look(config, params, batch, dropout_rng, step, loss):
        inspected.append((step, params, batch))
        return {"first": "somewhere", "parameters": [], "largest": np.inf}

    monkeypatch.setattr(divergence, "locate_nonfinite", look)
    folder = tmp_path / "run"
    config = make_config(schedule="constant", peak_learning_rate=1e38, warmup_steps=1, checkpoint_every=1)
    with pytest.raises(UserError, match=r"the loss of step 2 is nan; first: somewhere; .* is in .*diverged-2\.json"):
        train(folder, config, describe=sentences)
    (report,) = folder.glob("diverged-*.json")
    tree = json.loads(report.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    expected = {"first": "somewhere", "parameters": [], "largest": None, "sentences": sentences(1)}
    assert tree == {"step": 2, "problem": "the loss of step 2 is nan", **expected}
    # Step 3 was already dispatched and has changed nothing: the parameters equal those before step 2.
    ((step, params, batch),) = inspected
    assert step == 2
    assert_trees_identical(params, params_at(folder, 1))
    assert_trees_identical(batch, random_batch(1))


def test_skipped_step_changes_only_the_step_count(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "locate_nonfinite", lambda *_: {"first": "the output of embedding"})
    config = make_config(on_divergence="skip", checkpoint_every=1)
    outcome = train(tmp_path / "run", config, batches=invalid_ids_at(3), describe=sentences)
    assert (outcome.step, int(outcome.state.step)) == (4, 4)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    after = [params_at(tmp_path / "run", step) for step in (2, 3)]
    assert_trees_identical(*after)
    rows = strict_rows((tmp_path / "run" / "metrics.jsonl").read_text())
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[2] == {"step": 3, "skipped": 1}
    # The norms of the gradient, and of the parameters that the loss was computed with.
    squares = [(np.asarray(leaf, np.float64) ** 2).sum() for leaf in jax.tree.leaves(after[1])]
    assert rows[3]["param_norm"] == pytest.approx(np.sqrt(sum(squares)), rel=1e-5)
    assert rows[3]["grad_norm"] > 0
    # The schedule and Adam count updates: the last one is the third.
    assert outcome.state.opt_state[0].count == 3
    np.testing.assert_allclose([rows[i]["learning_rate"] for i in (0, 1, 3)], np.array([1, 2, 3]) * 0.25 / 8, rtol=1e-5)
    assert "output of embedding" in (tmp_path / "run" / "diverged-3.json").read_text()

    # A run stopped after the skipped step and resumed is bit-identical.
    cut = tmp_path / "cut"
    train(cut, make_config(on_divergence="skip", checkpoint_every=1, num_steps=3), batches=invalid_ids_at(3))
    assert_trees_identical(train(cut, config, batches=invalid_ids_at(3)).state, outcome.state)


def test_too_many_consecutive_skipped_steps_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "locate_nonfinite", lambda *_: {"first": "somewhere"})
    config = make_config(on_divergence="skip", num_steps=50, log_every=100)
    steps = [2, *range(5, 50)]
    with (
        log_lines() as lines,
        pytest.raises(UserError, match=r"step 14 is nan and 10 steps in a row were skipped; first: somewhere"),
    ):
        train(tmp_path / "run", config, batches=invalid_ids_at(*steps))
    rows = strict_rows((tmp_path / "run" / "metrics.jsonl").read_text())
    assert [row["skipped"] for row in rows] == [1, *range(1, MAX_IN_A_ROW)]
    assert "step 5 skipped: the loss of step 5 is nan" in lines
    assert len(list((tmp_path / "run").glob("diverged-*.json"))) == divergence.MAX_REPORTS + 1


def test_failing_search_still_reports_the_step(tmp_path, monkeypatch):
    def fails(*_):
        raise MemoryError("no room")

    monkeypatch.setattr(divergence, "locate_nonfinite", fails)
    policy = divergence.Divergence(make_config(), RunDir(tmp_path), dropout_rng(0), sentences, PAPER_LOSS)
    with pytest.raises(UserError, match=r"the loss is nan; first: unknown, because .*MemoryError: no room"):
        policy.handle(1, "the loss is nan", random_batch(0), {})
    assert (tmp_path / "diverged-1.json").is_file()
