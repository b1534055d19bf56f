"""Run several processes, on one machine or many, as one program: start, agree, share results and end.

JAX's own runtime connects the processes (https://docs.jax.dev/en/latest/multi_process.html). With one process every
function here is free. "Collective" functions must be called by every process, in the same order.
"""

import functools
import importlib.util
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, ParamSpec, TypeVar

from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError, first_line

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

# jax is imported inside the functions, so that the command line can read its flags before jax starts.

P = ParamSpec("P")
T = TypeVar("T")

START_SECONDS = 300  # for all processes to start
HEARTBEAT_SECONDS = 30  # without a sign of life, after which a process counts as dead
SHUTDOWN_SECONDS = 20  # for all processes to end
SHARED_SECONDS = 30  # for a file that one host wrote to appear on the other hosts


@dataclass(frozen=True)
class Cluster:
    """The processes that work together.

    No flag is needed for a single process, nor where JAX recognizes the cluster: SLURM, Open MPI, TPU pods and
    Kubernetes (docs/scaling.md). Elsewhere set all three flags. --num-processes 1 starts a single process anywhere.
    """

    coordinator_address: str | None = None
    """HOST:PORT at which the other processes reach process 0."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """The number of this process, from 0."""


def initialize(cluster: Cluster, environment: Mapping[str, str] = os.environ, timeout: float = START_SECONDS) -> bool:
    """Connect this process with the others, before anything else uses a device. Return whether there are others.

    Flags decide, then the variables that cluster managers set. `timeout` is in seconds.
    """
    if cluster.num_processes == 1 and cluster.coordinator_address is None and not cluster.process_id:
        return False
    is_explicit = cluster != Cluster()
    if is_explicit:
        _check(cluster)
    elif not is_cluster(environment):
        return False
    import jax

    # JAX's preemption service, and so Orbax's reached_preemption, takes SIGTERM away from Python and knows neither
    # Ctrl-C nor checkpoints that are due by the clock: PreemptionSync carries all three.
    jax.config.update("jax_enable_preemption_service", False)
    if is_explicit and cluster.process_id:
        _wait_for(str(cluster.coordinator_address), timeout)
    try:
        jax.distributed.initialize(
            **vars(cluster),
            cluster_detection_method="deactivate" if is_explicit else None,
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if not is_explicit and "coordinator_address should be defined" in str(error):
            return False  # a single TPU machine
        raise UserError(
            f"the processes could not be connected within {timeout:g} s: {first_line(error)}. Check that all of them "
            "are started and can reach process 0. --num-processes 1 starts a single process"
        ) from error
    return jax.process_count() > 1


def is_multiprocess() -> bool:
    """Return whether `initialize` connected this process to others, without importing JAX or starting its devices."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized() and jax.process_count() > 1


