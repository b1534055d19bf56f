"""Where compiled code is kept, and that a damaged entry costs no more than a compilation."""

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
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)


def test_the_folder_is_in_the_users_cache_unless_the_environment_names_one(no_variable, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compilation_cache()
    assert os.environ[VARIABLE] == str(tmp_path / "transformer_jax" / "compiled")
    monkeypatch.setenv(VARIABLE, "elsewhere")
    use_compilation_cache()
    assert os.environ[VARIABLE] == "elsewhere"


def test_without_a_home_there_is_none(no_variable, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compilation_cache.Path, "home", no_home)
    use_compilation_cache()
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(("flags", "is_set"), [([], True), (["--no-compilation-cache"], False)])
def test_the_command_line_has_it_on(no_variable, flags, is_set, capsys):
    assert cli.main(["--help", *flags]) == 0
    assert (VARIABLE in os.environ) == is_set


def test_jax_is_not_imported_before_the_cache_is_chosen():
    """It reads the variable once, when it is imported."""
    program = "import sys; from transformer_jax import cli; print('jax' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_a_second_process_finds_what_the_first_compiled_and_a_torn_entry_is_compiled_again(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def run():
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        value, hits = done.stdout.split()
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
