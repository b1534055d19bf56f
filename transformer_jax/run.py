"""What the command `train` does, as a function."""

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer_jax.checkpoint.averaging import average_checkpoints, choose_steps
from transformer_jax.checkpoint.checkpoint import checkpoint_steps, load_params, resolve_checkpoint
from transformer_jax.checkpoint.recovery import recover
from transformer_jax.checkpoint.run_dir import RunDir, locked
from transformer_jax.config import Config
from transformer_jax.data.batching import Plan, Rows, make_batch
from transformer_jax.data.corpus import read_split
from transformer_jax.data.encoding import EncodedPairs, load_or_encode
from transformer_jax.data.loader import batch_iterator, plan_batches
from transformer_jax.data.pairs import Pairs
from transformer_jax.data.tokenizer_pair import TokenizerPair, train_tokenizers
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation.report import result_of, say_result
from transformer_jax.evaluation.validation import Validation, evaluate_pairs
from transformer_jax.model.transformer import abstract_params, count_parameters
from transformer_jax.runtime.distributed import (
    broadcast_from_main,
    check_same,
    check_shared,
    is_main_process,
    main_process_first,
    run_on_main,
    together,
)
from transformer_jax.runtime.files import to_json
from transformer_jax.training.loop import Evaluation, Outcome, fit
from transformer_jax.training.sharding import make_mesh, row_multiple, row_parts
from transformer_jax.types import Batch, Params, RowParts, UserError

Say = Callable[[str], None]


def train(
    config: Config, workdir: str | Path, say: Say = print, *, profile: bool = False, strict: bool = False
) -> Outcome | None:
    """Trains a run, or goes on with it, and scores it on the test split at the end.

    With several processes (`runtime.distributed`), all call it alike, with a folder that all of them see.

    Args:
        config: the recipe.
        workdir: the run's folder.
        say: called with each line for the user, in the first process.
        profile: whether to trace some steps into the run's `profile/`.
        strict: whether to refuse a run whose newest checkpoint is damaged, rather than to go on from the one before.

    Returns:
        How training ended; None if all steps had been done before.

    Raises:
        UserError: anything that the user can put right.
    """
    if config.decoding.checkpoint not in ("last", "best") and not config.training.average_last:
        raise UserError(
            f"decoding.checkpoint is {config.decoding.checkpoint!r} and training.average_last 0: the test after "
            "the last step can take last or best, or average with training.average_last"
        )
    run = RunDir(Path(workdir))
    check_same("the configuration", config.to_json())
    if not is_main_process():
        say = _say_nothing
    if run.imported.is_file():
        raise UserError(
            f"{run.path} was imported: train a run of its own from it, with --training.init-from {run.path} and "
            "another --workdir"
        )
    run_on_main(run.make)
    with ExitStack() as stack:
        can_write = together(lambda: stack.enter_context(locked(run)) if is_main_process() else None)
        can_write = broadcast_from_main(can_write)
        return _train(config, run, say, profile=profile, strict=strict, can_write=can_write)


