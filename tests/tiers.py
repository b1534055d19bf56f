"""The tiers of the tests, and the limits of time and memory in the fast tier.

`python -m pytest` runs the tests marked `fast`: no network, no process that trains, no third-party implementation.
Everything listed in SLOW is marked `slow`. Tests named on the command line run regardless of their tier:

    python -m pytest                                  # the fast tier
    python -m pytest tests/interop                    # all tests of a folder
    python -m pytest -m "fast or slow"                # all tests
    HYPOTHESIS_PROFILE=ci python -m pytest -m "slow or fuzz"   # tests outside the fast tier

conftest.py imports the hooks below.
"""

import ctypes
import importlib
import importlib.machinery
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).resolve().parent

# Files, folders and single tests that the fast tier excludes, by reason. Paths are relative to tests/. A test with a
# fixture named after a package in FULL_ONLY is slow without being listed.
SLOW = {
    "compares with PyTorch, Transformers, CTranslate2 or subword-nmt": (
        "data/test_sentencepiece.py::test_clean_up_equals_transformers",
        "data/test_sentencepiece.py::test_source_ids_equal_transformers",
        "data/test_sentencepiece.py::test_target_ids_equal_transformers",
        "data/test_sentencepiece.py::test_decoded_text_equals_transformers",
        "data/test_subword_nmt.py",
        "decoding/test_sampling.py::test_sampling_support_equals_hugging_face_warpers",
        "interop/test_annotated.py::test_model_trained_with_source_bos_translates_its_own_greedy_lines",
        "interop/test_annotated.py::test_annotated_model_with_a_configuration_without_source_bos_logs_a_warning",
        "interop/test_convert.py",
        "interop/test_ctranslate2.py",
        "interop/test_ctranslate2_refusals.py::test_model_without_padding_is_imported",
        "interop/test_ctranslate2_refusals.py::test_missing_positions_equal_those_that_ctranslate2_computes",
        "interop/test_fairseq.py",
        "interop/test_marian_refusals.py",
        "interop/test_round_trip.py",
        "parity/test_compare.py",
        "parity/test_suspects.py",
        "training/test_against_torch.py",
    ),
    "needs tensorflow-datasets": ("data/test_tfds.py",),
    "starts processes that train, kills them, or fills a disk": (
        "benchmarks/test_scripts.py",
        "runtime/test_distributed.py",
        "stress",
        "test_train_process.py",
    ),
    "trains its own run, or takes long to compile": (
        "decoding/test_ensemble.py::test_commands_use_every_run_of_an_ensemble",
        "experiments/parsing/test_parsing_command.py::test_sample_trains_and_scores_f1",
        "fuzz/test_translate_lines.py",
        "model/test_kernels_and_stacks.py::test_remat_reduces_memory",
        "test_shipped_recipes.py::test_wmt14_trains_from_hugging_face_columns_to_the_score_of_the_average",
        "test_shipped_recipes.py::test_tiny_corpus_is_memorized",
        "training/test_average_and_patience.py",
    ),
    "tests a page in a browser": ("visualization/test_attention_page.py",),
    "runs the code blocks of the documentation": ("test_docs.py",),
    "builds and installs the wheel": (
        "test_project.py::test_wheel_contains_only_the_package",
        "test_project.py::test_installed_wheel_provides_the_command_and_the_default_recipe",
    ),
}
SLOW_NAMES = frozenset(name for names in SLOW.values() for name in names)

# Files with parametrized tests that compile in each case. The fast tier runs the first and every fourth case after it.
SAMPLED = (
    "data/test_batching.py",
    "decoding/test_alignment.py",
    "decoding/test_sampling.py",
    "decoding/test_search.py",
    "evaluation/test_scoring.py",
    "interop/test_annotated.py",
    "model/test_decoding_step.py",
    "model/test_kernels_and_stacks.py",
    "model/test_reach.py",
    "model/test_segments.py",
    "model/test_transformer.py",
    "training/test_loop.py",
    "training/test_projected_loss.py",
    "training/test_sharding.py",
    "training/test_step.py",
)
SAMPLE_EVERY = 4

