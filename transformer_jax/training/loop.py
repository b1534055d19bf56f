"""The training loop: resume, train, log, validate, save and stop."""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Wrapped
from jax.typing import ArrayLike
from jaxtyping import Array

from transformer_jax.checkpoint.checkpoint import (
    Checkpoints,
    Figures,
    ValidationHistory,
    checkpoint_steps,
    read_history,
    selection_score,
)
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, TrainingConfig
from transformer_jax.data.loader import TrainingData
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.distributed import (
    ControlFlags,
    PreemptionSync,
    gather,
    main_process_logger,
    on_main_process,
)
from transformer_jax.runtime.files import JsonObject, read_json_lines
from transformer_jax.training.compilation import CompiledStep
from transformer_jax.training.divergence import Divergence
from transformer_jax.training.metrics import Evaluation, MetricsFetcher, MetricsWriter, Profile, Progress
from transformer_jax.training.optimizer import eval_params, make_optimizer, make_schedule, update_count
from transformer_jax.training.sharding import (
    batch_sharding,
    gather_over_fsdp,
    put_batch,
    put_params,
    replicated,
    tree_shardings,
)
from transformer_jax.training.step import Metrics, TrainState, dropout_rng, init_rng, init_state, loss_spec, train_step
from transformer_jax.types import Batch, Params, printable

logger = main_process_logger(__name__)

Evaluate = Callable[[Params, int], Evaluation]  # validates parameters after a step
Controls = tuple[Array, Array, Array | None]  # the dropout key, whether updates are enabled, packed ControlFlags


@dataclass(frozen=True)
class Outcome:
    """How a training run ended, after `step` steps."""

    step: int
    state: TrainState | None = None
    """The state after the last step. None if every step had been done before."""
    interrupted_by: str | None = None
    """The name of the signal that stopped the run in any process."""
    stopped_early: bool = False
    test: JsonObject | None = None
    """The figures on the test split. None before the run is finished and for a run without a test split."""


def fit(
    config: Config,
    run: RunDir,
    mesh: Mesh,
    data: TrainingData,
    evaluate: Evaluate,
    initial_params: Params | None = None,
    *,
    profile: bool = False,
) -> Outcome:
    """Train from the run's last checkpoint until `training.num_steps`. Collective.

    All processes stop and save after the same steps; process 0 writes metrics and samples and logs progress. A fresh
    run starts from `initial_params`, or else from random parameters.
    """
    training = config.training
    checkpoints = Checkpoints(run, training.keep_checkpoints, training.best_by, training.keep_every)
    state = _first_state(config, mesh, checkpoints, initial_params)
    step, history = int(state.step), ValidationHistory.from_tree(_earlier_validations(run, training.best_by))
    make_rng = partial(dropout_rng, training.seed, training.dropout_generator)
    rng, sync = jax.jit(make_rng, out_shardings=replicated(mesh))(), PreemptionSync(mesh)
    update_enabled = jax.device_put(np.bool_(True), replicated(mesh))
    with (
        closing(Progress(step, training.num_steps)) as progress,
        StopSignals() as signals,
        closing(MetricsWriter(run, step, drop_validation=history.is_pending)) as writer,
        closing(Profile(run.profile if profile else None, step + 1)) as tracing,
        closing(checkpoints),  # completes a checkpoint that is being written, whatever happens
    ):
        controls = rng, update_enabled, sync.pack(ControlFlags())
        step_fn = jit_step(config, mesh, jax.tree.map(lambda x: x.sharding, state))
        compiled_step = CompiledStep(step_fn, state, controls, [put_batch(b, mesh) for b in data.padding_batches()])
        divergence = Divergence(config, run, rng, data.describe, loss_spec(training, mesh))
        recorder = _Recorder(training, state, history.figures, checkpoints, writer, divergence, evaluate)

        def local_flags() -> ControlFlags:
            return ControlFlags(signals.received, recorder.is_save_due())

        if history.is_pending:
            recorder.save(step, recorder.validate(step))
        progress.restart()
        batches = data.iterator(step, training.num_steps)
        while step < training.num_steps and not recorder.should_stop_early():
            flags = sync.poll(local_flags())
            if flags.signal:
                break
            tracing.before(step + 1)
            batch = put_batch(next(batches), mesh)
            controls = rng, update_enabled, sync.pack(local_flags())
            state, reported, carried_flags = compiled_step(state, batch, controls)
            step += 1
            sync.push(carried_flags)
            if training.on_divergence == "stop":  # steps after one that is not finite change nothing
                update_enabled = reported[0].updated
            tracing.after(step, reported)
            recorder.add(step, state, batch, *reported)
            progress.advance()

            is_last = step == training.num_steps
            if step % training.log_every == 0 or is_last:
                recorder.log(step, progress)
            figures = recorder.validate(step) if is_last or step % training.validate_every == 0 else {}
            if figures or is_last or flags.save or step % training.checkpoint_every == 0:
                recorder.save(step, figures)
                sync.clear()

        recorder.finish(step)
    return Outcome(step, state, signals.name_in_any_process(), recorder.should_stop_early())


