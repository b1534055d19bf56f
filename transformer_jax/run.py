"""A training run from top to bottom: data, mesh, state, compiled step, loop, validation and test."""

import dataclasses
import json
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import jax
from jax.sharding import Mesh

from transformer_jax.checkpoint.averaging import average_checkpoints
from transformer_jax.checkpoint.checkpoint import checkpoint_steps, load_params, read_history, resolve_checkpoint
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import RunDir, locked
from transformer_jax.config import Config
from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import load_or_encode
from transformer_jax.data.loader import TrainingData, plan_batches
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import TokenizerPair, train_tokenizers
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.validation import Validation, evaluate_pairs
from transformer_jax.model.transformer import abstract_params, count_parameters
from transformer_jax.runtime.distributed import (
    check_same,
    check_shared,
    collective,
    main_process_first,
    main_process_logger,
    on_main_process,
)
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import JsonObject, to_json
from transformer_jax.training.loop import Evaluate, Outcome, fit
from transformer_jax.training.metrics import Evaluation
from transformer_jax.training.sharding import make_mesh, row_multiple, row_parts
from transformer_jax.types import Params, UserError, printable

logger = main_process_logger(__name__)

# Fields that may differ between a model and the one that `training.init_from` names: they change no output.
_FREE_AT_INIT = (
    *("model.residual_dropout", "model.attention_dropout", "model.activation_dropout", "model.initialization"),
    *("model.dtype", "model.param_dtype", "model.remat", "model.scan_layers", "model.attention_kernel"),
    "tokenizer.min_frequency",
)


def train(config: Config, workdir: str | Path, *, profile: bool = False, strict: bool = False) -> Outcome:
    """Train a run, or resume it, and score it on the test split at the end.

    With several processes (`runtime.distributed`), every process calls this function with the same arguments and a
    folder that all of them see. Progress is logged by process 0.

    Args:
        config: The configuration.
        workdir: The run's folder.
        profile: Whether to trace a few steps into the run's `profile/`.
        strict: Whether to fail if the newest checkpoint is damaged, instead of resuming from an earlier one.

    Raises:
        UserError: The configuration, the data or the run's folder is not usable; the message states the fix.
    """
    exists = config.decoding.checkpoint in ("last", "best") or config.training.average_last
    problem = f"decoding.checkpoint={config.decoding.checkpoint!r} with training.average_last=0"
    fix = "the test after the last step takes the checkpoint last or best, or average with training.average_last"
    require(exists, f"{problem}: {fix}")
    run, num_steps = RunDir(Path(workdir)), config.training.num_steps
    check_same("the configuration", config.to_json())
    fix = f"Train a new run from it with --training.init-from {run.path} and another --workdir"
    require(not run.imported.is_file(), f"{run.path} is an imported model and cannot be trained itself. {fix}")
    on_main_process(run.make)()
    with ExitStack() as stack:
        can_write = on_main_process(lambda: stack.enter_context(locked(run)))()
        steps = _open(run, config, strict, can_write)
        if num_steps in steps and not (can_write and _is_validation_pending(run, num_steps)):
            return _finished(config, run, can_write)

        started = time.monotonic()
        mesh = make_mesh(config.training.mesh_data, config.training.mesh_fsdp, config.training.mesh_tensor)
        pairs = _read_split(config.data, "train")
        assert pairs is not None  # data.train is never empty
        tokenizers = _make_tokenizers(config, run, pairs)
        initial_params = None if steps else _load_initial_params(config)
        data = _load_training_data(config, run, mesh, pairs, tokenizers, steps)
        logger.info("%s; ready after %.0f s", _describe(config, data), time.monotonic() - started)
        evaluate = _make_validation(config, run, mesh, tokenizers)
        test_pairs = _read_split(config.data, "test")  # read before training, so that a mistake is found now
        if steps:
            logger.info("resuming %s at step %d", run.path, steps[-1])
        on_main_process(run.discard_results)()  # those of an earlier run with fewer steps

        outcome = fit(config, run, mesh, data, evaluate, initial_params, profile=profile)
        if outcome.interrupted_by:
            place = f"{outcome.interrupted_by} after step {outcome.step} of {num_steps}"
            logger.info("stopped by %s, which is saved; run the same command to resume", place)
            return outcome
        if outcome.stopped_early:
            reason = f"{config.training.patience} consecutive validations did not improve {config.training.best_by}"
            logger.info("stopped early after step %d: %s", outcome.step, reason)
        return dataclasses.replace(outcome, test=_test(config, run, test_pairs))


