"""Settings of all tests. They are made before jax is imported, here and in the workers of pytest-xdist,
which inherit this environment and read this file again."""

import dataclasses
import fcntl
import functools
import gc
import hashlib
import importlib.metadata
import os
import pickle
import platform
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

assert "jax" not in sys.modules, "jax was imported before conftest.py: it would see one device and no import hook"

# Eight devices on any machine, so that sharding is tested everywhere; and code that is compiled fast rather than fast
# code: most of the tests' time is compilation.
_flags = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):  # an unknown XLA flag terminates the process
    _flags += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
for _flag in _flags:
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")  # an axis added by accident is an error
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # no source locations, which tests do not read

# What one test has compiled, another need not compile again.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# What is compiled stays, and with it millions of objects that are not worth looking through again and again.
gc.set_threshold(100_000, 20, 20)


def _compilation_cache_dir(temporary: str) -> str:
    """Return a folder that keeps compiled code for the next session, in .pytest_cache/.

    It is keyed by what compiled code depends on: jaxlib, XLA's flags and the processor's features. A folder that has
    grown above 1 GB starts again from nothing, and one that cannot be written is replaced by a temporary one.
    """
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    key = "\n".join((importlib.metadata.version("jaxlib"), os.environ["XLA_FLAGS"], platform.machine(), features))
    folder = Path(__file__).parents[1] / ".pytest_cache" / f"jax-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / ".gitignore").write_text("*\n")
        if sum(entry.stat().st_size for entry in os.scandir(folder)) > 1e9:
            shutil.rmtree(folder)
    except OSError:
        return os.path.join(temporary, "compiled")
    return str(folder)


# No test asks a network, nor reads or fills the caches in the user's home.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
_own_folder = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    _own_folder = tempfile.TemporaryDirectory(prefix="transformer-jax-tests-")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compilation_cache_dir(_own_folder.name))
    os.environ["HF_HOME"] = os.path.join(_own_folder.name, "huggingface")
    os.environ["TFDS_DATA_DIR"] = os.path.join(_own_folder.name, "tensorflow_datasets")

# Shapes in annotations are checked in tests only: a hook rewrites these packages when they are imported.
from jaxtyping import install_import_hook  # noqa: E402  after the settings above

install_import_hook(
    ["transformer_jax.model", "transformer_jax.training", "transformer_jax.decoding"], "beartype.beartype"
)


from tiers import (  # noqa: E402, F401  pytest finds these hooks and fixtures here
    import_or_skip,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_xdist_auto_num_workers,
)


def pytest_unconfigure() -> None:
    if _own_folder is not None:
        _own_folder.cleanup()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder of real corpora from the environment, or skip the test if it is not set."""
    folder = os.environ.get("TRANSFORMER_JAX_DATA")
    if not folder:
        pytest.skip("TRANSFORMER_JAX_DATA names no folder of real corpora")
    return Path(folder)


@pytest.fixture(scope="session")
def optional_package():
    """Return a function that imports a package or skips the test. With CI=true a missing package fails the test."""
    return import_or_skip


TINY_RECIPE = """
import dataclasses
from pathlib import Path
from transformer_jax import Config

def get_config(name="tiny"):
    config = Config.from_json((Path(__file__).parent / "tiny.json").read_text())
    return dataclasses.replace(config, model=dataclasses.replace(config.model, d_ff=48)) if name == "wide" else config
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return a finished run of 4 steps, its corpus, and two recipes that describe it: tiny.json and tiny.py.

    One worker trains it for all. Each worker has its own copy of the run, because commands write into runs; the corpus
    is shared, because the run's configuration names it. A test that changes the run uses `tiny.copy`.
    """
    from transformer_jax.testing import train_tiny_run

    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared_tiny"
    with open(f"{shared}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not shared.with_suffix(".pickle").exists():
            trained = train_tiny_run(shared)
            (shared / "tiny.json").write_text(trained.config.to_json())
            (shared / "tiny.py").write_text(TINY_RECIPE)
            shared.with_suffix(".pickle").write_bytes(pickle.dumps(trained))
    folder = Path(shutil.copytree(shared, own / "tiny"))
    return dataclasses.replace(pickle.loads(shared.with_suffix(".pickle").read_bytes()), folder=folder)


@pytest.fixture
def cli(monkeypatch, capsysbinary):
    """Return `cli("translate", run, stdin=b"...")`, which runs a command in this process."""
    from command_line import run_command

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # restored after the test
    return functools.partial(run_command, monkeypatch, capsysbinary)