def _first_state(config: Config, mesh: Mesh, checkpoints: Checkpoints, initial_params: Params | None) -> TrainState:
    """Return the last checkpoint's state, or a fresh one, sharded over the mesh."""
    abstract, latest = abstract_state(config, mesh), checkpoints.latest_step()
    if latest is not None:
        return checkpoints.restore(latest, abstract)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    make = partial(init_state, Transformer(config.model), make_optimizer(config.training, config.model.d_model))
    state = jax.jit(make, out_shardings=shardings)(init_rng(config.training.seed))
    if initial_params is not None:
        state = state.replace(params=put_params(initial_params, shardings.params))
    return state


def jit_step(config: Config, mesh: Mesh, state_shardings: TrainState) -> Wrapped:
    """Return `(state, batch, controls) -> (state, (metrics, learning rate), maximum of the control flags)`, jitted."""
    training, d_model = config.training, config.model.d_model
    schedule = make_schedule(training, d_model)
    step = partial(
        train_step,
        model=Transformer(config.model),
        optimizer=make_optimizer(training, d_model),
        loss=loss_spec(training, mesh),
        accumulate=training.accumulate,
        gather_params=partial(gather_over_fsdp, mesh=mesh),
    )

    def step_with_controls(
        state: TrainState, batch: Batch, controls: Controls
    ) -> tuple[TrainState, tuple[Metrics, ArrayLike], Array | None]:
        rng, update_enabled, flags = controls
        new_state, metrics = step(state, batch, rng, update_enabled=update_enabled)
        learning_rate = schedule(update_count(state.opt_state))
        return new_state, (metrics, learning_rate), None if flags is None else flags.max(axis=0)

    return jax.jit(
        step_with_controls,
        in_shardings=(state_shardings, batch_sharding(mesh), None),
        out_shardings=(state_shardings, replicated(mesh), replicated(mesh)),
        donate_argnums=0,
    )


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """Return the shapes, dtypes and shardings of the state."""
    make = partial(init_state, Transformer(config.model), make_optimizer(config.training, config.model.d_model))
    abstract = jax.eval_shape(make, init_rng(config.training.seed))
    return jax.tree.map(lambda x, s: x.update(sharding=s), abstract, tree_shardings(abstract, mesh))