def abort(status: int) -> NoReturn:
    """Exit this process immediately, without waiting for other processes, which may have died."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_cluster(environment: Mapping[str, str]) -> bool:
    """Return whether environment variables describe several processes that JAX recognizes.

    Several processes that JAX cannot number are a UserError: each would train alone, into one folder.
    """

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else 1

    if "SLURM_STEP_NODELIST" in environment and number("SLURM_NTASKS") > 1:
        return True
    if number("OMPI_COMM_WORLD_SIZE") > 1:
        require(
            "OMPI_MCA_orte_hnp_uri" in environment,
            "Open MPI 5 and later does not tell JAX where process 0 is: add --coordinator-address HOST:PORT "
            "--num-processes $OMPI_COMM_WORLD_SIZE --process-id $OMPI_COMM_WORLD_RANK, or --num-processes 1",
        )
        return True
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        require(
            importlib.util.find_spec("kubernetes"),
            "this is a pod of an indexed Kubernetes job, and JAX needs the package kubernetes to find the other pods: "
            'pip install "jax[k8s]", or set --coordinator-address, --num-processes and --process-id '
            "($JOB_COMPLETION_INDEX), or --num-processes 1",
        )
        return True
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts or number("MEGASCALE_NUM_SLICES") > 1:
        return True
    if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").is_dir():
        return False
    import jax  # noqa: F401 - on a Cloud TPU machine it sets the variable below

    return "TPU_ML_PLATFORM" in environment and "TPU_SKIP_MDS_QUERY" not in environment


def _check(cluster: Cluster) -> None:
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(cluster).items()}
    missing = [flag for flag, value in given.items() if value is None]
    present = [f"{flag} {value}" for flag, value in given.items() if value is not None]
    require(not missing, f"{' and '.join(present)} without {' and '.join(missing)}: set all three flags")
    host, _, port = str(cluster.coordinator_address).rpartition(":")
    is_address = host and port.isdecimal() and 0 < int(port) < 2**16
    require(is_address, f"--coordinator-address is {cluster.coordinator_address!r}; it must be HOST:PORT")
    count, number = cluster.num_processes or 0, cluster.process_id or 0
    require(count >= 1, f"--num-processes is {count}; it must be at least 1")
    legal = f"with --num-processes {count} it must be from 0 to {count - 1}"
    require(0 <= number < count, f"--process-id is {number}; {legal}")


def _wait_for(address: str, timeout: float) -> None:
    """Wait until something listens at the address: JAX's own client ends the program if nothing does."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                problem = f"--coordinator-address {address}: not reached within {timeout:g} s"
                fix = "Check that process 0 is started there and that the port is open"
                raise UserError(f"{problem} ({error.strerror or error}). {fix}") from error
        time.sleep(0.2)


def is_main_process() -> bool:
    """Return whether this is process 0, which writes what is written once."""
    import jax

    return jax.process_index() == 0


def logs_notices() -> bool:
    """Return whether this process writes log lines and warnings. Does not start the devices before `initialize`."""
    return not is_multiprocess() or is_main_process()


def process_label() -> str:
    """Return `process 1 of 2`, or an empty string for a single process."""
    import jax

    return f"process {jax.process_index()} of {jax.process_count()}" if jax.process_count() > 1 else ""


def main_process_logger(name: str) -> logging.Logger:
    """Return a logger that logs in process 0 only."""
    logger = logging.getLogger(name)
    logger.addFilter(lambda _: logs_notices())
    return logger


# The functions below move JSON with jax.experimental.multihost_utils. Unlike it, they name the process that differs.