def _train(config: Config, run: RunDir, say: Say, *, profile: bool, strict: bool, can_write: bool) -> Outcome | None:
    """Train in a run's folder that exists and is locked, or cannot be written."""
    find = partial(recover, strict=strict) if can_write else checkpoint_steps
    steps = broadcast_from_main(together(lambda: find(run) if is_main_process() else []))
    if not can_write and steps[-1:] != [config.training.num_steps]:
        raise UserError(f"{run.path} cannot be written, and the run is not finished. Give another --workdir")
    # Before its first checkpoint a run binds nobody: it may have failed for a reason that a flag can cure.
    run_on_main(lambda: run.open_for_training(config, is_bound=bool(steps), write=can_write))
    if can_write:
        check_shared(run.path)
    if not steps:
        run_on_main(lambda: shutil.rmtree(run.tokenizer, ignore_errors=True))
    elif steps[-1] > config.training.num_steps:
        raise UserError(f"training.num_steps is {config.training.num_steps}; {run.path} has done {steps[-1]} steps")
    elif steps[-1] == config.training.num_steps:
        say(f"{run.path} is finished: step {steps[-1]} of {config.training.num_steps}")
        result = broadcast_from_main(run.read_result())
        if result.get("asked") == _asked(config):
            say_result(result, say)
        elif not can_write:
            raise UserError(
                f"{run.result} is missing or was computed with other settings, and {run.path} cannot be written. Score "
                "the run with `evaluate`"
            )
        else:
            _test(config, run, together(lambda: read_split(config.data, "test")), say)
        return None

    started = time.monotonic()
    mesh = make_mesh(config.training.mesh_data, config.training.mesh_fsdp, config.training.mesh_tensor)
    pairs = together(lambda: read_split(config.data, "train"))
    assert pairs is not None  # data.train is never empty
    tokenizers, params = _starting_point(config, run, pairs, is_fresh=not steps)
    encoded = main_process_first(lambda: load_or_encode(config, "train", tokenizers, run.cache, pairs))
    say(f"{pairs.origin}: {encoded.report}")
    sha256 = encoded.sha256()
    check_same(f"the encoded text of {pairs.origin}", sha256)
    trained_on = broadcast_from_main(
        run.data_sha256.read_text(errors="replace").strip() if run.data_sha256.is_file() else sha256
    )
    if steps and trained_on != sha256:
        raise UserError(
            f"{pairs.origin}: not the sentence pairs that {run.path} was trained on up to step {steps[-1]}; put those "
            "back, or start another run with --workdir (and --training.init-from this one)"
        )
    run_on_main(lambda: run.write(run.data_sha256.name, sha256 + "\n"))
    plan = plan_batches(config, encoded)
    say(
        f"{plan.batches_per_epoch} batches an epoch in {len(plan.shapes)} shape(s), {plan.padding_share:.1%} padding, "
        f"in an order of {plan.order_bits:,.0f} bits; {count_parameters(config.model):,} parameters; "
        f"{jax.device_count()} {jax.devices()[0].device_kind} device(s){_in_processes()}; "
        f"ready after {time.monotonic() - started:.0f} s"
    )
    if steps:
        say(f"resuming {run.path} at step {steps[-1]}")
    test = together(lambda: read_split(config.data, "test"))  # now, so that a mistake is found before the training
    evaluate: Callable[[Params, int], Evaluation] = _no_evaluation
    valid = together(lambda: read_split(config.data, "valid"))
    if valid is not None:
        encoded_valid = main_process_first(lambda: load_or_encode(config, "valid", tokenizers, run.cache, valid))
        evaluate = Validation(config, valid, encoded_valid, tokenizers, mesh)
    # What was left by a run that was shorter.
    run_on_main(run.discard_results)
    multiple, parts = row_multiple(mesh, config.training.accumulate), row_parts(mesh)
    outcome = fit(
        config,
        run,
        mesh,
        partial(_batches_from, encoded=encoded, plan=plan, config=config, multiple=multiple, parts=parts),
        evaluate,
        params,
        warmup_batches=_empty_batches(config, encoded, plan, multiple, parts),
        profile=profile,
        sentences=partial(_sentences_of, encoded=encoded, plan=plan, tokenizers=tokenizers),
    )
    if outcome.interrupted_by:
        say(
            f"stopped by {outcome.interrupted_by} after step {outcome.step} of {config.training.num_steps}, which is "
            "saved; the same command goes on from there"
        )
        return outcome
    if outcome.stopped_early:
        patience, best_by = config.training.patience, config.training.best_by
        say(f"ended after step {outcome.step}: {patience} validations in a row found no better {best_by}")
    _test(config, run, test, say)
    return outcome


def _no_evaluation(params: Params, step: int) -> Evaluation:
    """Of a run without a validation split."""
    return Evaluation()


def _say_nothing(line: str) -> None:
    """Of all processes but the first."""


def _in_processes() -> str:
    count = jax.process_count()
    return f" in {count} processes" if count > 1 else ""


def _empty_batches(config: Config, encoded: EncodedPairs, plan: Plan, multiple: int, parts: RowParts) -> list[Batch]:
    """Of each shape that the plan has a batch of nothing but padding."""
    nothing = np.zeros(0, np.int64)
    in_row = nothing if config.data.batching == "packed" else None
    return [make_batch(encoded, Rows(shape, nothing, in_row), config.model, multiple, parts) for shape in plan.shapes]


def _batches_from(
    start: int, *, encoded: EncodedPairs, plan: Plan, config: Config, multiple: int, parts: RowParts
) -> Any:
    return batch_iterator(
        encoded,
        plan,
        config.model,
        start,
        config.training.num_steps,
        multiple,
        config.data.prefetch,
        parts,
    )


