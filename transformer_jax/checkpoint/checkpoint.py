"""Write, find and read checkpoints: the only file that uses Orbax."""

import json
import logging
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers

from transformer_jax.checkpoint.manifest import MANIFEST, read_verified, verify, write_checksums, write_verified
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.runtime.distributed import is_main_process, on_main_process
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import JsonObject, atomic_dir, to_json
from transformer_jax.types import EVAL_PARAMS, Params, UserError, first_line, library_errors

State = TypeVar("State")

Figures = Mapping[str, float | None]  # what a validation found, by name; None is a value that is not finite

METRICS = "metrics/metrics"  # files relative to a checkpoint
_HISTORY = "validations"
_HISTORY_FILE = f"{_HISTORY}/metadata"
_STEP = re.compile("0|[1-9][0-9]*")  # a checkpoint's folder, as str(step) names it: not 007


@dataclass(frozen=True)
class ValidationHistory:
    """The validations of a run up to a checkpoint, which decide when early stopping ends the run."""

    figures: tuple[Figures, ...] = ()
    is_pending: bool = False
    """Whether the validation of the checkpoint's own step was cut short: resuming starts with it."""

    def to_tree(self) -> JsonObject:
        """Return the history as a checkpoint stores it."""
        tree: JsonObject = json.loads(to_json(asdict(self)))
        return tree

    @classmethod
    def from_tree(cls, tree: JsonObject) -> "ValidationHistory":
        """Invert `to_tree`."""
        return cls(tuple(dict(row) for row in tree["figures"]), bool(tree["is_pending"]))


class Checkpoints:
    """Write the checkpoints of a run in the background, and restore them. An interrupted save leaves no checkpoint."""

    def __init__(self, run: RunDir, keep: int = 5, best_by: str = "valid_loss", keep_every: int = 0) -> None:
        """Keep the last `keep` checkpoints, the best one by `best_by`, and multiples of `keep_every` (0: none)."""
        score = partial(selection_score, best_by=best_by)
        best = checkpoint_managers.BestN(get_metric_fn=score, n=1, keep_checkpoints_without_metrics=False)
        kept = [checkpoint_managers.LatestN(keep), best]
        if keep_every:
            kept.append(checkpoint_managers.EveryNSteps(keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(kept),
            best_fn=score,  # Orbax writes metrics only with this option
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
            # Called when the files are written and their folder does not yet have its final name.
            async_options=ocp.AsyncOptions(post_finalization_callback=self._write_manifest),
        )
        self._run = run
        self._saving: int | None = None
        with ExitStack() as stack, library_errors(f"cannot read the checkpoint {run.checkpoints}"):
            folder = stack.enter_context(_orbax_path(run.checkpoints))
            self._manager = ocp.CheckpointManager(folder, options=options)
            self._resources = stack.pop_all()

    def save(
        self, step: int, state: PyTree, figures: Figures | None = None, history: ValidationHistory = ValidationHistory()
    ) -> None:
        """Start to write `state`; `wait` or the next call completes it, and raises UserError if that failed.

        An existing step is kept, except that figures and history replace those of a pending validation.
        """
        metrics, item = dict(figures or {}), history.to_tree()
        if step in self._manager.all_steps():
            self.wait()
            stored = read_history(self._run, step)
            if stored is not None and stored.is_pending and not history.is_pending:
                # Orbax writes these files with the same texts. The history is last, because it ends the validation.
                texts = {METRICS: json.dumps(metrics), _HISTORY_FILE: json.dumps(item)}
                self._saving = step
                with self._write_errors():
                    on_main_process(write_verified)(self._run.checkpoints / str(step), texts)
                    self._manager.reload()
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) * 11 // 10 + 2**20  # with Orbax's metadata
        self._check_space(step, needed)
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), **{_HISTORY: ocp.args.JsonSave(item)})
        with self._write_errors():
            self._manager.wait_until_finished()
            self._saving = step
            self._manager.save(step, args=args, metrics=metrics)

    @on_main_process
    def _check_space(self, step: int, needed: int) -> None:
        free = shutil.disk_usage(self._run.checkpoints).free
        if free < needed:
            sizes = f"{needed / 1e6:,.1f} MB and {self._run.checkpoints} has {free / 1e6:,.1f} MB free"
            raise UserError(f"the checkpoint of step {step} needs {sizes}: it was not written. {self._fix()}")

    def wait(self) -> None:
        """Wait until all pending checkpoint writes are complete, and raise UserError if one failed."""
        with self._write_errors():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait as `wait` does, and release the threads."""
        with self._resources, self._write_errors():
            self._manager.close()

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def restore(self, step: int, abstract_state: State) -> State:
        """Return the state of a step, bit for bit, with the shardings of `abstract_state`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        with library_errors(f"cannot read the checkpoint {self._run.checkpoints / str(step)}"):
            state: State = self._manager.restore(step, args=args)["state"]
        return state

    def _write_manifest(self) -> None:
        if is_main_process():
            (unfinished,) = self._run.checkpoints.glob(f"{self._saving}.orbax-checkpoint-tmp*")
            write_checkpoint_manifest(unfinished)

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            problem = f"the checkpoint of step {self._saving} could not be written to {self._run.checkpoints}"
            raise UserError(f"{problem}: {first_line(error)}. {self._fix()}") from error

    def _fix(self) -> str:
        steps = checkpoint_steps(self._run)
        last = f"The last complete checkpoint is of step {steps[-1]}" if steps else "There is no earlier checkpoint"
        return f"{last}: free disk space if it is full, and run the same command again to resume"


def write_checkpoint_manifest(folder: Path) -> None:
    """Write the manifest of every file in a checkpoint's subfolders. Files outside of them are Orbax's own records."""
    write_checksums(folder, folder.glob("*/**/*"))


