"""Resume from the newest checkpoint whose files are the files that were written."""

import itertools
import shutil
import warnings
from pathlib import Path

from transformer_jax.checkpoint.checkpoint import METRICS, checkpoint_steps
from transformer_jax.checkpoint.manifest import MANIFEST, DamagedFileError, read_manifest, verify
from transformer_jax.checkpoint.run_dir import FORMAT, RunDir
from transformer_jax.types import UserError


def recover(run: RunDir, *, strict: bool = False) -> list[int]:
    """Verify the newest checkpoint and the metrics of all checkpoints, and return the steps of the valid ones.

    Damaged checkpoints are moved to `damaged/` with a warning, so that training writes their steps again. An older one
    without a manifest is what a kill left of a checkpoint that was being deleted, so it is deleted. The caller has
    locked the run. With `strict`, damage of the newest checkpoint raises UserError.
    """
    if run.config_file.exists() and run.format() < FORMAT:
        run.load_config()  # raises for a configuration that is damaged or of a later version
        run.seal()
        run.write(run.format_file.name, f"{FORMAT}\n")
    is_newest = True
    for step in reversed(checkpoint_steps(run, complete=False)):
        folder = run.checkpoints / str(step)
        if not is_newest and not (folder / MANIFEST).exists():
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            verify(folder, None if is_newest else {METRICS} & read_manifest(folder).keys())
            is_newest = False
        except DamagedFileError as error:
            has_other = not is_newest or any(other < step for other in checkpoint_steps(run))
            if not has_other or (strict and is_newest):
                fix = "without --strict, training resumes from an undamaged checkpoint"
                fix = fix if has_other else "there is no earlier checkpoint. Start again with another --workdir"
                raise UserError(f"{error}; {fix}") from error
            warnings.warn(f"{error}. It was moved to {_move_aside(folder, run.damaged)}", stacklevel=2)
    return checkpoint_steps(run)


def _move_aside(folder: Path, target: Path) -> Path:
    """Move a damaged checkpoint into `target`, also from another file system, and return its new path."""
    try:
        target.mkdir(exist_ok=True)
        names = (f"{folder.name}-{number}" if number else folder.name for number in itertools.count())
        place = next(target / name for name in names if not (target / name).exists())
        shutil.move(folder, place)
    except OSError as error:
        raise UserError(f"{folder} is damaged and cannot be moved to {target}: {error.strerror or error}") from error
    return place
