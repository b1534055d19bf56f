"""One of the processes that `test_distributed.py` starts: it runs every scenario and writes its findings as JSON.

python distributed_worker.py ADDRESS NUM_PROCESSES PROCESS_ID FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from transformer_jax.runtime import distributed

# Before anything else may ask for a device.
assert distributed.initialize(distributed.Cluster(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

import jax
import numpy as np
from tiny_training import make_config, steps_of, train

from transformer_jax import run as commands
from transformer_jax.checkpoint import checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.testing import log_lines, random_batch
from transformer_jax.training import metrics
from transformer_jax.training.sharding import make_mesh, put_batch, row_parts
from transformer_jax.types import Batch, UserError

INDEX, FOLDER = jax.process_index(), Path(sys.argv[4])


def batches_on(mesh, send_at=-1):
    """Yield this process's rows of batches of 16 rows, and send SIGTERM before batch `send_at`."""

    def batches(position):
        while True:
            if position == send_at:
                os.kill(os.getpid(), signal.SIGTERM)
            complete = random_batch(position, rows=16)
            yield Batch(*(array[row_parts(mesh).rows(16)] for array in complete if array is not None))
            position += 1

    return batches


def run(name, mesh, send_at=-1, **training):
    """Call `fit`. The second process gets a SIGTERM before batch `send_at`."""
    distributed.on_main_process((FOLDER / name).mkdir)(exist_ok=True)
    batches = batches_on(mesh, send_at if INDEX == 1 else -1)
    return train(FOLDER / name, make_config(**training), mesh=mesh, batches=batches)


def failure(act, kind=UserError):
    try:
        act()
    except kind as error:
        return str(error)
    return None


def talk():
    """Exchange values and errors, and return what this process received."""

    @distributed.collective
    def fail_in_the_second():
        if INDEX == 1:
            raise UserError("no such file")

    mesh = make_mesh(1, 1, 8)
    return {
        "put": [shard.data[:, 0].tolist() for shard in put_batch(np.arange(8)[:, None], mesh).addressable_shards],
        "gather": distributed.gather({"index": INDEX, "text": "x" * 100 * INDEX}),
        "on_main_process": distributed.on_main_process(lambda: ["é\ud800", INDEX])(),
        "not_json": failure(distributed.on_main_process(lambda: FOLDER), Exception),
        "collective": failure(fail_in_the_second),
        "main_process_first": distributed.main_process_first(lambda: INDEX)(),
        "check_same": failure(lambda: distributed.check_same("the configuration", str(INDEX))),
        "check_shared": failure(lambda: distributed.check_shared(FOLDER, 0.1)),
        "not_shared": failure(lambda: distributed.check_shared(FOLDER if INDEX == 0 else FOLDER / "talk", 0.1)),
        "mesh": failure(lambda: make_mesh(3, 1, 1)),
        "rows": {str(sizes): row_parts(make_mesh(*sizes)) for sizes in ((8, 1, 1), (2, 2, 2), (1, 1, 8))},
    }


def fail_to_write(file, row):
    raise UserError("cannot write a row")


def failures_of_the_first():
    """Return the errors of this process where only process 0 reads or writes, and fails."""
    workdir = RunDir(FOLDER / "failures")
    run("failures", make_mesh(8, 1, 1), num_steps=1)
    distributed.on_main_process(workdir.metrics.unlink)()
    distributed.on_main_process(workdir.metrics.mkdir)()
    found = {"writer": failure(lambda: run("failures", make_mesh(8, 1, 1), num_steps=2), Exception)}
    distributed.on_main_process(workdir.metrics.rmdir)()

    append = metrics._append
    if INDEX == 0:
        metrics._append = fail_to_write
    found["row"] = failure(lambda: run("failures", make_mesh(8, 1, 1), num_steps=50))
    metrics._append = append
    assert steps_of(FOLDER / "failures") == [1]

    disk_usage = checkpoint.shutil.disk_usage
    if INDEX == 0:
        checkpoint.shutil.disk_usage = lambda _: SimpleNamespace(free=0)
    found["space"] = failure(lambda: run("failures", make_mesh(8, 1, 1), num_steps=2))
    checkpoint.shutil.disk_usage = disk_usage

    history = workdir.checkpoints / "1" / "validations" / "metadata"
    distributed.on_main_process(history.write_text)("damaged")
    found["history"] = failure(lambda: run("failures", make_mesh(8, 1, 1), num_steps=2))
    found["pending"] = failure(lambda: commands._is_validation_pending(workdir, 1))
    return found


def main():
    (FOLDER / "talk").mkdir(exist_ok=True)
    found = {"talk": talk(), "failures": failures_of_the_first()}
    # A signal in one process, and a clock that only the first process may read.
    clock = 1e-9 if INDEX == 0 else 1e9
    outcome = run("data", make_mesh(8, 1, 1), 7, num_steps=50, keep_checkpoints=20, checkpoint_seconds=clock)
    found["data"] = [outcome.step, outcome.interrupted_by, steps_of(FOLDER / "data")]
    outcome = run("there", make_mesh(1, 8, 1))  # one process wrote the checkpoint of step 2
    too_fast = {"schedule": "constant", "peak_learning_rate": 1e38, "warmup_steps": 1}
    found["diverged"] = failure(lambda: run("diverged", make_mesh(1, 8, 1), **too_fast))
    table = outcome.state.params["embedding"]["table"]
    found["shards"] = [list(shard.data.shape) for shard in table.addressable_shards]
    found["axis"] = failure(lambda: commands.train(Config.from_json((FOLDER / "odd.json").read_text()), FOLDER / "odd"))
    with log_lines() as lines:
        commands.train(Config.from_json((FOLDER / "command.json").read_text()), FOLDER / "command")
    found["lines"] = len(lines)
    (FOLDER / f"{INDEX}.json").write_text(json.dumps(found, default=np.ndarray.tolist))


main()
