"""Several real processes on loopback with Gloo: they train as one process does, and end when one of them dies."""

import dataclasses
import json
import re
import signal
import socket
import time
from functools import partial

import numpy as np
import pytest
from processes import ROOT, start_python, wait_until
from tiny_training import changed, losses, make_config, rows_of, steps_of, train

from transformer_jax import run as commands
from transformer_jax.config import Config, TokenizerConfig
from transformer_jax.runtime.distributed import Cluster, initialize, is_cluster
from transformer_jax.testing import random_batch, tiny_config, write_tiny_corpus
from transformer_jax.types import UserError


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def config_of(corpus, **training):
    """Return a configuration on short sentences of words: every batch has one shape, also when split in two."""
    config = dataclasses.replace(tiny_config(corpus, **training), tokenizer=TokenizerConfig(kind="word"))
    return changed(config, model={"vocab_size": 32}, data={"batch_tokens": 400})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus") / "text"
    write_tiny_corpus(folder, valid=8, test=8)
    return folder


def batches(position):
    return (random_batch(position + i, rows=16) for i in range(100))


# ---------------------------------------------------------------------------------------------- two times four devices


@pytest.fixture(scope="module")
def two(tmp_path_factory, corpus):
    """Run `distributed_worker.py` in two processes of four devices. Return the folder and what each process found."""
    folder = tmp_path_factory.mktemp("two")
    train(folder / "there", make_config(num_steps=2), batches=batches)
    source = changed(config_of(corpus, num_steps=1), data={"valid": "", "test": ""})
    commands.train(source, folder / "source")
    config = config_of(corpus, average_last=2, valid_sentences=8, init_from=str(folder / "source"))
    (folder / "command.json").write_text(config.to_json())
    odd = changed(config_of(corpus, mesh_data=4, mesh_tensor=2), model={"vocab_size": 33})
    (folder / "odd.json").write_text(odd.to_json())
    worker, address = ROOT / "tests" / "runtime" / "distributed_worker.py", f"127.0.0.1:{free_port()}"
    processes = [start_python([worker, address, 2, index, folder], devices=4) for index in range(2)]
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, out + err
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return folder, [json.loads((folder / f"{index}.json").read_text()) for index in range(2)]


def test_processes_exchange_values_and_errors(two):
    _, found = two
    talks = [one["talk"] for one in found]
    assert [talk.pop("main_process_first") for talk in talks] == [0, 1]
    both = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3]], [[0], [0]]
    for index, talk in enumerate(talks):
        assert talk["gather"] == [{"index": 0, "text": ""}, {"index": 1, "text": "x" * 100}]
        assert talk["on_main_process"] == ["é\ud800", 0]
        assert "PosixPath is not JSON serializable" in talk["not_json"]
        assert talk["check_shared"] is None
        assert (
            talk["check_same"] == "the configuration of process 1 differs from that of process 0: it must be the same"
        )
        assert "file system that all hosts share" in talk["not_shared"]
        assert "do not multiply to the 8 devices there are (2 processes, 4 devices in this one)" in talk["mesh"]
        assert [mine for mine, _ in talk["rows"].values()] == [pair[index] for pair in both]
        assert talk["put"] == [list(range(8))] * 4  # the tensor axis spans the processes, so both have all rows
    assert [talk["collective"] for talk in talks] == ["process 1 of 2 failed: no such file", "no such file"]
    assert not list(two[0].glob(".seen*"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("writer", "metrics.jsonl"),
        ("row", "cannot write a row"),
        ("space", "has 0.0 MB free: it was not written"),
        ("history", "is damaged: validations/metadata has 7 bytes"),
        ("pending", "is damaged: validations/metadata has 7 bytes"),
    ],
)
def test_failure_of_process_0_alone_ends_both(two, place, message):
    _, found = two
    first, second = (one["failures"][place] for one in found)
    assert message in first
    assert second.startswith("process 0 of 2 failed: ")
    assert message in second


def test_two_processes_train_as_one_on_any_mesh_and_resume_its_run(two, tmp_path):
    folder, found = two
    train(tmp_path / "alone", make_config(num_steps=6), batches=batches)
    alone = losses(tmp_path / "alone")
    np.testing.assert_allclose(losses(folder / "data")[:6], alone, rtol=1e-5)
    np.testing.assert_allclose(losses(folder / "there"), alone[:4], rtol=1e-5)  # from 1 x 1 x 1 to fsdp over both
    assert [one["shards"] for one in found] == [[[16, 2]] * 4] * 2
    train(folder / "there", make_config(num_steps=6), batches=batches)  # back to one device
    np.testing.assert_allclose(losses(folder / "there"), alone, rtol=1e-5)


def test_processes_stop_after_the_same_step_and_save_by_one_clock(two):
    _, found = two
    for one in found:
        step, name, saved = one["data"]
        assert (name, saved[-1]) == ("SIGTERM", step)
        assert 8 <= step <= 12  # the signal arrived before step 8; a save causes another exchange of flags
        assert len(saved) in (3, 4, 5)  # every third step, because flags arrive two steps later
    assert found[0]["data"] == found[1]["data"]