# Packages that only the extra `test-full` installs. The fast tier hides them, so its result does not depend on them.
FULL_ONLY = (
    "ctranslate2",
    "libtpu",
    "selenium",
    "subword_nmt",
    "tensorflow",
    "tensorflow_datasets",
    "torch",
    "transformers",
)

MAX_CPU_SECONDS = 20.0  # per test and per setup of its fixtures, in this process and its children; the slowest take 8
MAX_MEMORY_GB = 2.0  # peak of a worker
CLEAR_MEMORY_GB = 1.2  # above this, compiled code is dropped after a test

# Hypothesis profiles: percentage of the examples that a test requests. `nightly` generates new examples in each run.
PROFILES = {"dev": 20, "ci": 100, "nightly": 1000}


def examples(count: int) -> settings:
    """Return the settings of a property test with `count` examples, scaled by the selected profile."""
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=max(1, count * settings().max_examples // 100), suppress_health_check=checks)


def is_slow(file: Path, test: str, fixtures: Iterable[str]) -> bool:
    """Return whether the fast tier excludes a test.

    Args:
        file: Path of the test's file, relative to tests/.
        test: Name of the function.
        fixtures: Names of the fixtures that it uses.
    """
    names = {f"{file}::{test}", *map(str, (file, *file.parents))}
    return not SLOW_NAMES.isdisjoint(names) or not set(FULL_ONLY).isdisjoint(fixtures)


class WithoutFullOnly(importlib.machinery.PathFinder):
    """Finder that behaves as if the packages in FULL_ONLY were not installed."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        """Return None for a package in FULL_ONLY, and the module's spec otherwise."""
        return None if fullname.partition(".")[0] in FULL_ONLY else super().find_spec(fullname, path, target)


def is_fast_tier(config: pytest.Config) -> bool:
    """Return whether this session runs the fast tier and nothing else."""
    return config.option.markexpr == "fast"


def pytest_configure(config: pytest.Config) -> None:
    """Select the fast tier if the command line has no mark and no path, and select the Hypothesis profile."""
    if not config.option.markexpr and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.option.markexpr = "fast"  # xdist passes the options of the main process to its workers
    if is_fast_tier(config):
        path_finder = sys.meta_path.index(importlib.machinery.PathFinder)
        sys.meta_path[path_finder] = WithoutFullOnly

    if config.pluginmanager.has_plugin("xdist"):
        config.pluginmanager.register(XdistHooks())

    for name, max_examples in PROFILES.items():
        random = {"derandomize": True, "database": None} if name != "nightly" else {"print_blob": True}
        settings.register_profile(name, max_examples=max_examples, deadline=None, **random)
    full = os.environ.get("CI") == "true" and not is_fast_tier(config)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if full else "dev"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without fast tests in the fast tier, because they may import packages that it hides."""
    if is_fast_tier(config) and str(collection_path.relative_to(TESTS)) in SLOW_NAMES:
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark every test as fast or slow before pytest selects by mark."""
    cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        file = item.path.relative_to(TESTS)
        case = cases[file, item.originalname]
        cases[file, item.originalname] += 1
        left_out = str(file) in SAMPLED and case % SAMPLE_EVERY != 0
        if not item.get_closest_marker("slow"):
            item.add_marker("slow" if left_out or is_slow(file, item.originalname, item.fixturenames) else "fast")
        if "fuzz" in file.parts:
            item.add_marker("fuzz")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers for `-n auto`: one per core, or fewer if the memory does not suffice."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    needed = MAX_MEMORY_GB if is_fast_tier(config) else 3 * MAX_MEMORY_GB
    return max(1, min(cores, int(available_gb() / needed)))


def available_gb() -> float:
    """Return the free memory in GB, within the limit of the container if there is one, or 8 if it is unknown."""
    found = []
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    if limit.exists() and limit.read_text().strip().isdigit():
        found.append(int(limit.read_text()) - int(limit.with_name("memory.current").read_text()))
    return min(found, default=8e9) / 1e9


def cpu_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def peak_gb() -> float:
    """Return the peak memory of this process in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def current_gb() -> float:
    """Return the memory of this process in GB, or its peak if the system does not report the current value."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() / 1e9 if statm.exists() else peak_gb()


def num_mappings() -> int:
    """Return the number of memory mappings of this process, or 0 if the system does not report it."""
    maps = Path("/proc/self/maps")
    return maps.read_bytes().count(b"\n") if maps.exists() else 0


@contextmanager
def limit_cpu(item: pytest.Item, phase: str) -> Iterator[None]:
    """Fail a test of the fast tier if the block exceeds MAX_CPU_SECONDS."""
    start = cpu_seconds()
    yield
    seconds = cpu_seconds() - start
    if is_fast_tier(item.config) and seconds > MAX_CPU_SECONDS:
        pytest.fail(
            f"the {phase} of {item.nodeid} took {seconds:.0f} s of processor time; a test of the fast tier may take "
            f"{MAX_CPU_SECONDS:.0f} s. Make it faster, or list it in SLOW in tests/tiers.py.",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item):
    """Limit the time of a test's fixtures."""
    with limit_cpu(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """Limit the time of a test."""
    with limit_cpu(item, "call"):
        return (yield)


PEAKS: dict[str, float] = {}  # gigabytes, by worker
FIRST_ABOVE: list[str] = []  # the test that first took this process above MAX_MEMORY_GB
CLEAR_AT = [CLEAR_MEMORY_GB]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drop compiled code if memory is high or few of the 65,530 mappings that Linux allows a process are left."""
    if peak_gb() > MAX_MEMORY_GB and not FIRST_ABOVE:
        FIRST_ABOVE.append(item.nodeid)
    if current_gb() > CLEAR_AT[0] or num_mappings() > 40_000:
        import gc

        import jax

        jax.clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        CLEAR_AT[0] = max(CLEAR_MEMORY_GB, current_gb() + 0.3)  # avoids dropping after every test


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report a worker's peak memory to the main process, which fails the session if it is too large."""
    peak = f"{peak_gb():.2f} GB" + "".join(f", above the limit since {file}" for file in FIRST_ABOVE)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak"] = (os.environ["PYTEST_XDIST_WORKER"], peak_gb(), peak)
        return
    if not PEAKS:
        PEAKS[peak] = peak_gb()
    if is_fast_tier(session.config) and max(PEAKS.values()) > MAX_MEMORY_GB and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Print the peak memory of the workers, and the fix if it is too large."""
    terminalreporter.write_line(f"peak memory: {'; '.join(PEAKS)}")
    if is_fast_tier(config) and max(PEAKS.values(), default=0) > MAX_MEMORY_GB:
        terminalreporter.write_line(
            f"ERROR: a worker of the fast tier may use {MAX_MEMORY_GB:g} GB. Reduce the named test, or list it "
            "in SLOW in tests/tiers.py."
        )


class XdistHooks:
    """Hooks for pytest-xdist, registered only if it is active."""

    def pytest_testnodedown(self, node) -> None:
        """Collect a worker's peak memory."""
        name, peak, text = getattr(node, "workeroutput", {}).get("peak", ("", 0.0, ""))
        if name:
            PEAKS[f"{name} {text}"] = peak


def import_or_skip(name: str):
    """Import an optional package, or skip the test; with CI=true a missing package fails the test."""
    if WithoutFullOnly in sys.meta_path and name.partition(".")[0] in FULL_ONLY:
        pytest.fail(f"this test needs {name}, which the fast tier hides. List it in SLOW in tests/tiers.py")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; pip install '.[test-full]' installs every package the tests use"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