def _open(run: RunDir, config: Config, strict: bool, can_write: bool) -> list[int]:
    """Recover the run, and write or check its configuration. Return the steps of its checkpoints, ascending."""
    steps = on_main_process(lambda: recover(run, strict=strict) if can_write else checkpoint_steps(run))()
    num_steps, done = config.training.num_steps, max(steps, default=0)
    problem = f"{run.path} cannot be written, and the run is not finished"
    require(can_write or done == num_steps, f"{problem}. Choose another --workdir")
    problem = f"training.num_steps={num_steps}, but {run.path} has done {done} steps"
    require(done <= num_steps, f"{problem}. Set --training.num-steps to at least that number")
    # Until the first checkpoint exists, any field may change, because the run may have failed on a bad flag.
    on_main_process(run.open_for_training)(config, is_bound=bool(steps), write=can_write)
    if can_write:
        check_shared(run.path)
    if not steps:
        on_main_process(shutil.rmtree)(run.tokenizer, ignore_errors=True)
    return steps


@on_main_process
def _is_validation_pending(run: RunDir, step: int) -> bool:
    """Return whether the validation after the checkpoint of a step was interrupted."""
    history = read_history(run, step)
    return history is not None and history.is_pending


def _finished(config: Config, run: RunDir, can_write: bool) -> Outcome:
    """Return the stored result of a finished run, or test it again if the settings of the test have changed."""
    step = config.training.num_steps
    logger.info("%s is finished: step %d of %d", run.path, step, step)
    result = on_main_process(run.read_result)()
    if result.get("settings", result.get("asked")) == _test_settings(config):
        return Outcome(step, test=result if "bleu" in result else None)
    problem = f"{run.result} is missing or was computed with other settings, and {run.path} cannot be written"
    require(can_write, f"{problem}. Score the run with `evaluate`")
    return Outcome(step, test=_test(config, run, _read_split(config.data, "test")))


_read_split = collective(read_split)


@main_process_first
def _make_tokenizers(config: Config, run: RunDir, pairs: Pairs) -> TokenizerPair:
    """Load the run's tokenizers. A new run trains them, or copies those of `training.init_from`."""
    if not run.tokenizer.is_dir():
        if config.training.init_from:
            source = RunDir(Path(config.training.init_from))
            _check_same_function(source.load_config(), config)
            TokenizerPair.load(source.tokenizer).save(run.tokenizer)
        else:
            train_tokenizers(config, pairs).save(run.tokenizer)
        run.seal()
    tokenizers = TokenizerPair.load(run.tokenizer)
    tokenizers.check_fits(config.model)
    return tokenizers


def _load_initial_params(config: Config) -> Params | None:
    """Return the parameters of `training.init_from`, if it is set."""
    if not config.training.init_from:
        return None
    source = RunDir(Path(config.training.init_from))
    old = source.load_config()
    checkpoint = resolve_checkpoint(source, old.decoding.checkpoint, old.training.best_by)
    return load_params(checkpoint, abstract_params(config.model))


def _check_same_function(old: Config, new: Config) -> None:
    """Check that a model computes the same function of its parameters and tokens as the one it starts from."""
    before, after = old.flat(), new.flat()
    differing = [
        f"{name} is {before[name]!r} there and {value!r} here"
        for name, value in after.items()
        if name.startswith(("model.", "tokenizer.")) and name not in _FREE_AT_INIT and before[name] != value
    ]
    source = new.training.init_from
    require(not differing, f"training.init_from={source} holds another model: {'; '.join(differing)}. Use its values")