def selection_score(metrics: Figures, best_by: str) -> float:
    """Return the metric `training.best_by` with the sign for which higher is better, or -inf if it is missing."""
    value = metrics.get(best_by)
    if value is None or math.isnan(value):
        return float("-inf")
    return value if best_by == "valid_bleu" else -value


def read_history(run: RunDir, step: int) -> ValidationHistory | None:
    """Return the validations up to a checkpoint, or None for a checkpoint from before they were stored in it."""
    checkpoint = run.checkpoints / str(step)
    return read_verified(checkpoint, _HISTORY_FILE, ValidationHistory.from_tree, "the validations of a run")


def checkpoint_steps(run: RunDir, *, complete: bool = True) -> list[int]:
    """Return the steps of the complete checkpoints in ascending order, or of all of them."""
    if not run.checkpoints.is_dir():
        return []
    folders = [path for path in run.checkpoints.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(int(path.name) for path in folders if not complete or (path / MANIFEST).is_file())


def resolve_checkpoint(run: RunDir, which: str, best_by: str = "valid_loss") -> Path:
    """Return the folder of the checkpoint named `last`, `best`, `average`, or by its step."""
    if which == "average":
        if not (run.average / "state").is_dir():
            raise UserError(f"{run.path} has no averaged checkpoint: make one with `average {run.path} --last 5`")
        return run.average
    steps = checkpoint_steps(run)
    require(steps, f"{run.path} has no checkpoint yet (nothing in {run.checkpoints})")
    if which == "last":
        return run.checkpoints / str(steps[-1])
    if which == "best":
        return run.checkpoints / str(_best_step(run, steps, best_by))
    if which.isdecimal() and int(which) in steps:
        return run.checkpoints / str(int(which))
    found = ", ".join(map(str, steps))
    raise UserError(f"{run.path} has no checkpoint {which!r}; there are last, best, average and the steps {found}")


def _best_step(run: RunDir, steps: Sequence[int], best_by: str) -> int:
    scores: dict[int, float] = {}
    for step in steps:
        score = partial(selection_score, best_by=best_by)
        found = read_verified(run.checkpoints / str(step), METRICS, score, "the metrics of a checkpoint")
        scores[step] = -math.inf if found is None else found
    best = max(steps, key=lambda step: (scores[step], step))
    if scores[best] == -math.inf:
        raise UserError(f"{run.path} has no best checkpoint: no checkpoint there has a {best_by}; use 'last'")
    return best


def load_params(checkpoint: Path, abstract_params: Params, subtrees: Sequence[Sequence[str]] = EVAL_PARAMS) -> Params:
    """Return the parameters alone of a checkpoint, in the shapes and dtypes of `abstract_params`, on one device.

    Of the `subtrees`, which are paths in the stored state, the first one that exists is read.
    """
    verify(checkpoint)
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    expected = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract_params)
    path_context, reader = _orbax_path(checkpoint / "state"), ocp.PyTreeCheckpointer()
    with library_errors(f"cannot read the checkpoint {checkpoint}"), path_context as folder, reader as checkpointer:
        # Shapes are compared first, because Orbax reports a mismatch late and at length.
        stored = checkpointer.metadata(folder).item_metadata.tree
        path = next(path for path in subtrees if _subtree(stored, path) is not None)
        _check_shapes(_subtree(stored, path), expected, checkpoint)
        target = expected
        for key in reversed(path):
            target = {key: target}
        restore_args = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=restore_args, partial_restore=True)
        return _subtree(checkpointer.restore(folder, args=args), path)


def _subtree(tree: PyTree, path: Sequence[str]) -> PyTree:
    """Return the part of a nested dict at a path, or None."""
    for key in path:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _check_shapes(stored: Params, expected: Params, checkpoint: Path) -> None:
    have, want = (
        {name: tuple(leaf.shape) for name, leaf in flatten_dict(tree, sep="/").items()} for tree in (stored, expected)
    )
    problems = [f"{name} is missing" for name in want if name not in have]
    problems += [f"{name} is not part of the model" for name in have if name not in want]
    problems += [
        f"{name} has shape {have[name]}, not {shape}" for name, shape in want.items() if have.get(name, shape) != shape
    ]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise UserError(f"the checkpoint {checkpoint} does not fit the model: {'; '.join(problems[:3])}{more}")


def save_params(folder: Path, params: Params) -> None:
    """Write parameters alone, with a manifest, in all processes. An existing folder is replaced when complete."""
    with ExitStack() as stack:
        unfinished = Path(on_main_process(lambda: str(stack.enter_context(atomic_dir(folder, replace=True))))())
        with _orbax_path(unfinished / "state") as target, ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(target, {"params": params})
        on_main_process(write_checkpoint_manifest)(unfinished)
        on_main_process(stack.close)()


@contextmanager
def _orbax_path(folder: Path) -> Iterator[Path]:
    """Yield an absolute path of `folder` that Orbax can open, and silence Orbax's log.

    Orbax and TensorStore reject brackets, backslashes, a leading `//` and names that are not UTF-8, so a folder below
    such a path is opened through a symbolic link.
    """
    absolute = folder.absolute()
    text = re.sub("^/+", "/", absolute.as_posix())
    logger = logging.getLogger("absl")  # Orbax comments on each step of saving and restoring
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        if re.fullmatch(r"[\w ./@%+=,~-]*", text):
            yield Path(text)
        else:
            with tempfile.TemporaryDirectory(prefix="transformer-jax-") as temporary:
                link = Path(temporary) / "folder"
                link.symlink_to(absolute.parent, target_is_directory=True)
                yield link / absolute.name
    finally:
        logger.setLevel(level)
