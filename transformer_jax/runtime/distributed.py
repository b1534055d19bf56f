"""Several processes, on one machine or many, that work as one: how they start, agree, share results and end.

JAX's own runtime joins them (https://docs.jax.dev/en/latest/multi_process.html). In one process every function here
does nothing, at no cost. All processes call those of them that say so, in the same order.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from transformer_jax.types import UserError, first_line

# jax is imported inside the functions, so that the command line can read its flags before jax starts.

T = TypeVar("T")
_has_joined = False

START_SECONDS = 300  # for all processes to start
HEARTBEAT_SECONDS = 30  # a process that has not been heard of for so long is taken for dead
SHUTDOWN_SECONDS = 20  # for all processes to end
SHARED_SECONDS = 30  # until a file that one host has made is seen by the others


@dataclass(frozen=True)
class Cluster:
    """Which processes work together. Not needed for one process, nor where JAX recognizes the cluster: SLURM, Open MPI,
    TPU pods, Kubernetes (docs/scaling.md). All three flags, or --num-processes 1 for a process of its own anywhere."""

    coordinator_address: str | None = None
    """HOST:PORT at which the others reach process 0."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""


def join(cluster: Cluster, environment: Mapping[str, str] = os.environ, timeout: float = START_SECONDS) -> bool:
    """Connects this process with the others, before anything else asks for a device. Returns whether there are any.

    Args:
        cluster: from flags; where it says nothing, the environment decides.
        environment: the variables that clusters set.
        timeout: seconds for all to start.

    Raises:
        UserError: not all flags, values out of range, a cluster that JAX does not recognize, no contact in time.
    """
    given = {f"--{name.replace('_', '-')}": value for name, value in vars(cluster).items()}
    if cluster.num_processes == 1 and cluster.coordinator_address is None and not cluster.process_id:
        return False
    is_explicit = any(value is not None for value in given.values())
    if is_explicit:
        _check(cluster, given)
    elif not is_cluster(environment):
        return False
    import jax

    # It takes SIGTERM away from Python. The training loop agrees on a signal by itself.
    jax.config.update("jax_enable_preemption_service", False)
    options: dict[str, Any] = {
        "initialization_timeout": int(timeout),
        "heartbeat_timeout_seconds": HEARTBEAT_SECONDS,
        "shutdown_timeout_seconds": SHUTDOWN_SECONDS,
    }
    if is_explicit:
        options |= {**vars(cluster), "cluster_detection_method": "deactivate"}
        if cluster.process_id:
            _wait_for(str(cluster.coordinator_address), timeout)
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError, OSError) as error:
        if not is_explicit and "coordinator_address should be defined" in str(error):
            return False  # a TPU machine that stands alone
        raise UserError(
            f"the processes could not be joined within {timeout:g} s: {first_line(error)}; are all of them started, "
            "can they reach process 0, and is its port free? --num-processes 1 starts a process of its own"
        ) from error
    global _has_joined
    _has_joined = jax.process_count() > 1
    return _has_joined


def is_multiprocess() -> bool:
    """Whether `join` found others."""
    return _has_joined


def leave(status: int) -> NoReturn:
    """Ends this process at once, without waiting for the others, who may be gone; they notice."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_cluster(environment: Mapping[str, str]) -> bool:
    """Whether these variables say that there are several processes, in a way that JAX recognizes.

    Raises:
        UserError: there are several, but JAX could not tell which is which. Each would train alone, into one folder.
    """

    def number(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else 1

    if "SLURM_STEP_NODELIST" in environment and number("SLURM_NTASKS") > 1:
        return True
    if number("OMPI_COMM_WORLD_SIZE") > 1:
        if "OMPI_MCA_orte_hnp_uri" in environment:
            return True
        raise UserError(
            "this Open MPI (5 or later) does not tell JAX where process 0 is: add --coordinator-address HOST:PORT "
            "--num-processes $OMPI_COMM_WORLD_SIZE --process-id $OMPI_COMM_WORLD_RANK, or --num-processes 1"
        )
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        import importlib.util

        if importlib.util.find_spec("kubernetes"):
            return True
        raise UserError(
            "this is a pod of an indexed Kubernetes job, and JAX needs the package kubernetes to find the others: "
            'pip install "jax[k8s]", or give --coordinator-address, --num-processes and --process-id '
            "($JOB_COMPLETION_INDEX), or --num-processes 1"
        )
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    if "," in hosts or number("MEGASCALE_NUM_SLICES") > 1:
        return True
    if not any(Path("/dev").glob("accel*")) and not Path("/dev/vfio").is_dir():
        return False
    import jax  # noqa: F401 - on a Cloud TPU machine it sets the variable below

    return "TPU_ML_PLATFORM" in environment and "TPU_SKIP_MDS_QUERY" not in environment


def _check(cluster: Cluster, given: Mapping[str, Any]) -> None:
    missing = [flag for flag, value in given.items() if value is None]
    if missing:
        there = [f"{flag} {value}" for flag, value in given.items() if value is not None]
        raise UserError(f"{' and '.join(there)} without {' and '.join(missing)}: the three go together")
    host, _, port = str(cluster.coordinator_address).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator-address is {cluster.coordinator_address!r}; HOST:PORT is needed")
    count, number = cluster.num_processes or 0, cluster.process_id or 0
    if count < 1:
        raise UserError(f"--num-processes is {count}; it must be at least 1")
    if not 0 <= number < count:
        raise UserError(f"--process-id is {number}; with --num-processes {count} it must be from 0 to {count - 1}")


def _wait_for(address: str, timeout: float) -> None:
    """Until something listens there: JAX's own client ends the program if nothing does."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise UserError(
                    f"--coordinator-address {address}: not reached within {timeout:g} s ({error.strerror or error}); "
                    "is process 0 started there, and is the port open?"
                ) from error
        time.sleep(0.2)


