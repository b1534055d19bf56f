"""Run folder: its layout, its manifest, and the lock of the process that writes it.

RUN/config.json          resolved configuration
RUN/format               version of this layout: 2 (1: manifests of checkpoints only; no file, 0: no manifests)
RUN/manifest.json        checksums of config.json, format, data.sha256, imported.json, result.json and tokenizer/
RUN/data.sha256          SHA-256 of the encoded training pairs; resuming requires the same pairs
RUN/tokenizer/           vocabularies and merges
RUN/checkpoints/STEP/    parameters, optimizer state, step, metrics, and a manifest of these files
RUN/damaged/STEP/        checkpoint whose files differ from its manifest
RUN/average/             averaged parameters, written by `average` or `training.average_last`, and their manifest
RUN/metrics.jsonl        one JSON object per line: training rows with `loss`, validation rows with `valid_loss`
RUN/samples.jsonl        translations of a few validation sentences
RUN/result.json          scores on the test split, once the run is finished
RUN/tensorboard/         the numbers of metrics.jsonl for TensorBoard
RUN/diverged-STEP.json   report on a step whose loss or gradient was not finite
RUN/cache/               encoded corpus; may be deleted
RUN/imported.json        origin of the parameters, if they were imported
RUN/lock                 locked by the process that writes the run
"""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformer_jax.checkpoint.manifest import (
    MANIFEST,
    Checksum,
    DamagedFileError,
    read_manifest,
    verify,
    write_manifest,
    write_verified,
)
from transformer_jax.config import Config
from transformer_jax.presets import load_config
from transformer_jax.runtime.files import read_json, read_json_lines, read_text, to_json, try_lock, write_atomically
from transformer_jax.types import UserError

# Fields that may differ when a run is resumed, because they change no step that was already taken.
MAY_CHANGE = frozenset(
    f"training.{name}"
    for name in (
        *("num_steps", "log_every", "validate_every", "valid_sentences", "num_samples", "checkpoint_every"),
        *("checkpoint_seconds", "keep_checkpoints", "keep_every", "best_by", "patience", "average_last", "accumulate"),
        *("mesh_data", "mesh_fsdp", "mesh_tensor", "loss_chunk_mb", "dropout_generator", "on_divergence"),
    )
) | {
    "data.directory",
    "data.prefetch",
    "data.valid",
    "data.test",
    "model.attention_kernel",
    "model.remat",
    "model.scan_layers",
}

FORMAT = 2
"""Version of the layout that new runs get. Runs of lower versions are upgraded when they are resumed."""


