"""The training loop: reads top to bottom."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from transformer_jax.checkpoint.checkpoint import Checkpoints
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, TrainingConfig
from transformer_jax.model.transformer import Transformer
from transformer_jax.runtime.distributed import (
    ControlFlags,
    PreemptionSync,
    broadcast_from_main,
    gather,
    is_main_process,
)
from transformer_jax.training.compilation import CompiledStep
from transformer_jax.training.divergence import Divergence, Sentences
from transformer_jax.training.early_stopping import EarlyStopping, validations_of
from transformer_jax.training.metrics import MetricsWriter, Profile, Progress
from transformer_jax.training.optimizer import eval_params, make_optimizer, make_schedule, update_count
from transformer_jax.training.sharding import (
    batch_sharding,
    gather_over_fsdp,
    put_batch,
    put_params,
    replicated,
    row_multiple,
    tree_shardings,
)
from transformer_jax.training.step import Metrics, TrainState, dropout_rng, init_rng, init_state, train_step
from transformer_jax.types import Batch, Params


@dataclass(frozen=True)
class Evaluation:
    """What a validation found."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures such as `valid_loss` and `valid_bleu`."""
    samples: Sequence[Mapping[str, str]] = ()
    """Sample translations: `source`, `reference`, `translation`."""


@dataclass(frozen=True)
class Outcome:
    """How a call of `fit` ended."""

    state: TrainState
    step: int
    interrupted_by: str | None = None
    """The name of the signal that ended it, if one did, in whichever process."""
    stopped_early: bool = False
    """Whether it ended because validations got no better."""


