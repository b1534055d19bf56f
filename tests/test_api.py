"""The public API: every name resolves, type checkers see the same names, and importing it loads no dependency."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import transformer_jax

INIT = Path(transformer_jax.__file__)


@pytest.mark.parametrize("name", transformer_jax.API)
def test_every_public_name_is_the_object_of_its_module(name):
    module = importlib.import_module(f"transformer_jax.{transformer_jax.API[name]}")
    value = getattr(transformer_jax, name)
    assert value is getattr(module, name)
    assert getattr(value, "__module__", module.__name__) == module.__name__, "named with the module that defines it"


def test_all_and_dir_list_the_api():
    assert set(transformer_jax.__all__) == {"API", "__version__", *transformer_jax.API}
    assert dir(transformer_jax) == sorted(transformer_jax.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Transfomer'"):
        transformer_jax.Transfomer  # noqa: B018  asking for it is the test


def test_type_checkers_import_the_same_names_from_the_same_modules():
    (block,) = (node for node in ast.parse(INIT.read_text()).body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    aliases = [(alias, node.module) for node in block.body for alias in node.names]
    assert all(alias.asname == alias.name for alias, _ in aliases), (
        "mypy --strict sees only names imported `as` themselves"
    )
    seen = {alias.name: module for alias, module in aliases}
    assert seen == {name: f"transformer_jax.{module}" for name, module in transformer_jax.API.items()}


def test_api_table_lists_every_name_once():
    (table,) = (
        node.value
        for node in ast.parse(INIT.read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "API"
    )
    names = [key.value for key in table.keys]
    assert len(names) == len(set(names)) == len(transformer_jax.API)


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
    assert set(transformer_jax.API) <= names.keys()