class _Entry:
    """A file or folder of a run, as an attribute of `RunDir`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", owner: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """Paths of a run, its configuration, and its manifest. The module's docstring describes the entries."""

    path: Path

    config_file = _Entry("config.json")
    format_file = _Entry("format")
    data_sha256 = _Entry("data.sha256")
    tokenizer = _Entry("tokenizer")
    checkpoints = _Entry("checkpoints")
    damaged = _Entry("damaged")
    average = _Entry("average")
    metrics = _Entry("metrics.jsonl")
    samples = _Entry("samples.jsonl")
    result = _Entry("result.json")
    tensorboard = _Entry("tensorboard")
    profile = _Entry("profile")
    cache = _Entry("cache")
    imported = _Entry("imported.json")
    lock = _Entry("lock")

    def format(self) -> int:
        """Return the version of the folder's layout.

        Raises:
            UserError: The file does not hold a number.
        """
        if not self.format_file.exists():
            return 0
        text = read_text(self.format_file).strip()
        if not text.isdecimal():
            raise UserError(f"{self.format_file} holds {text[:40]!r}; it must be a number up to {FORMAT}")
        return int(text)

    def load_config(self) -> Config:
        """Return the run's configuration, after comparing the run's files with its manifest.

        Raises:
            DamagedFileError: A file of the run is missing or damaged.
            UserError: The folder is not a run, or was written by a later version.
        """
        if not self.config_file.exists():
            raise UserError(f"{self.path} is not a run: it has no config.json (`train` writes runs)")
        if self.format() > FORMAT:
            raise UserError(
                f"{self.path} has the layout {self.format()} of a later version of transformer_jax; this version reads "
                f"layouts up to {FORMAT}. Upgrade transformer_jax"
            )
        # result.json is compared when it is read, because it can be computed again.
        if (self.path / MANIFEST).exists():
            verify(self.path, [name for name in read_manifest(self.path) if name != self.result.name])
        elif self.format() > 1:
            raise DamagedFileError(f"{self.path} is damaged: it has no {MANIFEST}")
        return load_config(self.config_file)

    def write(self, name: str, text: str) -> None:
        """Write a file of the run and record its checksum. A kill at any moment leaves a valid run.

        Raises:
            UserError: The file cannot be written.
        """
        write_verified(self.path, {name: text})

    def seal(self) -> None:
        """Record the checksums of the run's files as they are, including the tokenizers.

        Call it once after writing the tokenizers of a new run. From then on `load_config` detects damaged files.
        """
        names = (self.config_file, self.format_file, self.data_sha256, self.imported, self.result)
        files = [path for path in (*names, *sorted(self.tokenizer.glob("*"))) if path.is_file()]
        checksums = {path.relative_to(self.path).as_posix(): [Checksum.of_file(path)] for path in files}
        write_manifest(self.path, checksums)

    def write_config(self, config: Config) -> None:
        """Write `config.json`, which makes the folder a run."""
        if not self.config_file.exists():
            self.write(self.format_file.name, f"{FORMAT}\n")
        self.write(self.config_file.name, config.to_json())

    def read_result(self) -> dict[str, Any]:
        """Return `result.json`, or an empty dict if it is missing or damaged, because it can be computed again."""
        try:
            if self.format() > 1:
                verify(self.path, [self.result.name])
            return read_json(self.result)
        except UserError:
            return {}

    def discard_results(self) -> None:
        """Delete `average/` and `result.json`, which belong to a run with fewer steps."""
        shutil.rmtree(self.average, ignore_errors=True)
        shutil.rmtree(self.result) if self.result.is_dir() else self.result.unlink(missing_ok=True)

    def make(self) -> None:
        """Create the folder if it does not exist.

        Raises:
            UserError: The folder cannot be created, or holds something other than a run.
        """
        if not self.config_file.exists() and self.path.exists():
            # Files that an interrupted start may have left.
            own = {self.lock.name} | {
                name + suffix
                for name in (self.format_file.name, self.config_file.name, MANIFEST)
                for suffix in ("", ".tmp")
            }
            if not self.path.is_dir() or {path.name for path in self.path.iterdir()} - own:
                raise UserError(f"{self.path} exists and is not a run (no config.json): give another --workdir")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {self.path}: {error.strerror}") from error

    def open_for_training(self, config: Config, is_bound: bool = True, *, write: bool = True) -> None:
        """Create the run, or check that the existing run can be resumed with this configuration.

        Args:
            config: Configuration of the run.
            is_bound: Whether steps were taken under the configuration in the folder. False accepts any configuration
                and starts a new manifest.
            write: Whether to write `config.json`. False only checks.

        Raises:
            UserError: The folder holds something else, or a run whose configuration differs in a field that must not
                change.
        """
        if self.config_file.exists() and is_bound:
            old, new = self.load_config().flat(), config.flat()
            differing = [n for n in new if new[n] != old[n] and n not in MAY_CHANGE and not n.startswith("decoding.")]
            if differing:
                changes = ", ".join(f"{name} {old[name]!r} -> {new[name]!r}" for name in differing)
                raise UserError(
                    f"{self.path} holds a run with another configuration: {changes}. Give another --workdir, or "
                    "the old values. Only training.num_steps and fields that concern logging and decoding may change"
                )
        if not write:
            return
        self.make()
        if not is_bound:
            write_manifest(self.path, {})
            self.write(self.format_file.name, f"{FORMAT}\n")
        self.write_config(config)


def truncate_after(path: Path, last_step: int, *, drop_validation: bool = False) -> None:
    """Remove the rows of a JSON-lines file that were written after `last_step`, and a line truncated by a kill.

    Args:
        path: The file: `metrics.jsonl` or `samples.jsonl`. It need not exist.
        last_step: The last step whose rows are kept.
        drop_validation: Whether to remove the rows of the validation at `last_step` too, because it is repeated.
    """
    if not path.exists():
        return
    rows = [row for row in read_json_lines(path) if row.get("step", 0) <= last_step]
    if drop_validation:  # rows of training have a loss, or the number of skipped steps
        rows = [row for row in rows if row.get("step", 0) < last_step or {"loss", "skipped"} & row.keys()]
    write_atomically(path, "".join(to_json(row) + "\n" for row in rows))


@contextmanager
def locked(run: RunDir) -> Iterator[bool]:
    """Prevent other processes from writing the run while the context is open.

    The lock is the operating system's, so it ends with the process.

    Yields:
        Whether the run can be written. False on a read-only file system or without permission.

    Raises:
        UserError: Another process holds the lock; the message names it.
    """
    try:
        file = run.lock.open("a+", encoding="utf-8")
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise UserError(f"{run.lock}: cannot be opened: {error.strerror}") from error
        yield False
        return
    with file:
        if not try_lock(file.fileno()):
            file.seek(0)
            raise UserError(
                f"{run.path} is in use by {file.read(200).strip() or 'another process'}: wait until it ends, stop it, "
                "or give another --workdir"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield True
