"""The environment of every command: settings of the process, log lines, warnings and errors."""

import contextlib
import errno
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from transformer_jax.cli.parsing import UsageError
from transformer_jax.runtime.distributed import Cluster, abort, initialize, is_multiprocess, logs_notices, process_label
from transformer_jax.runtime.environment import make_deterministic, tune_malloc, use_compilation_cache
from transformer_jax.types import UserError, first_line, printable


@dataclass(frozen=True)
class GlobalOptions:
    """Options of every command, before or after its name."""

    traceback: bool = False
    """Show the traceback of errors in usage or data. Defects of the program always show it."""
    malloc_tuning: bool = True
    """Train with the C library's default allocator settings."""
    compilation_cache: bool = True
    """Compile every program again instead of keeping compiled programs on disk."""
    deterministic: bool = False
    """Compute bit-identical results in every run, on GPUs too, at lower speed."""

    def apply(self, *, trains: bool) -> None:
        """Set up the process, before jax is imported, for a command that trains a model or one that does not."""
        if self.malloc_tuning and trains:  # it speeds up training and slows down decoding
            tune_malloc()
        if self.compilation_cache:
            use_compilation_cache()
        if self.deterministic:
            make_deterministic()


# Failures of the machine rather than of the program.
_CAUSES = {
    errno.ENOSPC: "Free some space on the disk and run the command again",
    errno.EDQUOT: "Free some space within the quota and run the command again",
    errno.EROFS: "Choose a folder on a file system that can be written",
    errno.EACCES: "Check the permissions",
    errno.EIO: "Check the disk",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.ENOMEM: "Free some memory",
}


def session(command: Callable[[], int | None], *, show_traceback: bool = False) -> int:
    """Run a command: log lines to stderr, and turn an exception into lines on stderr and an exit status.

    The traceback is hidden for UserError and for failures of the machine such as a full disk, unless `show_traceback`
    asks for it. Every other exception is a defect of the program and shows it.
    """
    with _lines_on_stderr():
        try:
            try:
                return command() or 0
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except SystemExit as error:  # of the parser
            return error.code if isinstance(error.code, int) else 1
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail too
            return 1
        except (Exception, KeyboardInterrupt) as error:
            _report(error, show_traceback=show_traceback)
            if is_multiprocess() and not isinstance(error, UserError):
                abort(1)
            return 2 if isinstance(error, UsageError) else 1


def _report(error: BaseException, *, show_traceback: bool) -> None:
    """Print an exception on stderr."""
    process = f"{process_label()}: " if is_multiprocess() else ""
    is_defect, fix = False, ""
    if isinstance(error, UserError):
        text = " ".join(str(error).split())
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    elif isinstance(error, OSError) and error.errno in _CAUSES:
        text = f"{error.strerror}{f': {error.filename}' if error.filename else ''}. {_CAUSES[error.errno]}"
    else:
        text, is_defect = first_line(error), True
        if is_multiprocess():
            fix = (
                "If another process has ended, that is the cause, and its last lines have the reason. Run the command "
                "again in all processes to resume from the last checkpoint"
            )
    if (is_defect or show_traceback) and not isinstance(error, KeyboardInterrupt):
        traceback.print_exception(error)
    for line in (f"error: {process}{text}", fix):
        if line and sys.stderr is not None:
            print(printable(line), file=sys.stderr)


class _LineFormatter(logging.Formatter):
    """Formats records as plain lines without control characters. Warnings and errors start with their level."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return prefix + "\n".join(map(printable, super().format(record).splitlines()))


@contextlib.contextmanager
def _lines_on_stderr() -> Iterator[None]:
    """Write log records and user warnings as lines on stderr."""
    logger, handler = logging.getLogger("transformer_jax"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter())
    level, propagates = logger.level, logger.propagate
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # libraries add handlers to the root logger
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    if issubclass(category, UserWarning) and logs_notices():
        print(f"warning: {printable(str(message))}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def processes(cluster: Cluster) -> Iterator[bool]:
    """Connect the processes of a cluster and yield whether there are several.

    What libraries such as Gloo print to file descriptor 1 goes to stderr, because stdout is for results.
    """
    if not initialize(cluster):
        yield False
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as results:
        os.dup2(2, 1)
        try:
            with contextlib.redirect_stdout(results):
                yield True
        finally:
            results.flush()
            os.dup2(results.fileno(), 1)