def is_main_process() -> bool:
    """Whether this process is the one that writes what is written once."""
    import jax

    return jax.process_index() == 0


def describe() -> str:
    """`process 1 of 2`, or nothing in one process."""
    import jax

    return f"process {jax.process_index()} of {jax.process_count()}" if jax.process_count() > 1 else ""


def gather(value: Any) -> list[Any]:
    """What each process gives, a JSON value, in their order. All call it."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return [value]
    data = json.dumps(value).encode()
    sizes = multihost_utils.process_allgather(np.array(len(data), np.int32))
    rows = multihost_utils.process_allgather(_padded(data, int(sizes.max())))
    return [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def broadcast_from_main(value: Any) -> Any:
    """What the first process gives, a JSON value; what the others give does not count. All call it."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return value
    data = json.dumps(value).encode() if is_main_process() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(data), np.int32)))
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(_padded(data, size))[:size]))


def _padded(data: bytes, size: int) -> Any:
    """Bytes as an array of one of few lengths, because each length is compiled."""
    import numpy as np

    array = np.zeros(max(64, 1 << (size - 1).bit_length()), np.uint8)
    array[: len(data)] = np.frombuffer(data, np.uint8)
    return array


def together(act: Callable[[], T]) -> T:
    """`act` in every process; where it fails in one, all fail. All call it; `act` itself must speak to no other.

    Raises:
        UserError: it failed in another process, which is named.
    """
    import jax

    if jax.process_count() == 1:
        return act()
    result, failure = None, None
    try:
        result = act()
    except Exception as error:
        failure = error
    said = gather(None if failure is None else str(failure) if isinstance(failure, UserError) else first_line(failure))
    if failure is not None:
        raise failure
    for number, message in enumerate(said):
        if message is not None:
            raise UserError(f"process {number} of {jax.process_count()} failed: {message}")
    return result  # type: ignore[return-value]


def main_process_first(act: Callable[[], T]) -> T:
    """`act` in the first process, and after it in the others, which so find the files that it has written. As
    `together` else."""
    import jax

    if jax.process_count() == 1:
        return act()
    result = together(lambda: act() if is_main_process() else None)
    return together(lambda: result if is_main_process() else act())  # type: ignore[return-value]


def run_on_main(act: Callable[[], object]) -> None:
    """`act` in the first process, for which the others wait. As `together` else."""
    together(lambda: act() if is_main_process() else None)


def check_same(what: str, value: str) -> None:
    """All call it with a text that must be the same in every process.

    Raises:
        UserError: it is not.
    """
    values = gather(value)
    others = [str(number) for number, other in enumerate(values) if other != values[0]]
    if others:
        raise UserError(f"{what} of process {', '.join(others)} differs from that of process 0: it must be the same")


def check_shared(folder: Path, timeout: float = SHARED_SECONDS) -> None:
    """Whether all processes see the same folder. All call it.

    Raises:
        UserError: one does not see a file that the first has written there.
    """
    import jax

    if jax.process_count() == 1:
        return
    mark = folder / f".seen-by-all-{broadcast_from_main(os.urandom(8).hex())}"
    run_on_main(mark.touch)

    def look() -> None:
        end = time.monotonic() + timeout
        while not mark.exists():  # NFS may be late
            if time.monotonic() >= end:
                raise UserError(
                    f"{socket.gethostname()} does not see what process 0 wrote into {folder}: the run's folder must "
                    "lie on a file system that all hosts share"
                )
            time.sleep(0.2)

    try:
        together(look)
    finally:
        if is_main_process():
            mark.unlink(missing_ok=True)


class ControlFlags(NamedTuple):
    """What the processes of a training ask for between two steps."""

    signal: int = 0
    """The number of the signal that one of them got; 0: none."""
    save: bool = False
    """Whether the first finds a checkpoint due."""


class PreemptionSync:
    """What any process asks for, heard by all between the same two steps.

    Nobody waits: a step takes along what is asked before it (`put`), and gives back the most that was asked in any
    process (`add`), which is read one step later (`hear`), so that there is no collective besides the step's. In one
    process all is heard at once.

    Args:
        mesh: of the step.
    """

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._carried: list[Any] = []

    def put(self, mine: ControlFlags) -> Any:
        """`devices 2` int32 for the next step, which gives back its maximum over the devices; None in one process."""
        import jax
        import numpy as np

        if jax.process_count() == 1:
            return None
        row = [[mine.signal, mine.save and is_main_process()]]
        rows = np.tile(np.array(row, np.int32), (jax.local_device_count(), 1))
        spec = jax.sharding.PartitionSpec(self._mesh.axis_names)
        return jax.make_array_from_process_local_data(jax.sharding.NamedSharding(self._mesh, spec), rows)

    def add(self, carried: Any) -> None:
        """What a step gave back."""
        self._carried.append(carried)

    def forget(self) -> None:
        """What is on the way was asked before a save that has just been made. A signal is asked for again."""
        self._carried = [ControlFlags() for _ in self._carried]

    def hear(self, mine: ControlFlags) -> ControlFlags:
        """What was asked before the last step but one; in one process what it asks now."""
        import jax

        if jax.process_count() == 1:
            return mine
        if len(self._carried) < 2:
            return ControlFlags()
        signal, save = jax.device_get(self._carried.pop(0))
        return ControlFlags(int(signal), bool(save))
