"""Checkpoints: the only file that knows Orbax."""

import json
import logging
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from transformer_jax.checkpoint.manifest import NAME as MANIFEST
from transformer_jax.checkpoint.manifest import has_manifest, verify, write_manifest
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.distributed import is_main_process, run_on_main
from transformer_jax.types import Params, UserError, first_line

logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax comments on every step of a save and a restore


class Checkpoints:
    """The checkpoints of a run, written in the background: `checkpoints/STEP/`.

    A step's folder gets its name when it is whole and has its manifest, so one cut short is no checkpoint. The last
    `keep` are kept, those of every `keep_every` steps, and the one that is best by the metric `best_by`.
    """

    def __init__(self, run: RunDir, keep: int = 5, best_by: str = "valid_loss", keep_every: int = 0) -> None:
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                *([checkpoint_managers.EveryNSteps(keep_every)] if keep_every else []),
                checkpoint_managers.BestN(
                    get_metric_fn=lambda metrics: selection_score(metrics, best_by),
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=lambda metrics: selection_score(metrics, best_by),  # without it metrics are not written
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
        )
        self._folder = run.checkpoints
        self._saving: int | None = None
        self._manager = ocp.CheckpointManager(run.checkpoints.absolute(), options=options)

    def save(self, step: int, state: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Starts to write `state`; it is whole after `wait` or the next call. A step that is there already stays.

        Raises:
            UserError: there is no room for it, or the one before could not be written.
        """
        if step in self._manager.all_steps():
            return
        needed, free = _size(state), shutil.disk_usage(self._folder).free
        if is_main_process() and free < needed:
            raise UserError(
                f"the checkpoint of step {step} needs {needed / 1e6:,.1f} MB and {self._folder} has {free / 1e6:,.1f} "
                f"MB free: it was not written. {self._way_on()}"
            )
        args = ocp.args.Composite(state=ocp.args.StandardSave(state))
        with self._failures_named():
            self._manager.wait_until_finished()
            self._saving = step
            self._manager.save(step, args=args, metrics=dict(metrics or {}))

    def wait(self) -> None:
        """Until all that was started is written.

        Raises:
            UserError: it could not be written.
        """
        with self._failures_named():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and lets go of the threads."""
        with self._failures_named():
            self._manager.close()

    def _write_manifest(self) -> None:
        """Called when the files are written and their folder has not yet the name of a checkpoint."""
        if is_main_process():
            (unfinished,) = self._folder.glob(f"{self._saving}.*")
            write_manifest(unfinished)

    @contextmanager
    def _failures_named(self) -> Iterator[None]:
        """A disk that is full or gone is the user's to mend."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"the checkpoint of step {self._saving} could not be written to {self._folder}: {first_line(error)}. "
                + self._way_on()
            ) from error

    def _way_on(self) -> str:
        whole = [int(path.parent.name) for path in self._folder.glob(f"[0-9]*/{MANIFEST}")]
        last = f"The last whole one is of step {max(whole)}" if whole else "There is none before it"
        return f"{last}: make room, and the same command goes on from there"

    def latest_step(self) -> int | None:
        """The last whole checkpoint."""
        return self._manager.latest_step()

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state as it was saved, on the devices and in the shardings that `abstract_state` says."""
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state)))
        return restored["state"]


