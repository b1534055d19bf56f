"""The compilation cache and `--deterministic`, which are set before jax is imported."""

import os
import subprocess
import sys

import pytest

from transformer_jax import cli
from transformer_jax.runtime import environment as compilation_cache
from transformer_jax.runtime.environment import VARIABLE, use_compilation_cache

PROGRAM = """
import sys
from transformer_jax.runtime.environment import use_compilation_cache
use_compilation_cache()
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("compilation_cache/cache_hits")))
print(float(jax.jit(lambda x: jnp.sum(jnp.sin(x) @ x.T))(jnp.ones((8, 8)))), sum(hits))
"""


@pytest.fixture
def no_variable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored after the test
    monkeypatch.delenv(VARIABLE)


def test_cache_is_in_the_users_cache_unless_the_environment_names_a_folder(no_variable, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compilation_cache()
    assert os.environ[VARIABLE] == str(tmp_path / "transformer_jax" / "compiled")
    monkeypatch.setenv(VARIABLE, "elsewhere")
    use_compilation_cache()
    assert os.environ[VARIABLE] == "elsewhere"


def test_user_without_a_home_has_no_cache(no_variable, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compilation_cache.Path, "home", no_home)
    use_compilation_cache()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(("flags", "is_set"), [([], True), (["--no-compilation-cache"], False)])
def test_command_line_uses_the_cache_by_default(no_variable, flags, is_set, capsys):
    assert cli.main(["--help", *flags]) == 0
    assert (VARIABLE in os.environ) == is_set


def test_jax_is_not_imported_before_the_cache_is_set():
    """JAX reads the variable once, when it is imported."""
    program = "import sys; from transformer_jax import cli; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_second_process_reads_the_cache_and_compiles_a_truncated_entry_again(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def run():
        found = subprocess.check_output([sys.executable, "-c", PROGRAM], env=environment, text=True, timeout=120)
        value, hits = found.split()
        return value, int(hits)

    value, hits = run()
    assert hits == 0
    again = run()
    assert again[0] == value
    assert again[1] > 0
    entries = [path for path in tmp_path.rglob("*-cache") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert run() == (value, 0)


def test_deterministic_sets_xla_flags_before_jax_is_imported(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    assert cli.main(["--help"]) == 0
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to="
    assert cli.main(["--help", "--deterministic"]) == 0
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to= --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