def fit(
    config: Config,
    run: RunDir,
    mesh: Mesh,
    batches_from: Callable[[int], Iterator[Batch]],
    evaluate: Callable[[Params, int], Evaluation],
    initial_params: Params | None = None,
    *,
    warmup_batches: Sequence[Batch] = (),
    profile: bool = False,
    sentences: Sentences = lambda index: (),
) -> Outcome:
    """Trains until `training.num_steps`, from where the run's last checkpoint stands.

    With several processes, all call it alike. They stop and save after the same steps, and the first one alone writes
    metrics and samples and says how far it is.

    Args:
        config: the run's configuration.
        run: the folder that checkpoints, metrics and samples go to.
        mesh: the devices.
        batches_from: the global batches from this position on (this process's rows of them).
        evaluate: called with the parameters and the step, `training.validate_every` steps apart and after the last.
        initial_params: what a fresh run starts from, instead of random parameters.
        warmup_batches: a batch of each shape that will come: their steps are compiled before the first one.
        profile: whether to trace some steps into the run's `profile/`.
        sentences: the sentence pairs of a global batch, for the report on a step that is not finite.

    Raises:
        UserError: the loss or the gradient is not finite, and `training.on_divergence` says stop or too many such
            steps were skipped; the last checkpoint is from before that.
    """
    training = config.training
    model = Transformer(config.model)
    optimizer = make_optimizer(training, config.model.d_model)
    schedule = make_schedule(training, config.model.d_model)
    make_rng = partial(dropout_rng, training.seed, training.dropout_generator)
    rng = jax.jit(make_rng, out_shardings=replicated(mesh))()

    checkpoints = Checkpoints(run, training.keep_checkpoints, training.best_by, training.keep_every)
    state = _first_state(config, mesh, checkpoints, initial_params)
    step = int(state.step)

    requests, asked, stops = PreemptionSync(mesh), ControlFlags(), training.on_divergence == "stop"

    def step_and_rate(state: TrainState, batch: Batch, others: Any) -> tuple[TrainState, Any, Any]:
        rng, proceed, all_asked = others
        new_state, metrics = train_step(
            state,
            batch,
            rng,
            model=model,
            optimizer=optimizer,
            smoothing=training.label_smoothing,
            mass=training.label_smoothing_over,
            accumulate=training.accumulate,
            max_logits=max_logits(training, mesh),
            proceed=proceed,
            gather_params=partial(gather_over_fsdp, mesh=mesh),
        )
        rate = schedule(update_count(state.opt_state))
        return new_state, (metrics, rate), None if all_asked is None else all_asked.max(axis=0)

    jitted_step = jax.jit(
        step_and_rate,
        in_shardings=(jax.tree.map(lambda x: x.sharding, state), batch_sharding(mesh), None),
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), replicated(mesh), replicated(mesh)),
        donate_argnums=0,
    )

    divergence = Divergence(config, run, rng, sentences, max_logits(training, mesh))
    # After a step that is not finite those that come before it is noticed change nothing, if the run is to stop: so the
    # parameters of that step are still there to be looked into. The device hands this on; nobody waits for it.
    proceed = jax.device_put(np.bool_(True), replicated(mesh))
    writer = MetricsWriter(run, step, is_main_process())
    earlier = broadcast_from_main(validations_of(run, training.best_by) if is_main_process() else [])
    patience = EarlyStopping(training.patience, training.best_by, earlier)
    with (
        Progress(step, training.num_steps, is_main_process()) as progress,
        _Signals() as signals,
        closing(writer),
        closing(Profile(run.profile if profile and is_main_process() else None, step + 1, progress.say)) as tracing,
        closing(checkpoints),  # whatever happens, a checkpoint that was started becomes whole
    ):
        compiled_step = CompiledStep(
            jitted_step,
            state,
            (rng, proceed, requests.put(asked)),
            [put_batch(batch, mesh) for batch in warmup_batches],
            progress.say,
        )

        def on_not_finite(step: int, problem: str, batch: Batch) -> None:
            in_a_row = divergence.handle(step, problem, batch, state.params)
            writer.write(step, {"skipped": float(in_a_row)})
            progress.say(f"step {step} skipped: {problem}")

        watch = _Watch(on_not_finite)
        last_saved, last_save_time = step, time.monotonic()
        progress.restart()
        batches = batches_from(step)

        def ask() -> ControlFlags:
            return ControlFlags(signals.received, time.monotonic() - last_save_time >= training.checkpoint_seconds)

        while step < training.num_steps and not patience.should_stop() and not (asked := requests.hear(ask())).signal:
            tracing.before(step + 1)
            batch = put_batch(next(batches), mesh)
            state, reported, carried = compiled_step(state, batch, (rng, proceed, requests.put(ask())))
            step += 1
            requests.add(carried)
            if stops:
                proceed = reported[0].updated
            tracing.after(step, reported)
            watch.add(step, batch, *reported)
            progress.advance()

            if step % training.log_every == 0 or step == training.num_steps:
                row = watch.row()
                if row is not None:
                    writer.write(step, row)
                    progress.show(row["loss"], row["tokens_per_second"], row["learning_rate"])

            is_last = step == training.num_steps
            figures: Mapping[str, float] = {}
            if step % training.validate_every == 0 or is_last:
                watch.check_all()
                with watch.paused():
                    try:
                        evaluation = evaluate(eval_params(state), step)
                    except BaseException:
                        if jax.process_count() == 1:  # the others may not have come to this
                            checkpoints.save(step, state)  # the steps were good, whatever the evaluation ran into
                        raise
                    figures = evaluation.metrics
                    patience.add(figures)
                    if figures:
                        writer.write(step, figures)
                        writer.write_samples(step, evaluation.samples)
                        progress.say(_describe(step, evaluation))
            is_due = step % training.checkpoint_every == 0 or bool(figures)
            if is_due or is_last or asked.save:
                watch.check_all()  # so that no checkpoint holds a state that is not finite
                checkpoints.save(step, state, figures)
                last_saved, last_save_time = step, time.monotonic()
                requests.forget()

        watch.check_all()
        if last_saved != step:
            checkpoints.save(step, state)
        received = max(gather(signals.received))
    return Outcome(state, step, signal.Signals(received).name if received else None, patience.should_stop())


