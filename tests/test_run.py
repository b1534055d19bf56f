"""The commands as Python functions: train, resume, extend, fine-tune, evaluate and average one tiny run."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from tiny_training import changed, lessons, losses, rows_of

from transformer_jax import run as commands
from transformer_jax.checkpoint.checkpoint import checkpoint_steps, load_params, write_checkpoint_manifest
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.data.pairs import Pairs
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.files import read_json_lines
from transformer_jax.testing import log_lines, tiny_config, write_tiny_corpus
from transformer_jax.types import UserError


def params_of(run: Path, step: int):
    folder = RunDir(run)
    return load_params(folder.checkpoints / str(step), abstract_params(folder.load_config().model))


def test_run_folder_holds_what_later_commands_need(tiny):
    run = RunDir(tiny.run)
    assert run.load_config() == tiny_config(tiny.corpus)
    assert run.tokenizer.joinpath("joint.json").is_file()
    assert checkpoint_steps(run) == [2, 4]
    assert all({"learning_rate", "tokens_per_second"} <= row.keys() for row in rows_of(tiny.run))
    assert len(losses(tiny.run)) == 4
    (validation,) = rows_of(tiny.run, "valid_loss")
    assert validation["step"] == 4
    assert {"valid_loss", "valid_perplexity", "valid_bleu"} <= validation.keys()
    assert {"source", "reference", "translation"} <= read_json_lines(run.samples)[0].keys()


def test_result_is_written_and_translations_are_logged(tiny):
    result = json.loads(RunDir(tiny.run).result.read_text())
    assert result["num_sentences"] == 12
    assert result["bleu_signature"].startswith("nrefs:1")
    assert sum("  ->  " in line for line in tiny.log) >= 3, "a few translations are shown"
    reports = [line for line in tiny.log if "200 pairs: 200 kept" in line]
    assert len(reports) == 1, "what the filter left out is counted in the log"


def test_training_on_packed_batches(tiny, tmp_path):
    """The log states the padding, one shape is compiled, and the model learns."""
    config = changed(tiny.config, data={"batching": "packed", "packed_length": 100, "valid": "", "test": ""})
    with log_lines() as lines:
        commands.train(config, tmp_path / "run")
    assert any("in 1 shape(s)" in line for line in lines)
    first, _, _, last = losses(tmp_path / "run")
    assert last < first - 0.3


def test_finished_run_returns_its_result_without_a_step(tiny):
    before = RunDir(tiny.run).metrics.read_bytes()
    with log_lines() as lines:
        outcome = commands.train(tiny.config, tiny.run)
    assert (outcome.step, outcome.state) == (4, None)
    assert lines == [f"{tiny.run} is finished: step 4 of 4"]
    assert outcome.test == json.loads(RunDir(tiny.run).result.read_text())
    assert RunDir(tiny.run).metrics.read_bytes() == before


def test_resumed_run_is_bit_identical(tiny, tmp_path):
    run = tiny.copy(tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "4")
    (run / "result.json").write_text('{"stale": true}')
    with log_lines() as lines:
        outcome = commands.train(tiny.config, run)
    assert outcome.step == 4
    assert f"resuming {run} at step 2" in lines
    jax.tree.map(np.testing.assert_array_equal, params_of(run, 4), params_of(tiny.run, 4))
    assert len(losses(run)) == 4
    assert json.loads((run / "result.json").read_text())["num_sentences"] == 12


def test_escape_sequences_of_a_corpus_are_not_printed(tmp_path):
    write_tiny_corpus(tmp_path / "corpus")
    for path in (tmp_path / "corpus").iterdir():
        path.write_text("".join(f"\x1b[31m {line}" for line in path.read_text().splitlines(keepends=True)))
    with log_lines() as lines:
        commands.train(tiny_config(tmp_path / "corpus", num_steps=2, validate_every=1), tmp_path / "run")
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert "    source      \\x1b[31m" in text, "the samples of a validation"
    assert any(line.startswith("    \\x1b[31m") and "  ->  " in line for line in lines), "the samples of the test"
    assert "\x1b" in read_json_lines(tmp_path / "run" / "samples.jsonl")[0]["source"]


@pytest.mark.parametrize("rows_before", ["new", "replaced"])
def test_finished_run_repeats_a_pending_validation(rows_before, tiny, tmp_path):
    """An interrupted validation after the last step is repeated when the command runs again.

    A kill after its rows were written, before the checkpoint was replaced, leaves rows that are replaced.
    """
    run = RunDir(tiny.copy(tmp_path / "run"))
    (history,) = (run.checkpoints / "4" / "validations").glob("metadata")
    history.write_text('{"figures": [], "is_pending": true}')
    (run.checkpoints / "4" / "metrics" / "metrics").write_text("{}")
    write_checkpoint_manifest(run.checkpoints / "4")
    if rows_before == "new":
        run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows_of(run.path)))
        run.samples.write_text("")
    outcome = commands.train(tiny.config, run.path)
    assert outcome.step == 4
    assert lessons(run.path, "step") == lessons(tiny.run, "step")
    assert run.samples.read_text() == RunDir(tiny.run).samples.read_text()
    figures = [json.loads((path / "checkpoints/4/metrics/metrics").read_text()) for path in (run.path, tiny.run)]
    assert figures[0] == figures[1]


def test_extending_a_run_removes_its_result(tiny, tmp_path, monkeypatch):
    run = tiny.copy(tmp_path / "run")

    def killed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "fit", killed)
    with pytest.raises(KeyboardInterrupt):
        commands.train(changed(tiny.config, training={"num_steps": 6}), run)
    assert not (run / "result.json").exists()


def test_another_configuration_is_rejected_with_both_values(tiny):
    with pytest.raises(UserError, match=r"model\.d_ff 32 -> 64"):
        commands.train(changed(tiny.config, model={"d_ff": 64}), tiny.run)
    assert tiny.config.model.d_ff == 32


def test_failed_start_does_not_fix_the_configuration(tiny, tmp_path):
    run = tmp_path / "run"
    for fields, message in (
        ({"data": {"directory": str(tmp_path / "nowhere")}}, "nowhere"),
        ({"training": {"init_from": str(tmp_path / "gone")}}, r"gone is not a run: it has no config\.json"),
        ({"data": {"max_length": 1, "max_length_ratio": 1.0}}, "max_length"),
    ):
        with pytest.raises(UserError, match=message):
            commands.train(changed(tiny.config, **fields), run)
    RunDir(run).open_for_training(tiny.config, is_bound=False)
    assert RunDir(run).load_config() == tiny.config


def test_init_from_another_function_is_rejected(tiny, tmp_path):
    config = changed(tiny.config, model={"norm_position": "pre"}, training={"init_from": str(tiny.run)})
    with pytest.raises(UserError, match="norm_position is 'post' there and 'pre' here"):
        commands.train(config, tmp_path / "run")


def test_other_training_text_is_rejected_when_resuming(tiny, tmp_path):
    run = tiny.copy(tmp_path / "run")
    shutil.copytree(tiny.corpus, tmp_path / "corpus")
    first = tmp_path / "corpus" / "train.en"
    first.write_text(first.read_text().replace("dog", "cat"))
    config = changed(tiny.config, data={"directory": str(tmp_path / "corpus")}, training={"num_steps": 6})
    RunDir(run).write("config.json", config.to_json())
    with pytest.raises(UserError, match=r"train\.en and .* not the sentence pairs that .* up to step 4"):
        commands.train(config, run)


def test_fewer_steps_than_done_are_rejected(tiny):
    with pytest.raises(UserError, match=r"training.num_steps=1, but .* has done \d+ steps"):
        commands.train(changed(tiny.config, training={"num_steps": 1}), tiny.run)
    assert tiny.config.training.num_steps == 4, "the rejected command did not change the run"


def test_folder_that_is_not_a_run_is_not_changed(tiny, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MarianMTModel"]}')
    with pytest.raises(UserError, match="unknown field architectures"):
        commands.train(tiny.config, tmp_path)
    assert "Marian" in (tmp_path / "config.json").read_text()


def test_init_from_takes_weights_and_tokenizer_with_a_fresh_optimizer(tiny, tmp_path):
    # With other text and a tiny learning rate, the result must equal the initial parameters.
    write_tiny_corpus(tmp_path / "corpus", train=20, test=2)
    for name in ("train.en", "train.de"):
        path = tmp_path / "corpus" / name
        path.write_text(path.read_text().replace("a", "zyx"))
    config = tiny_config(
        tmp_path / "corpus", num_steps=1, init_from=str(tiny.run), peak_learning_rate=1e-12, valid_sentences=0
    )
    config = changed(config, data={"valid": "", "test": ""})
    outcome = commands.train(config, tmp_path / "run")
    assert outcome.step == int(outcome.state.step) == 1
    assert (tmp_path / "run/tokenizer/joint.json").read_text() == (tiny.run / "tokenizer/joint.json").read_text()
    jax.tree.map(
        lambda new, old: np.testing.assert_allclose(new, old, atol=1e-6),
        params_of(tmp_path / "run", 1),
        params_of(tiny.run, 4),
    )
    # A run without a test split also finishes.
    with log_lines() as lines:
        outcome = commands.train(config, tmp_path / "run")
    assert (outcome.state, outcome.test) == (None, None)
    assert lines == [f"{tmp_path / 'run'} is finished: step 1 of 1"]


def test_evaluate_scores_a_split_or_given_pairs(tiny):
    test = score_commands.evaluate(tiny.run)
    result = json.loads(RunDir(tiny.run).result.read_text())
    for name in ("bleu", "chrf", "exact_match", "num_sentences", "bleu_signature"):
        assert test[name] == result[name]
    assert test["loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert score_commands.evaluate(tiny.run, split="valid")["num_sentences"] == 8
    translations = Translator.load(tiny.run).translate(["a dog", "the cat"])
    perfect = score_commands.evaluate(tiny.run, Pairs(["a dog", "the cat"], translations, "here"))
    assert perfect["exact_match"] == 100
    with pytest.raises(UserError, match="legal: train, valid, test"):
        score_commands.evaluate(tiny.run, split="dev")


def test_evaluate_rejects_a_missing_split(tiny, tmp_path):
    run = tiny.copy(tmp_path / "run")
    RunDir(run).write("config.json", changed(tiny.config, data={"test": ""}).to_json())
    with pytest.raises(UserError, match=r"data\.test is empty"):
        score_commands.evaluate(run)


def test_average_is_the_mean_of_the_last_checkpoints(tiny, tmp_path):
    run = tiny.copy(tmp_path / "run")
    with pytest.raises(UserError, match="no averaged checkpoint"):
        Translator.load(run, checkpoint="average")
    assert score_commands.average(run, 2) == [2, 4]
    averaged = Translator.load(run, checkpoint="average").params
    jax.tree.map(
        lambda mean, one, two: np.testing.assert_allclose(mean, (np.asarray(one) + np.asarray(two)) / 2, atol=1e-6),
        averaged,
        params_of(run, 2),
        params_of(run, 4),
    )
    for last in (0, 3):
        with pytest.raises(UserError, match=rf"has 2 checkpoints \[2, 4\]; the last {last} cannot be averaged"):
            score_commands.average(run, last)
