"""Recipes are compiled for accelerators that are not here."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.scaling import bytes_per_device, traffic_per_step
from transformer_jax.accelerators import compile as compile_module
from transformer_jax.accelerators import targets
from transformer_jax.accelerators.compile import Report, estimated_seconds, largest_batch, render, typical_shapes
from transformer_jax.accelerators.program import Collective, Kernel, Program
from transformer_jax.accelerators.targets import parse_target
from transformer_jax.cli import main
from transformer_jax.presets import numbers_config
from transformer_jax.types import UserError

TINY = ["--model.d-model", "64", "--model.d-ff", "128", "--model.num-heads", "2", "--model.num-layers", "1"]


def compile_for_tpu(*flags):
    """Run `transformer-jax compile` in a process of its own, and return its status and output."""
    command = [sys.executable, "-c", "import sys; from transformer_jax.cli import main; sys.exit(main())", "compile"]
    environment = {**os.environ, "XLA_FLAGS": ""}  # a TPU's compiler ends the process at flags that it does not know
    with open(Path(tempfile.gettempdir()) / "transformer_jax_libtpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # libtpu serves one process at a time
        return subprocess.run(
            [*command, *flags, *TINY], capture_output=True, text=True, timeout=300, check=False, env=environment
        )


@pytest.fixture(scope="module")
def libtpu(optional_package):
    return optional_package("libtpu")


def test_training_for_a_tpu_has_the_bytes_and_collectives_of_the_model(libtpu):
    done = compile_for_tpu("--target", "v5e:2x2", "--mesh", "2,1,2", "--shapes", "64x16x16", "--json")
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    config = numbers_config().with_changes(model={"d_model": 64, "d_ff": 128, "num_heads": 2, "num_layers": 1})
    stored = bytes_per_device(config, data=2, tensor=2)
    # TPUs pad arrays to tiles of 8 x 128, which doubles those of a model this small.
    assert 1 <= row["argument_bytes"] / (stored.parameters + stored.optimizer) < 2
    expected = traffic_per_step(config, 64, 16, 16, data=2, tensor=2)
    found = row["collective_bytes"]
    # The three gradients of the tied table are added before or after they are reduced.
    assert stored.gradients <= found["all-reduce over data"] <= 1.02 * expected.data_all_reduce
    assert found["all-reduce over tensor"] == pytest.approx(expected.tensor_all_reduce, rel=0.1)
    assert row["fits"]
    assert row["matrix_flops"] > 0
    # Budgets: a change that adds kernels, copies or bytes is noticed here. Measured with libtpu 0.0.52.
    assert row["kernels"] <= 1_400
    assert row["copies"] <= 340
    assert row["temporary_bytes"] <= 12e6


@pytest.mark.parametrize("target", ["v4:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_other_generations_of_tpus_have_four_devices(libtpu, target):
    done = compile_for_tpu("--target", target, "--shapes", "64x16x16", "--mesh", "4,1,1")
    assert done.returncode == 0, done.stderr
    assert "all-reduce over data" in done.stdout


def test_batch_that_exceeds_the_memory_exits_with_status_1(libtpu):
    done = compile_for_tpu("--target", "v5e:2x2", "--shapes", "640000x160x160")
    assert done.returncode == 1
    assert "do not fit: they need" in done.stdout
    assert "--training.accumulate" in done.stdout


def test_decoding_is_compiled_for_one_device(libtpu):
    done = compile_for_tpu(
        "--target", "v5e:2x2", "--shapes", "8x16x16", "--decode", "--decoding.max-length-offset", "4"
    )
    assert done.returncode == 0, done.stderr
    assert "8 x 16 + 20" in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "v9"], "names no device. Use one of a100-40gb"),
        (["--target", "h100:2x2"], "neither a number of GPUs"),
        (["--target", "v5e"], "has no topology"),
        (["--target", "h100", "--mesh", "8"], "--mesh 8 is not three positive numbers"),
        (["--target", "h100", "--shapes", "8x4"], "--shapes 8x4 is not three positive numbers"),
    ],
)
def test_illegal_flags_are_explained(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(targets, "set_environment", lambda: None)
    assert main(["compile", *flags]) == 1
    assert message in capsys.readouterr().err


def test_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(targets, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"transformer-jax\[aot-tpu\]"):
        parse_target("v5e:2x4").topology()
    with pytest.raises(UserError, match=r"transformer-jax\[cuda\]"):
        parse_target("h100:8").topology()


def test_estimate_is_a_roofline_of_kernels_launches_and_rings():
    target = parse_target("h100:8")
    device = dataclasses.replace(target.device, flops=1e12, bandwidth=1e9, link=1e6, launch=0.5)
    target = dataclasses.replace(target, device=device)
    compute, memory = Kernel("matrix product", 0.65e12, 1.0, 2), Kernel("fusion", 0.0, 0.85e9)
    program = Program((compute, memory), (Collective("all-reduce", 10**6, ("data",)),))
    assert estimated_seconds(program, target, {"data": 8}) == pytest.approx(3 * (1 + 0.5) + 2 * 7 / 8)


def test_report_names_the_missing_memory():
    table = render([Report(8, 4, 4, False, memory_bytes=10**9, needed_bytes=3 * 10**9)], parse_target("h100"))
    assert "they need 2.0 GB more than the 1.0 GB of a device" in table


@pytest.mark.parametrize("bytes_per_token", [10_000, 250_000, 300_000_000])
def test_largest_batch_fills_the_memory(monkeypatch, bytes_per_token):
    tried = []

    def compile_training(config, target, shapes):
        (shape,) = shapes
        tried.append(shape)
        temporaries = 4 * 10**7 + bytes_per_token * shape.rows * max(shape[1:])
        fits = 10**9 + temporaries <= 85 * 10**9
        yield Report(*shape, fits, 10**9, temporaries, 0, 85 * 10**9, 10**9 + temporaries)

    monkeypatch.setattr(compile_module, "compile_training", compile_training)
    if bytes_per_token > 10**8:
        with pytest.raises(UserError, match="no batch was found that fits"):
            largest_batch(numbers_config(), parse_target("h100"))
    else:
        tokens = largest_batch(numbers_config(), parse_target("h100"))
        assert 0.93 <= tokens * bytes_per_token / 84e9 <= 1
    assert len(tried) <= 5


def test_typical_shapes_fill_the_batch():
    config = numbers_config().with_changes(data={"batch_tokens": 25_000, "max_shapes": 12, "max_length": 256})
    shapes = typical_shapes(config)
    assert 8 <= len(shapes) <= 12
    assert all(0.5 < shape.rows * max(shape[1:]) / 25_000 <= 1 for shape in shapes)
    packed = config.with_changes(data={"batching": "packed"})
    assert typical_shapes(packed) == ((97, 256, 256),)
