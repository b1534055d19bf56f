"""What a run is resumed from: its newest checkpoint that is whole."""

import itertools
import warnings

from transformer_jax.checkpoint.checkpoint import checkpoint_steps
from transformer_jax.checkpoint.manifest import DamagedCheckpointError, verify, write_manifest
from transformer_jax.checkpoint.run_dir import FORMAT, RunDir
from transformer_jax.runtime.files import write_atomically
from transformer_jax.types import UserError


def recover(run: RunDir, *, strict: bool = False) -> list[int]:
    """Makes sure that the run's newest checkpoint is as it was written.

    Damaged ones are moved to `damaged/`, with a warning, so that the training writes these steps again. Checkpoints
    from before there were manifests get one, as they are.

    Args:
        run: locked by the caller.
        strict: refuse a damaged checkpoint instead.

    Returns:
        The steps of the checkpoints that are left, ascending.

    Raises:
        UserError: no checkpoint is whole of those that there are; or the newest is damaged, under `strict`.
    """
    if run.config_file.is_file() and run.format() == 0:
        for step in checkpoint_steps(run):
            write_manifest(run.checkpoints / str(step))
        write_atomically(run.format_file, f"{FORMAT}\n")
    folders = [path for path in run.checkpoints.glob("*") if path.name.isdecimal() and path.is_dir()]
    for folder in sorted(folders, key=lambda path: int(path.name), reverse=True):
        try:
            verify(folder)
            return checkpoint_steps(run)
        except DamagedCheckpointError as error:
            earlier = [step for step in checkpoint_steps(run) if step < int(folder.name)]
            if not earlier:
                raise UserError(f"{error}; there is no earlier one. Start again with another --workdir") from error
            if strict:
                raise UserError(f"{error}; without --strict, step {earlier[-1]} would be tried") from error
            run.damaged.mkdir(exist_ok=True)
            names = (f"{folder.name}-{number}" if number else folder.name for number in itertools.count())
            place = next(run.damaged / name for name in names if not (run.damaged / name).exists())
            folder.rename(place)
            warnings.warn(f"{error}. It is moved to {place}; step {earlier[-1]} is tried", stacklevel=2)
    return []