def _sentences_of(index: int, *, encoded: EncodedPairs, plan: Plan, tokenizers: TokenizerPair) -> list[dict[str, Any]]:
    """The pairs of a global batch, as the model saw them; numbered as the encoded corpus has them, without those that
    were left out."""
    pairs = plan.rows(index).pairs
    sides = ("source", tokenizers.source, encoded.source), ("target", tokenizers.target, encoded.target)
    rows: list[dict[str, Any]] = [{"pair": int(pair)} for pair in pairs]
    for name, tokenizer, ids_of in sides:
        ids = [ids_of(int(pair)).tolist() for pair in pairs]
        for row, row_ids, text in zip(rows, ids, tokenizer.decode(ids), strict=True):
            row |= {name: text, f"{name}_ids": row_ids}
    return rows


def _starting_point(config: Config, run: RunDir, pairs: Pairs, is_fresh: bool) -> tuple[TokenizerPair, Params | None]:
    """The run's tokenizers, made or taken from `init_from` if it has none, and the parameters of `init_from`."""
    source = RunDir(Path(config.training.init_from)) if config.training.init_from else None
    if source and is_fresh:
        _check_same_function(source.load_config(), config)

    def make_or_load() -> TokenizerPair:
        if not run.tokenizer.is_dir():
            made = TokenizerPair.load(source.tokenizer) if source else train_tokenizers(config, pairs)
            made.save(run.tokenizer)
            run.seal()
        tokenizers = TokenizerPair.load(run.tokenizer)
        tokenizers.check_fits(config.model)
        return tokenizers

    tokenizers = main_process_first(make_or_load)
    if source is None or not is_fresh:
        return tokenizers, None
    old = source.load_config()
    checkpoint = resolve_checkpoint(source, old.decoding.checkpoint, old.training.best_by)
    return tokenizers, load_params(checkpoint, abstract_params(config.model))


def _check_same_function(old: Config, new: Config) -> None:
    """Weights may only go into a model that computes the same function of them, and of the same tokens."""
    free = {"model.residual_dropout", "model.attention_dropout", "model.activation_dropout", "model.initialization"}
    free |= {"model.dtype", "model.param_dtype", "tokenizer.min_frequency", "model.remat", "model.scan_layers"}
    free.add("model.attention_kernel")
    before, after = old.flat(), new.flat()
    names = [name for name in after if name.startswith(("model.", "tokenizer.")) and name not in free]
    names = [name for name in names if before[name] != after[name]]
    differing = [f"{name} {before[name]!r} there, {after[name]!r} here" for name in names]
    if differing:
        raise UserError(f"training.init_from {new.training.init_from} has another model: {'; '.join(differing)}")


def _asked(config: Config) -> dict[str, Any]:
    """What the test's figures depend on besides the run itself."""
    asked = {
        "decoding": dataclasses.asdict(config.decoding),
        "average_last": config.training.average_last,
        "test": config.data.test,
    }
    return json.loads(json.dumps(asked))  # as it will be read back: with lists for tuples


def _test(config: Config, run: RunDir, pairs: Pairs | None, say: Say) -> None:
    """The run's figures on the test split, printed and written to `result.json`."""
    if config.training.average_last:
        # Of those checkpoints that were written, at most so many.
        last = min(config.training.average_last, broadcast_from_main(len(checkpoint_steps(run))))
        average_checkpoints(run, abstract_params(config.model), choose_steps(run, last=last))
    if pairs is None:
        run_on_main(lambda: run.write(run.result.name, to_json({"asked": _asked(config)}, indent=2) + "\n"))
        say(f"{run.path} has no test: no such split is configured (data.test)")
        return
    checkpoint = config.decoding.checkpoint
    report = evaluate_pairs(Translator.load(run.path, checkpoint=checkpoint), pairs)
    for index in range(0, len(pairs), -(-len(pairs) // 5)):
        say(f"    {pairs.source[index]}  ->  {report.translations[index]}")
    result = {"run": str(run.path), "checkpoint": checkpoint, "split": "test", **result_of(report)}
    result["asked"] = _asked(config)
    run_on_main(lambda: run.write(run.result.name, to_json(result, indent=2) + "\n"))
    say_result(result, say)
