"""The layout of a run folder.

RUN/config.json          the resolved configuration
RUN/format               the version of this layout: 1; without this file 0, from before there were manifests
RUN/data.sha256          of the encoded training pairs: a run goes on with the same or not at all
RUN/tokenizer/           vocabularies and merges
RUN/checkpoints/STEP/    parameters, optimizer state, step, and a manifest of these files
RUN/damaged/STEP/        a checkpoint whose files were not as they had been written
RUN/average/             averaged parameters, of `average` or `training.average_last`
RUN/metrics.jsonl        one JSON object a line: training rows with `loss`, validation rows with `valid_loss`
RUN/samples.jsonl        translations of a few validation sentences
RUN/result.json          the figures on the test split, once the run is finished
RUN/tensorboard/         the metrics again, for TensorBoard
RUN/diverged-STEP.json   what is known of a step whose loss or gradient was not finite
RUN/cache/               the encoded corpus; may be deleted
RUN/imported.json        where the parameters come from, if not from training
RUN/lock                 locked by the process that writes the run
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from transformer_jax.config import Config
from transformer_jax.presets import load_config
from transformer_jax.runtime.files import read_json_lines, to_json, write_atomically
from transformer_jax.types import UserError

# What may differ when a run is resumed: it changes no step that was taken already.
MAY_CHANGE = frozenset(
    f"training.{name}"
    for name in (
        *("num_steps", "log_every", "validate_every", "valid_sentences", "num_samples", "checkpoint_every"),
        *("checkpoint_seconds", "keep_checkpoints", "keep_every", "best_by", "patience", "average_last", "accumulate"),
        *("mesh_data", "mesh_fsdp", "mesh_tensor", "loss_chunk_mb", "dropout_generator", "on_divergence"),
    )
) | {"data.prefetch", "data.valid", "data.test", "model.attention_kernel", "model.remat", "model.scan_layers"}


FORMAT = 1


@dataclass(frozen=True)
class RunDir:
    """Paths of a run."""

    path: Path

    @property
    def config_file(self) -> Path:
        """`config.json`."""
        return self.path / "config.json"

    @property
    def data_sha256(self) -> Path:
        """`data.sha256`."""
        return self.path / "data.sha256"

    @property
    def tokenizer(self) -> Path:
        """`tokenizer/`."""
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        """`checkpoints/`."""
        return self.path / "checkpoints"

    @property
    def average(self) -> Path:
        """`average/`."""
        return self.path / "average"

    @property
    def metrics(self) -> Path:
        """`metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """`samples.jsonl`."""
        return self.path / "samples.jsonl"

    @property
    def result(self) -> Path:
        """`result.json`."""
        return self.path / "result.json"

    @property
    def tensorboard(self) -> Path:
        """`tensorboard/`."""
        return self.path / "tensorboard"

    @property
    def profile(self) -> Path:
        """`profile/`."""
        return self.path / "profile"

    @property
    def cache(self) -> Path:
        """`cache/`."""
        return self.path / "cache"

    @property
    def imported(self) -> Path:
        """`imported.json`."""
        return self.path / "imported.json"

    @property
    def format_file(self) -> Path:
        """`format`."""
        return self.path / "format"

    @property
    def damaged(self) -> Path:
        """`damaged/`."""
        return self.path / "damaged"

    @property
    def lock(self) -> Path:
        """`lock`."""
        return self.path / "lock"

    def format(self) -> int:
        """The version of the layout that the folder has.

        Raises:
            UserError: it is not a number.
        """
        if not self.format_file.is_file():
            return 0
        text = self.format_file.read_text(encoding="utf-8", errors="replace").strip()
        if not text.isdecimal():
            raise UserError(f"{self.format_file} holds {text[:40]!r}; it must be a number up to {FORMAT}")
        return int(text)

    def load_config(self) -> Config:
        """The run's configuration.

        Raises:
            UserError: this is no run, or one of a later version.
        """
        if not self.config_file.is_file():
            raise UserError(f"{self.path} is not a run: it has no config.json (a run is what `train` wrote)")
        if self.format() > FORMAT:
            raise UserError(
                f"{self.path} has the layout {self.format()} of a later version of transformer_jax; this one knows "
                f"those up to {FORMAT}"
            )
        return load_config(self.config_file)

    def write_config(self, config: Config) -> None:
        """Writes `config.json`, with which the folder becomes a run."""
        if not self.config_file.exists():
            write_atomically(self.format_file, f"{FORMAT}\n")
        write_atomically(self.config_file, config.to_json())

    def make(self) -> None:
        """Makes the folder, if it is not there already.

        Raises:
            UserError: it cannot be made, or holds something else than a run.
        """
        if not self.config_file.exists() and self.path.exists():
            # What a start that was cut short may have left.
            own = {self.lock.name, self.format_file.name, "format.tmp", "config.json.tmp"}
            if not self.path.is_dir() or {path.name for path in self.path.iterdir()} - own:
                raise UserError(f"{self.path} exists and is not a run (no config.json): give another --workdir")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the run folder {self.path}: {error.strerror}") from error

    def open_for_training(self, config: Config, is_bound: bool = True) -> None:
        """Makes the folder and writes `config.json`, or checks that the run there goes on under this configuration.

        With `is_bound` False a run that is there may get any other configuration.

        Raises:
            UserError: the folder holds something else, or a run whose configuration differs where it may not.
        """
        if self.config_file.exists():
            old, new = self.load_config().flat(), config.flat()
            differing = [n for n in new if new[n] != old[n] and n not in MAY_CHANGE and not n.startswith("decoding.")]
            if differing and is_bound:
                changes = ", ".join(f"{name} {old[name]!r} -> {new[name]!r}" for name in differing)
                raise UserError(
                    f"{self.path} holds a run with another configuration: {changes}. Give another --workdir, or "
                    "the old values; training.num_steps and what concerns logging and decoding may be changed"
                )
        self.make()
        self.write_config(config)


def truncate_after(path: Path, last_step: int) -> None:
    """Remove the rows of a JSON-lines file that were written after `last_step`, and a line truncated by a kill."""
    if path.exists():
        rows = [row for row in read_json_lines(path) if row.get("step", 0) <= last_step]
        write_atomically(path, "".join(to_json(row) + "\n" for row in rows))


try:
    import fcntl
except ImportError:  # a system that has other locks, where nobody is kept out
    fcntl = None  # type: ignore[assignment]


@contextmanager
def locked(run: RunDir) -> Iterator[None]:
    """Keeps other processes from writing the run while the context is open.

    The lock is the operating system's, so it ends with the process, however that ends.

    Raises:
        UserError: another process has it, which is named.
    """
    with run.lock.open("a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"{run.path} is in use by {file.read(200).strip() or 'another process'}: wait for its end or stop "
                    "it, or give another --workdir"
                ) from None
            except OSError:
                pass  # a file system without locks
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