def max_logits(training: TrainingConfig, mesh: Mesh | None = None) -> int:
    """The most logits to hold at a time over the devices that share the rows (None: one): `loss_chunk_mb`."""
    return training.loss_chunk_mb * 10**6 // 4 * (row_multiple(mesh) if mesh else 1)


def _first_state(config: Config, mesh: Mesh, checkpoints: Checkpoints, initial_params: Params | None) -> TrainState:
    """The last checkpoint's state, or a fresh one, on the mesh."""
    model = Transformer(config.model)
    optimizer = make_optimizer(config.training, config.model.d_model)
    make = partial(init_state, model, optimizer)
    abstract = jax.eval_shape(make, init_rng(config.training.seed))
    shardings = tree_shardings(abstract, mesh)
    latest = checkpoints.latest_step()
    if latest is not None:
        target = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
        )
        return checkpoints.restore(latest, target)
    state = jax.jit(make, out_shardings=shardings)(init_rng(config.training.seed))
    if initial_params is not None:
        state = state.replace(params=put_params(initial_params, shardings.params))
    return state


def _describe(step: int, evaluation: Evaluation) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in evaluation.metrics.items())
    lines = [f"step {step}: {figures}"]
    for sample in evaluation.samples:
        lines += [f"    {name:<11} {text}" for name, text in sample.items()]
    return "\n".join(lines)


def fetch(values: Any) -> Any:
    """From the device to the host: the loop's only place where it waits for the device."""
    return jax.device_get(values)


class _Watch:
    """Fetches each step's metrics one step late, so that the device is never waited for, and checks them.

    Args:
        on_not_finite: called with step, problem and batch of a step whose loss or gradient is not finite.
    """

    def __init__(self, on_not_finite: Callable[[int, str, Batch], None]) -> None:
        self._on_not_finite = on_not_finite
        self._pending: list[tuple[int, Batch, Metrics, Array]] = []
        self._last: tuple[Metrics, float] | None = None
        self._tokens = 0
        self._since = time.monotonic()

    def add(self, step: int, batch: Batch, metrics: Metrics, learning_rate: Array) -> None:
        self._pending.append((step, batch, metrics, learning_rate))
        while len(self._pending) > 1:
            self._check(*self._pending.pop(0))

    def check_all(self) -> None:
        while self._pending:
            self._check(*self._pending.pop(0))

    def row(self) -> dict[str, float] | None:
        """The figures of the step added last; None if it was skipped."""
        self.check_all()
        if self._last is None:
            return None
        now = time.monotonic()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._tokens, self._since = 0, now
        metrics, learning_rate = self._last
        return {
            "loss": float(metrics.loss),
            "learning_rate": learning_rate,
            "tokens_per_second": rate,
            "grad_norm": float(metrics.grad_norm),
            "param_norm": float(metrics.param_norm),
        }

    def paused(self) -> "_Pause":
        """Time spent inside is not training time."""
        return _Pause(self)

    def _check(self, step: int, batch: Batch, metrics: Metrics, learning_rate: Array) -> None:
        metrics, learning_rate = fetch((metrics, learning_rate))
        self._last = None
        for name, value in (("loss", metrics.loss), ("gradient's norm", metrics.grad_norm)):
            if not math.isfinite(value):
                with self.paused():
                    self._on_not_finite(step, f"the {name} of step {step} is {float(value)}", batch)
                return
        self._tokens += int(metrics.num_tokens)
        self._last = (metrics, float(learning_rate))


class _Pause:
    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._watch._since += time.monotonic() - self._start


class _Signals:
    """Ctrl-C and SIGTERM end the loop after the step in hand; a second one ends the program at once."""

    def __init__(self) -> None:
        self.received = 0  # its number
        self._old: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._handle)
            except ValueError:  # not in the main thread: signals are the caller's affair
                break
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for given, old in self._old.items():
            signal.signal(given, old)
