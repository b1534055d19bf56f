"""The moving average of the parameters, and training that ends when validations get no better."""

import jax
import numpy as np
import optax
from tiny_training import MODEL, make_config, train

from transformer_jax.checkpoint.checkpoint import load_params
from transformer_jax.config import TrainingConfig
from transformer_jax.model.transformer import abstract_params
from transformer_jax.testing import assert_trees_identical
from transformer_jax.training.early_stopping import EarlyStopping
from transformer_jax.training.loop import Evaluation
from transformer_jax.training.optimizer import eval_params, make_optimizer, update_count
from transformer_jax.training.sharding import make_mesh, tree_shardings


def test_the_average_is_its_definition_and_changes_no_update():
    rng = np.random.default_rng(0)
    config = TrainingConfig(schedule="constant", warmup_steps=1, peak_learning_rate=0.1, clip_norm=1.0)
    plain, averaged = (make_optimizer(c, 16) for c in (config, TrainingConfig(**(vars(config) | {"ema_decay": 0.5}))))
    params = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
    states, expected = [plain.init(params), averaged.init(params)], params["w"].astype(np.float64)
    for t in range(1, 13):
        grads = {"w": rng.normal(size=(3, 2)).astype(np.float32)}
        updates, states[0] = plain.update(grads, states[0], params)
        same, states[1] = averaged.update(grads, states[1], params)
        np.testing.assert_array_equal(updates["w"], same["w"])
        params = optax.apply_updates(params, updates)
        d = min(0.5, (1 + t) / (10 + t))  # 2 / 11, ..., 0.5 from the eighth on
        expected = d * expected + (1 - d) * np.asarray(params["w"], np.float64)
        np.testing.assert_allclose(states[1].ema["w"], expected, rtol=1e-5)
        assert [int(update_count(state)) for state in states] == [t, t]


def test_validations_and_checkpoints_have_the_average_and_the_run_learns_the_same(tmp_path):
    seen = []

    def evaluate(params, step):
        seen.append(jax.device_get(params))
        return Evaluation({"valid_loss": 1.0})

    plain = train(tmp_path / "plain", make_config()).state
    config = make_config(ema_decay=0.5, validate_every=2)
    train(tmp_path / "run", make_config(ema_decay=0.5, num_steps=2), evaluate=evaluate)
    state = train(tmp_path / "run", config, evaluate=evaluate).state
    assert_trees_identical(state.params, plain.params)
    assert_trees_identical(seen[-1], eval_params(state))
    assert np.abs(seen[-1]["embedding"]["table"] - state.params["embedding"]["table"]).max() > 1e-3
    for step, params in zip((2, 4), seen, strict=True):
        assert_trees_identical(
            load_params(tmp_path / "run" / "checkpoints" / str(step), abstract_params(MODEL)), params
        )
    # An average lies where its parameter lies.
    mesh = make_mesh(2, 2, 2)
    shardings = tree_shardings(state, mesh)
    assert shardings.opt_state.ema == shardings.params


def losses_of(values):
    """Validations that find these, one after the other."""
    left = iter(values)
    return lambda params, step: Evaluation({"valid_loss": next(left)})


def test_training_ends_when_validations_got_no_better_and_so_does_a_resumed_one(tmp_path):
    config = make_config(num_steps=9, validate_every=1, patience=2)
    values = [3.0, 2.0, 2.5, 2.0, 1.0]  # to be no worse is not to be better
    outcome = train(tmp_path / "run", config, evaluate=losses_of(values))
    assert (outcome.step, outcome.stopped_early, outcome.interrupted_by) == (4, True, None)
    again = train(tmp_path / "run", config, batches=lambda position: iter(()))
    assert (again.step, again.stopped_early) == (4, True)
    assert_trees_identical(again.state, outcome.state)

    train(tmp_path / "cut", make_config(num_steps=3, validate_every=1, patience=2), evaluate=losses_of(values))
    resumed = train(tmp_path / "cut", config, evaluate=losses_of(values[3:]))
    assert (resumed.step, resumed.stopped_early) == (4, True)


def test_what_counts_as_better():
    patience = EarlyStopping(2, "valid_bleu", [{"valid_bleu": None}, {"loss": 1.0}, {"valid_bleu": 0.0}])
    patience.add({"valid_bleu": 5.0, "valid_loss": 9.0})
    patience.add({"valid_bleu": float("nan")})
    assert not patience.should_stop()
    patience.add({"valid_bleu": 5.0})
    assert patience.should_stop()
    assert not EarlyStopping(0, "valid_loss", [{"valid_loss": 1.0}] * 99).should_stop()