def test_nonfinite_step_is_inspected_by_all_and_reported_by_one(two, tmp_path):
    folder, found = two
    too_fast = make_config(schedule="constant", peak_learning_rate=1e38, warmup_steps=1)
    with pytest.raises(UserError) as alone:
        train(tmp_path / "alone", too_fast, batches=batches)
    message = str(alone.value).replace(str(tmp_path / "alone"), str(folder / "diverged"))
    assert [one["diverged"] for one in found] == [message] * 2
    assert "the loss of step 2 is nan; first: the output of " in message
    (report,) = (folder / "diverged").glob("diverged-*.json")
    expected = json.loads((tmp_path / "alone" / report.name).read_text())
    assert json.loads(report.read_text()) == expected


def test_two_processes_translate_and_evaluate_as_one(two):
    folder, found = two
    config, run, alone = Config.from_json((folder / "command.json").read_text()), folder / "command", folder / "alone"
    assert [one["lines"] > 5 for one in found] == [True, False]
    commands.train(config, alone)
    np.testing.assert_allclose(losses(run), losses(alone), rtol=1e-5)
    figures = [rows_of(path, "step")[-1] for path in (run, alone)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4)
    assert (run / "samples.jsonl").read_text() == (alone / "samples.jsonl").read_text()
    mine, expected = (json.loads((path / "result.json").read_text()) for path in (run, alone))
    for name in ("loss", "bleu", "chrf", "exact_match", "num_sentences"):
        assert mine[name] == pytest.approx(expected[name], rel=1e-5), name
    assert "training.mesh_tensor=2 does not divide axis 0 of params/embedding/table" in found[0]["axis"]
    assert found[1]["axis"] == found[0]["axis"]


# ----------------------------------------------------------------------------------------------------- a process dies


def start_job(workdir, count, config):
    flags = [f"--workdir={workdir}", f"--coordinator-address=127.0.0.1:{free_port()}", f"--num-processes={count}"]
    recipe = workdir.with_suffix(".py")
    recipe.write_text(
        f"from transformer_jax import Config\ndef get_config():\n    return Config.from_json('''{config}''')\n"
    )
    return [
        start_python([ROOT / "train.py", recipe, *flags, f"--process-id={index}"], devices=1) for index in range(count)
    ]


def has_checkpoint_after(run, step):
    return max(steps_of(run), default=0) > step


def test_killed_process_ends_the_others_and_any_number_of_processes_resumes(corpus, tmp_path):
    """Kill the second of two processes, then the first of four, then resume with one."""
    run, done = tmp_path / "run", 0
    config = config_of(corpus, num_steps=10**6, checkpoint_every=3, validate_every=10**6, checkpoint_seconds=1e9)
    config = changed(config, data={"valid": "", "test": ""})
    for count, victim in ((2, 1), (4, 0)):
        processes = start_job(run, count, config.to_json())
        try:
            wait_until(partial(has_checkpoint_after, run, done), processes)
            processes[victim].send_signal(signal.SIGKILL)
            ends_by = time.monotonic() + 60
            for index, process in enumerate(processes):
                out, err = process.communicate(timeout=max(1, ends_by - time.monotonic()))
                assert process.returncode not in (0, None), out + err
                if index != victim:
                    # Python's line, or that of JAX, which ends the process itself.
                    assert f"error: process {index} of {count}: " in err or "another task died" in err, err
                    assert index == 0 or not re.search(r"^step \d", err, re.MULTILINE), err  # only process 0 logs
                    assert not out
                    assert (f"{count} cpu device(s) in {count} processes" in err) == (index == 0)
                    assert ("resuming" in err.lower()) == (done > 0 and index == 0)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        done = max(steps_of(run))

    last = changed(config, training={"num_steps": done + 3})
    commands.train(last, run)
    commands.train(last, tmp_path / "alone")
    np.testing.assert_allclose(losses(run), losses(tmp_path / "alone"), rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------- joining


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (Cluster("a:1"), "--coordinator-address a:1 without --num-processes and --process-id: set all three flags"),
        (Cluster(num_processes=2, process_id=0), "--process-id 0 without --coordinator-address"),
        (Cluster("localhost", 2, 0), "--coordinator-address is 'localhost'; it must be HOST:PORT"),
        (Cluster("localhost:99999", 2, 0), "--coordinator-address is 'localhost:99999'; it must be HOST:PORT"),
        (Cluster("localhost:1", 0, 0), "--num-processes is 0; it must be at least 1"),
        (Cluster("localhost:1", 2, 2), "--process-id is 2; with --num-processes 2 it must be from 0 to 1"),
        (Cluster("localhost:1", 2, -1), "--process-id is -1; with --num-processes 2"),
    ],
)
def test_invalid_flags_are_rejected(cluster, message):
    with pytest.raises(UserError, match=message):
        initialize(cluster, {})


def test_unreachable_coordinator_is_reported():
    with pytest.raises(UserError, match=r"not reached within 0.1 s .*Check that process 0 is started there"):
        initialize(Cluster(f"127.0.0.1:{free_port()}", 2, 1), {}, timeout=0.1)


SLURM = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        (SLURM, True),
        (SLURM | {"SLURM_NTASKS": "1"}, False),
        ({"SLURM_NTASKS": "8"}, False),  # the batch script itself, outside srun
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),  # any pod
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a"}, False),
        ({"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}, True),
    ],
)
def test_clusters_are_recognized(environment, expected):
    assert is_cluster(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "--process-id .OMPI_COMM_WORLD_RANK"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}, r"pip install \"jax\[k8s\]\""),
    ],
)
def test_cluster_that_jax_cannot_read_is_rejected_unless_overruled(environment, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=message):
        initialize(Cluster(), environment)
    assert not initialize(Cluster(num_processes=1), environment)
