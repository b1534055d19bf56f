"""The run folder: its files, its manifest, and the lock of the process that writes it."""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformer_jax.checkpoint.manifest import (
    MANIFEST,
    read_manifest,
    read_verified,
    verify,
    write_checksums,
    write_manifest,
    write_verified,
)
from transformer_jax.config import Config
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import JsonObject, read_json_lines, read_text, to_json, try_lock, write_atomically
from transformer_jax.types import UserError

# Fields that may differ when a run is resumed, because they change no step that was already taken.
MAY_CHANGE = frozenset(
    {"data.directory", "data.prefetch", "data.test", "data.valid"}
    | {"model.attention_kernel", "model.remat", "model.scan_layers"}
    | {"training.accumulate", "training.average_last", "training.best_by", "training.checkpoint_every"}
    | {"training.checkpoint_seconds", "training.dropout_generator", "training.keep_checkpoints", "training.keep_every"}
    | {"training.log_every", "training.loss_chunk_mb", "training.mesh_data", "training.mesh_fsdp"}
    | {"training.mesh_tensor", "training.num_samples", "training.num_steps", "training.on_divergence"}
    | {"training.patience", "training.valid_sentences", "training.validate_every"}
)

# Version of the layout that new runs get. Layout 1 has no manifest of the run.
FORMAT = 2


class _Entry:
    """Descriptor whose value on a `RunDir` is the path of a file or folder in the run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: "RunDir", owner: type) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """A run folder: the paths of its files, its configuration, and its manifest of checksums."""

    path: Path

    # Files that affect results. The run's manifest has their checksums, which `load_config` verifies.
    config_file = _Entry("config.json")  # resolved configuration
    format_file = _Entry("format")  # version of the layout
    data_sha256 = _Entry("data.sha256")  # of the encoded training pairs; resuming requires the same pairs
    imported = _Entry("imported.json")  # origin of the parameters, if they were imported
    tokenizer = _Entry("tokenizer")  # vocabularies and merges
    result = _Entry("result.json")  # scores on the test split; verified when read, and computed again if damaged
    # Folders with manifests of their own.
    checkpoints = _Entry("checkpoints")  # STEP/ has parameters, optimizer state, step, metrics, validations
    damaged = _Entry("damaged")  # checkpoints whose files differ from their manifests
    average = _Entry("average")  # averaged parameters, written by `average` or `training.average_last`
    # Files that do not affect results. There is also diverged-STEP.json.
    metrics = _Entry("metrics.jsonl")  # one object per line: training rows with `loss`, validations with `valid_loss`
    samples = _Entry("samples.jsonl")  # translations of a few validation sentences
    tensorboard = _Entry("tensorboard")  # the numbers of metrics.jsonl
    profile = _Entry("profile")  # traces of a few steps
    cache = _Entry("cache")  # encoded corpus; may be deleted
    lock = _Entry("lock")  # locked by the process that writes the run

    def format(self) -> int:
        """Return the version of the folder's layout."""
        text = read_text(self.format_file).strip() if self.format_file.exists() else "0"
        require(text.isdecimal(), f"{self.format_file} holds {text[:40]!r}; it must be a number up to {FORMAT}")
        return int(text)

    def load_config(self) -> Config:
        """Return the run's configuration, after comparing the run's files with its manifest."""
        require(self.config_file.exists(), f"{self.path} is not a run: it has no config.json (`train` writes runs)")
        problem = f"{self.path} has the layout {self.format()} of a later version of transformer_jax"
        fix = f"this version reads layouts up to {FORMAT}. Upgrade transformer_jax"
        require(self.format() <= FORMAT, f"{problem}; {fix}")
        if (self.path / MANIFEST).exists() or self.format() > 1:
            verify(self.path, [name for name in read_manifest(self.path) if name != self.result.name])
        return Config.load(self.config_file)

    def write(self, name: str, text: str) -> None:
        """Write a file of the run and record its checksum. A kill at any moment leaves a valid run."""
        write_verified(self.path, {name: text})

    def seal(self) -> None:
        """Record the checksums of the files of a new run, from which `load_config` detects damage."""
        names = (self.config_file, self.format_file, self.data_sha256, self.imported, self.result)
        write_checksums(self.path, (*names, *self.tokenizer.glob("*")))

    def write_config(self, config: Config) -> None:
        """Write `config.json`, which makes the folder a run."""
        if not self.config_file.exists():
            self.write(self.format_file.name, f"{FORMAT}\n")
        self.write(self.config_file.name, config.to_json())

    def read_result(self) -> JsonObject:
        """Return `result.json`, or an empty dict if it is missing or damaged, because it can be computed again."""
        try:
            return read_verified(self.path, self.result.name, dict, "a result") or {}
        except UserError:
            return {}

    def discard_results(self) -> None:
        """Delete `average/` and `result.json`, which belong to a run with fewer steps."""
        shutil.rmtree(self.average, ignore_errors=True)
        shutil.rmtree(self.result) if self.result.is_dir() else self.result.unlink(missing_ok=True)

    def make(self) -> None:
        """Create the folder if it does not exist, and check that it holds nothing other than a run."""
        if not self.config_file.exists() and self.path.exists():
            # Files that an interrupted start may have left, also with the ending .tmp.
            own = {self.lock.name, self.format_file.name, self.config_file.name, MANIFEST}
            if not self.path.is_dir() or {path.name.removesuffix(".tmp") for path in self.path.iterdir()} - own:
                raise UserError(f"{self.path} exists and is not a run (no config.json): give another --workdir")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {self.path}: {error.strerror}") from error

    def open_for_training(self, config: Config, is_bound: bool = True, *, write: bool = True) -> None:
        """Create the run, or check that the existing run can be resumed with this configuration.

        `is_bound` states whether the run has trained with the configuration in the folder. If not, any field may
        change. If `write` is false, nothing is written.
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
    """Remove the rows of `metrics.jsonl` or `samples.jsonl` after a step, and lines truncated or damaged by a kill.

    With `drop_validation`, the rows of the validation at this step are also removed, because it is repeated.
    """
    if not path.exists():
        return
    rows = []
    for row in read_json_lines(path):
        step = row.get("step", 0)
        is_kept = isinstance(step, int | float) and step <= last_step
        if is_kept and drop_validation:  # rows of training have a loss, or the number of skipped steps
            is_kept = step < last_step or bool({"loss", "skipped"} & row.keys())
        if is_kept:
            rows.append(to_json(row) + "\n")
    write_atomically(path, "".join(rows))


@contextmanager
def locked(run: RunDir) -> Iterator[bool]:
    """Lock the run against other processes and yield True, or yield False if the folder is not writable."""
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
            owner, fix = file.read(200).strip() or "another process", "stop it, or give another --workdir"
            raise UserError(f"{run.path} is in use by {owner}: wait until it ends, {fix}")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield True