def _load_training_data(
    config: Config, run: RunDir, mesh: Mesh, pairs: Pairs, tokenizers: TokenizerPair, steps: list[int]
) -> TrainingData:
    """Encode the training pairs, check that a resumed run was trained on them, and plan the batches."""
    encoded = main_process_first(load_or_encode)(config, "train", tokenizers, run.cache, pairs)
    logger.info("%s: %s", pairs.origin, encoded.report)
    sha256 = encoded.sha256()
    check_same(f"the encoded text of {pairs.origin}", sha256)
    if steps and _trained_on(run) not in (sha256, None):
        fix = "Restore those pairs, or start another run with --workdir (and --training.init-from this run)"
        problem = f"not the sentence pairs that {run.path} was trained on up to step {steps[-1]}"
        raise UserError(f"{pairs.origin}: {problem}. {fix}")
    on_main_process(run.write)(run.data_sha256.name, sha256 + "\n")
    multiple, parts = row_multiple(mesh, config.training.accumulate), row_parts(mesh)
    plan = plan_batches(config, encoded)
    return TrainingData(encoded, plan, config.model, tokenizers, multiple, parts, config.data.prefetch)


@on_main_process
def _trained_on(run: RunDir) -> str | None:
    """Return the checksum of the encoded pairs that the run was trained on. Runs of earlier versions have none."""
    return run.data_sha256.read_text(errors="replace").strip() if run.data_sha256.is_file() else None


def _describe(config: Config, data: TrainingData) -> str:
    plan, processes = data.plan, jax.process_count()
    return (
        f"{plan.batches_per_epoch} batches an epoch in {len(plan.shapes)} shape(s), {plan.padding_share:.1%} padding, "
        f"in an order of {plan.order_bits:,.0f} bits; {count_parameters(config.model):,} parameters; "
        f"{jax.device_count()} {jax.devices()[0].device_kind} device(s)"
        + (f" in {processes} processes" if processes > 1 else "")
    )


def _make_validation(config: Config, run: RunDir, mesh: Mesh, tokenizers: TokenizerPair) -> Evaluate:
    pairs = _read_split(config.data, "valid")
    if pairs is None:
        return lambda params, step: Evaluation()
    encoded = main_process_first(load_or_encode)(config, "valid", tokenizers, run.cache, pairs)
    return Validation(config, pairs, encoded, tokenizers, mesh)


def _test_settings(config: Config) -> JsonObject:
    """Return what the figures on the test split depend on besides the run itself, as JSON holds it."""
    decoding = json.loads(json.dumps(dataclasses.asdict(config.decoding)))
    return {"decoding": decoding, "average_last": config.training.average_last, "test": config.data.test}


def _test(config: Config, run: RunDir, pairs: Pairs | None) -> JsonObject | None:
    """Score the run on the test split and write `result.json`. Return the figures, or None without a test split."""
    if config.training.average_last:
        steps = on_main_process(checkpoint_steps)(run)  # a run may have fewer than it averages
        average_checkpoints(run, abstract_params(config.model), steps[-config.training.average_last :])
    settings = {"settings": _test_settings(config)}
    if pairs is None:
        on_main_process(run.write)(run.result.name, to_json(settings, indent=2) + "\n")
        logger.info("%s has no test: data.test is empty", run.path)
        return None
    checkpoint = config.decoding.checkpoint
    report = evaluate_pairs(Translator.load(run.path, checkpoint=checkpoint), pairs)
    for index in range(0, len(pairs), -(-len(pairs) // 5)):
        logger.info("    %s  ->  %s", printable(pairs.source[index]), printable(report.translations[index]))
    result = {"run": str(run.path), "checkpoint": checkpoint, "split": "test", **report.to_dict(), **settings}
    on_main_process(run.write)(run.result.name, to_json(result, indent=2) + "\n")
    return result
