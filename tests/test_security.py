"""SECURITY.md's promise that nothing that is loaded is executed.

Attacks are tried where the readers are tested: pickles in tests/interop/, modules that a data set names in
tests/data/test_tfds.py.
"""

import ast
from pathlib import Path

import numpy as np
import pytest

from transformer_jax.checkpoint.checkpoint import load_params, write_checkpoint_manifest
from transformer_jax.config import ModelConfig
from transformer_jax.data.encoding import _load
from transformer_jax.model.transformer import abstract_params

PACKAGE = Path(__file__).resolve().parents[1] / "transformer_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# Modules and functions that execute what they read, or that start programs.
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "yaml", "subprocess", "code"}
CALLS = {"eval", "exec", "compile", "execfile", "__import__", "os.system", "os.popen", "np.loadtxt", "np.fromregex"}
# Where a call of this name is something else, or wanted.
ALLOWED = {
    "presets.py": {"exec_module"},  # a recipe is a program
    "data/hub.py": {"import_module"},  # below tensorflow_datasets.translate
}


def calls(tree):
    """Yield (dotted name, call) of every call."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_function_that_executes_its_input_is_used(file):
    tree, name = ast.parse(file.read_text(encoding="utf-8")), str(file.relative_to(PACKAGE))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {one.partition(".")[0] for one in names} & MODULES, f"{name}:{node.lineno}"
    for called, node in calls(tree):
        where = f"{name}:{node.lineno}: {called}"
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert called not in CALLS, where
        assert called.rpartition(".")[2] not in {"exec_module", "import_module"} - ALLOWED.get(name, set()), where
        assert keywords.get("allow_pickle", "False") == "False", where
        assert keywords.get("trust_remote_code", "False") == "False", where
        if called in ("np.load", "numpy.load"):
            assert keywords["allow_pickle"] == "False", where
        if called == "torch.load":
            assert (name, keywords["weights_only"]) == ("interop/tensor_files.py", "True"), where
        assert not called.endswith((".extractall", "unpack_archive")), f"{where}: names in archives lead anywhere"


class Harm:
    """An object whose unpickling creates a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


def test_object_arrays_are_not_unpickled(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    harm = np.array([Harm(tmp_path / "made")], dtype=object)
    for name in ("source_ids", "source_offsets", "target_ids", "target_offsets"):
        np.save(folder / f"{name}.npy", harm, allow_pickle=True)
    (folder / "manifest.json").write_text('{"report": null, "sha256": {}}')
    assert _load(folder, ModelConfig()) is None
    write_checkpoint_manifest(folder)  # so that only the content is wrong
    with pytest.raises(ValueError, match="cannot read the checkpoint"):
        load_params(folder, abstract_params(ModelConfig(vocab_size=20, d_model=16, num_layers=1, num_heads=2, d_ff=32)))
    assert not (tmp_path / "made").exists()