def _size(state: Any) -> int:
    """Bytes on the disk, about: the arrays and a little for what Orbax notes of them."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * 11 // 10 + 2**20


def selection_score(metrics: Any, best_by: str) -> float:
    """The figure `training.best_by`, turned so that more is better; -inf where there is none."""
    value = metrics.get(best_by)
    if value is None or math.isnan(value):
        return float("-inf")
    return value if best_by == "valid_bleu" else -value


def checkpoint_steps(run: RunDir) -> list[int]:
    """The steps of the whole checkpoints, ascending."""
    if not run.checkpoints.is_dir():
        return []
    folders = [path for path in run.checkpoints.iterdir() if path.name.isdecimal() and path.is_dir()]
    is_old = run.format() == 0  # from before there were manifests
    return sorted(int(path.name) for path in folders if is_old or has_manifest(path))


def written_at(run: RunDir, step: int) -> float:
    """When a checkpoint was written: seconds since 1970, as Orbax noted it."""
    file = run.checkpoints / str(step) / "_CHECKPOINT_METADATA"
    try:
        return float(json.loads(file.read_text(encoding="utf-8"))["commit_timestamp_nsecs"]) / 1e9
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: does not say when the checkpoint was written: {first_line(error)}") from error


def resolve_checkpoint(run: RunDir, which: str, best_by: str = "valid_loss") -> Path:
    """The folder of the checkpoint named `last`, `best`, `average` or by its step.

    Raises:
        UserError: there is none; those that there are, are named.
    """
    if which == "average":
        if not (run.average / "state").is_dir():
            raise UserError(f"{run.path} has no averaged checkpoint: make one with `average {run.path} --last 5`")
        return run.average
    steps = checkpoint_steps(run)
    if not steps:
        raise UserError(f"{run.path} has no checkpoint yet (nothing in {run.checkpoints})")
    if which == "last":
        return run.checkpoints / str(steps[-1])
    if which == "best":
        return run.checkpoints / str(_best_step(run, steps, best_by))
    if which.isdecimal() and int(which) in steps:
        return run.checkpoints / str(int(which))
    raise UserError(
        f"{run.path} has no checkpoint {which!r}; there are last, best, average and the steps "
        + ", ".join(map(str, steps))
    )


def _best_step(run: RunDir, steps: list[int], best_by: str) -> int:
    files = {step: run.checkpoints / str(step) / "metrics" / "metrics" for step in steps}
    scores = {step: _stored_goodness(file, best_by) for step, file in files.items() if file.is_file()}
    scores = {step: score for step, score in scores.items() if score > float("-inf")}
    if not scores:
        raise UserError(f"{run.path} has no best checkpoint: no checkpoint there has a {best_by}; use 'last'")
    return max(scores, key=lambda step: (scores[step], step))


def _stored_goodness(file: Path, best_by: str) -> float:
    try:
        return float(selection_score(json.loads(file.read_text(encoding="utf-8")), best_by))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{file}: not the figures of a checkpoint: {first_line(error)}") from error


def load_params(checkpoint: Path, config: ModelConfig) -> Params:
    """The parameters alone of a checkpoint's folder, as arrays on the default device: their moving average where the
    run keeps one.

    Raises:
        UserError: they are not those of the model that the run's configuration describes, or the files are damaged.
    """
    if has_manifest(checkpoint):  # in a run that demands it, what has none is no checkpoint
        verify(checkpoint)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    expected = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract_params(config)
    )
    folder = (checkpoint / "state").absolute()
    try:
        with ocp.PyTreeCheckpointer() as checkpointer:
            # ControlFlags first, because a restore into other shapes fails late and in many words.
            stored = checkpointer.metadata(folder).item_metadata.tree
            averages = "ema" in stored.get("opt_state", ())  # `training.optimizer.WithAverage`
            _check_shapes(stored["opt_state"]["ema"] if averages else stored["params"], expected, checkpoint)
            target = {"opt_state": {"ema": expected}} if averages else {"params": expected}
            args = ocp.args.PyTreeRestore(
                target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
            )
            restored = checkpointer.restore(folder, args=args)
            return restored["opt_state"]["ema"] if averages else restored["params"]
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise UserError(f"cannot read the checkpoint {checkpoint}: {first_line(error)}") from error


def _check_shapes(stored: Any, expected: Any, checkpoint: Path) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))[0]
        return {"/".join(str(key.key) for key in path): tuple(leaf.shape) for path, leaf in leaves}

    have, want = shapes(stored), shapes(expected)
    problems = [f"{name} is missing" for name in want if name not in have]
    problems += [f"{name} is not part of the model" for name in have if name not in want]
    problems += [
        f"{name} has shape {have[name]}, not {want[name]}" for name in want if have.get(name, want[name]) != want[name]
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"the checkpoint {checkpoint} does not fit the model: {'; '.join(problems[:3])}{more}")


def save_params(folder: Path, params: Params) -> None:
    """Writes parameters alone, so that `load_params` reads them; what stood in the folder is replaced when whole."""
    unfinished = folder.with_name(folder.name + ".tmp")
    run_on_main(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((unfinished / "state").absolute(), {"params": params})
    run_on_main(lambda: write_manifest(unfinished))
    run_on_main(lambda: shutil.rmtree(folder, ignore_errors=True))
    run_on_main(lambda: unfinished.rename(folder))