def gather(value: object) -> list[Any]:
    """Return the JSON values of all processes, in their order. Collective."""
    import numpy as np
    from jax.experimental import multihost_utils

    if not is_multiprocess():
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data), np.int32))
    # XLA compiles each length, so the arrays have one of few lengths.
    padded = np.zeros(max(64, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def check_same(what: str, value: str) -> None:
    """Check that a text is the same in every process. Collective."""
    values = gather(value)
    differing = [str(number) for number, text in enumerate(values) if text != values[0]]
    if differing:
        raise UserError(f"{what} of process {', '.join(differing)} differs from that of process 0: it must be the same")


def _gather_results(call: Callable[[], object]) -> list[Any]:
    """Return the JSON results of a call in all processes. If it fails in any process, raise in every process."""
    failure: Exception | None = None
    try:
        outcome = [json.dumps(call()), None]
    except Exception as error:
        failure, outcome = error, [None, str(error) if isinstance(error, UserError) else first_line(error)]
    outcomes = gather(outcome)
    if failure is not None:
        raise failure
    for number, (_, message) in enumerate(outcomes):
        if message is not None:
            raise UserError(f"process {number} of {len(outcomes)} failed: {message}")
    return [json.loads(result) for result, _ in outcomes]


def _across_processes(function: Callable[P, T], run: Callable[[Callable[[], T]], T]) -> Callable[P, T]:
    """Make a function pass its calls to `run` if there are several processes."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        return run(call) if is_multiprocess() else call()

    return wrapped


def _run_where(takes_part: bool, call: Callable[[], T]) -> list[T]:
    """Run a call in the processes that take part. Return its result, or nothing, in a list. Collective."""
    results: list[T] = []
    _gather_results(lambda: results.extend([call()] if takes_part else []))
    return results


def collective(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function raise an error in every process if it fails in any process. Every process must call it.

    The function itself must not call a collective, because it may fail in one process before that call.
    """
    return _across_processes(function, lambda call: _run_where(True, call)[0])


def main_process_first(function: Callable[P, T]) -> Callable[P, T]:
    """Make a `collective` function run in process 0 and then in the others, which find the files that it wrote."""

    def run(call: Callable[[], T]) -> T:
        return (_run_where(is_main_process(), call) + _run_where(not is_main_process(), call))[0]

    return _across_processes(function, run)


def on_main_process(function: Callable[P, T]) -> Callable[P, T]:
    """Make a `collective` function run in process 0 only. Every process returns its result, which must be JSON."""
    return _across_processes(function, lambda call: _gather_results(lambda: call() if is_main_process() else None)[0])


def check_shared(folder: Path, timeout: float = SHARED_SECONDS) -> None:
    """Check that all processes see a file that process 0 writes into a folder. Collective."""
    if not is_multiprocess():
        return

    @collective
    def wait_for_mark() -> None:
        end = time.monotonic() + timeout
        problem = f"{socket.gethostname()} does not see what process 0 wrote into {folder}"
        while not mark.exists():  # NFS may be late
            require(time.monotonic() < end, f"{problem}: put the run's folder on a file system that all hosts share")
            time.sleep(0.2)

    mark = folder / f".seen-by-all-{gather(os.urandom(8).hex())[0]}"
    on_main_process(mark.touch)()
    try:
        wait_for_mark()
    finally:
        if is_main_process():
            mark.unlink(missing_ok=True)


class ControlFlags(NamedTuple):
    """What a process requests between two training steps."""

    signal: int = 0  # the number of the signal that the process received, 0 before one arrives
    save: bool = False  # whether a checkpoint is due, which only process 0 decides


class PreemptionSync:
    """Agree between processes, without waiting, to stop or to save after the same step of a mesh.

    Each step carries the local flags and returns their maximum over processes, read one step later, so no
    additional collective is needed. In a single process, flags take effect immediately.
    """

    def __init__(self, mesh: "Mesh") -> None:
        self._mesh = mesh
        self._carried: list[jax.Array | ControlFlags] = []

    def pack(self, local: ControlFlags) -> "jax.Array | None":
        """Return the local flags as an int32 array [devices, 2] for the next step, or None in a single process."""
        import jax
        import numpy as np

        if jax.process_count() == 1:
            return None
        row = np.array([[local.signal, local.save and is_main_process()]], np.int32)
        spec = jax.sharding.PartitionSpec(self._mesh.axis_names)
        return jax.make_array_from_process_local_data(
            jax.sharding.NamedSharding(self._mesh, spec), np.tile(row, (jax.local_device_count(), 1))
        )

    def push(self, carried: "jax.Array | None") -> None:
        """Store the flags that a step returned, which are the maximum over all devices, for `poll` to read."""
        if carried is not None:
            self._carried.append(carried)

    def clear(self) -> None:
        """Discard the flags of dispatched steps, after a save. The next step sends a discarded signal again."""
        self._carried = [ControlFlags() for _ in self._carried]

    def poll(self, local: ControlFlags) -> ControlFlags:
        """Return the flags of the second-to-last step, or the local flags in a single process."""
        import jax

        if jax.process_count() == 1:
            return local
        if len(self._carried) < 2:
            return ControlFlags()
        signal, save = jax.device_get(self._carried.pop(0))
        return ControlFlags(int(signal), bool(save))
