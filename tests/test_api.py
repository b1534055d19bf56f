"""The public API: every name resolves, type checkers see the same names, and importing it loads no dependency."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from api_names import api

import transformer_jax

INIT = Path(transformer_jax.__file__)
API = api()


@pytest.mark.parametrize("name", API)
def test_every_public_name_is_the_object_of_its_module(name):
    module = importlib.import_module(f"transformer_jax.{API[name]}")
    value = getattr(transformer_jax, name)
    assert value is getattr(module, name)
    assert getattr(value, "__module__", module.__name__) == module.__name__, "named with the module that defines it"


def test_all_and_dir_list_the_api():
    assert len(API) >= 45
    assert sorted(transformer_jax.__all__) == sorted(dir(transformer_jax)) == sorted(API)
    with pytest.raises(AttributeError, match="Transfomer"):
        transformer_jax.Transfomer  # noqa: B018  asking for it is the test


def test_type_checkers_see_every_name():
    tree = ast.parse(INIT.with_suffix(".pyi").read_text())
    aliases = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases), "mypy --strict sees only names imported as themselves"
    assert len(aliases) == len(API)


def test_importing_the_package_imports_no_dependency():
    code = "import sys, transformer_jax; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=INIT.parents[1])
    heavy = {"jax", "flax", "numpy", "datasets", "orbax", "sacrebleu", "torch", "tensorflow", "tyro", "grain"}
    assert not heavy & set(done.stdout.split())


def test_training_and_evaluation_do_not_import_optional_libraries():
    code = "import sys, transformer_jax.run, transformer_jax.evaluation.evaluate; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=INIT.parents[1])
    assert not {"torch", "tensorboardX", "datasets", "tensorflow"} & set(done.stdout.split())


def test_star_import_gives_the_complete_api():
    names: dict = {}
    exec("from transformer_jax import *", names)
    assert set(API) <= names.keys()