@dataclass
class _Recorder:
    """Log, validate and save: write everything that a training run leaves in its folder."""

    training: TrainingConfig
    state: TrainState
    """The state after the last step that was dispatched."""
    validations: tuple[Figures, ...]
    checkpoints: Checkpoints
    writer: MetricsWriter
    divergence: Divergence
    evaluate: Evaluate

    def __post_init__(self) -> None:
        self._fetcher = MetricsFetcher(self._handle_nonfinite)
        self._last_saved_step, self._last_save_time = int(self.state.step), time.monotonic()

    def add(self, step: int, state: TrainState, batch: Batch, metrics: Metrics, learning_rate: Array) -> None:
        """Store the results of a step that was just dispatched, and check those of the previous step."""
        self.state = state
        self._fetcher.add(step, batch, metrics, learning_rate)

    def _handle_nonfinite(self, step: int, problem: str, batch: Batch) -> None:
        skipped_in_a_row = self.divergence.handle(step, problem, batch, self.state.params)
        self.writer.write(step, {"skipped": float(skipped_in_a_row)})
        logger.info("step %d skipped: %s", step, problem)

    def log(self, step: int, progress: Progress) -> None:
        """Write and show the metrics of the step, unless its update was skipped because of a non-finite value."""
        row = self._fetcher.row()
        if row is not None:
            self.writer.write(step, row)
            progress.show(row["loss"], row["tokens_per_second"], row["learning_rate"])

    def validate(self, step: int) -> Mapping[str, float]:
        """Evaluate the state, write the results, and return the metrics.

        If the evaluation fails or is interrupted, a checkpoint is saved, and resuming repeats the evaluation.
        """
        self._fetcher.check()
        with self._fetcher.paused():
            try:
                evaluation = self.evaluate(eval_params(self.state), step)
            except BaseException:
                if jax.process_count() == 1:  # other processes may not have reached this step
                    self.checkpoints.save(step, self.state, history=ValidationHistory(self.validations, True))
                raise
            if evaluation.metrics:
                self.validations += (evaluation.metrics,)
                self.writer.write(step, evaluation.metrics, evaluation.samples)
                logger.info("%s", _describe_evaluation(step, evaluation))
        return evaluation.metrics

    def save(self, step: int, figures: Mapping[str, float] | None = None) -> None:
        """Check the last step and the written rows, then save a checkpoint with the metrics of its validation."""
        self._fetcher.check()
        self.writer.check()
        self.checkpoints.save(step, self.state, figures, ValidationHistory(self.validations))
        self._last_saved_step, self._last_save_time = step, time.monotonic()

    def finish(self, step: int) -> None:
        """Check the last steps, save the last state unless it is saved already, and close the logs."""
        self._fetcher.check()
        if self._last_saved_step != step:
            self.save(step)
        self.writer.check()
        on_main_process(self.writer.close)()

    def is_save_due(self) -> bool:
        """Return whether a checkpoint is due: `checkpoint_seconds` have passed, or a metrics row was not written."""
        seconds = time.monotonic() - self._last_save_time
        return self.writer.failure is not None or seconds >= self.training.checkpoint_seconds

    def should_stop_early(self) -> bool:
        """Return whether validations have stopped improving."""
        return should_stop_early(self.validations, self.training.best_by, self.training.patience)


def should_stop_early(validations: Sequence[Figures], best_by: str, patience: int) -> bool:
    """Return whether the last `patience` validations did not improve on the best one before them. 0 never stops.

    Validations without the figure `best_by` do not count.

    >>> should_stop_early([{"valid_loss": 3.0}, {"valid_loss": 2.0}, {"valid_loss": 2.5}], "valid_loss", 2)
    False
    >>> should_stop_early([{"valid_loss": 2.0}, {"valid_loss": 2.5}, {"valid_loss": 2.0}], "valid_loss", 2)
    True
    """
    values = [row[best_by] for row in validations if best_by in row]
    scores = [-math.inf, *(selection_score({best_by: value}, best_by) for value in values)]
    return 0 < patience < len(scores) - scores.index(max(scores))


@on_main_process
def _earlier_validations(run: RunDir, best_by: str) -> JsonObject:
    """Return the fields of the last checkpoint's ValidationHistory; earlier versions wrote only `metrics.jsonl`."""
    steps = checkpoint_steps(run)
    history = read_history(run, steps[-1]) if steps else ValidationHistory()
    if history is None:
        rows = [row for row in read_json_lines(run.metrics) if row.get("step", 0) <= steps[-1]]
        history = ValidationHistory(tuple({best_by: row[best_by]} for row in rows if best_by in row))
    return history.to_tree()


def _describe_evaluation(step: int, evaluation: Evaluation) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in evaluation.metrics.items())
    lines = [f"step {step}: {figures}"]
    for sample in evaluation.samples:
        lines += [f"    {name:<11} {printable(text)}" for name, text in sample.items()]
    return "\n".join(lines)


class StopSignals(ExitStack):
    """Let Ctrl-C and SIGTERM end the loop after the current step; a second signal ends the program at once."""

    received = 0  # the number of the signal that this process received

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError):  # outside the main thread, signals are left to the caller
                self.callback(signal.signal, number, signal.signal(number, self._handle))
        return super().__enter__()

    def name_in_any_process(self) -> str | None:
        """Return the name of the signal that some process received, or None. Collective."""
        received = max(gather(self.received))
        return signal.Signals(received).name if received else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.close()  # restores the handlers
