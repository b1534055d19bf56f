"""Structure of the project: import directions, sizes, documentation and the content of the wheel."""

import ast
import doctest
import importlib
import os
import re
import subprocess
import sys
import tokenize
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import readme
from api_names import api

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "transformer_jax"
FILES = sorted(PACKAGE.rglob("*.py"))

# A part of the package imports from parts on earlier lines, and from itself. A new file directly under
# transformer_jax/ must be added here.
LAYERS = (
    ("types",),
    ("runtime",),
    ("config",),
    ("presets", "model", "data", "checkpoint"),
    ("training", "decoding"),
    ("interop", "visualization", "accelerators"),
    ("evaluation", "parity"),
    ("run", "doctor"),
    ("experiments", "testing"),
    ("cli",),
    ("__init__",),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# Each of these libraries is imported in a single file, so that it can be replaced there.
ONE_FILE = (
    *("datasets", "grain", "matplotlib", "num2words", "orbax", "sacrebleu", "sacremoses", "safetensors"),
    *("sentencepiece", "tensorboardX", "tensorflow_datasets", "tokenizers", "tqdm", "tyro"),
)

MAX_LINES = 400
# Files that may be longer, with the reason.
LONGER = {"transformer_jax/config.py": 610}  # a table of documented fields, easier to read in one place


def part_of(file: Path) -> str:
    """Return `model` for transformer_jax/model/attention.py, and `cli` for transformer_jax/cli.py."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import of a file, also in functions. `from a import b` gives a.b."""
    package = (PACKAGE.name, *file.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            for alias in node.names:
                yield node.lineno, ".".join(filter(None, (*above, node.module, alias.name)))


def top_level(file: Path) -> set[str]:
    return {name.partition(".")[0] for _, name in imports(file)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_one_way(file):
    part = part_of(file)
    assert part in LEVEL, f"add {part} to LAYERS (tests/test_project.py) and in docs/architecture.md"
    for line, name in imports(file):
        names = name.split(".")
        if names[0] != PACKAGE.name or len(names) == 1:
            continue
        other = names[1]
        if other not in LEVEL:  # `from transformer_jax import Transformer`
            pytest.fail(f"{file}:{line} imports {name}; inside the package, import from the module that defines it")
        assert other == part or LEVEL[other] < LEVEL[part], f"{file}:{line}: {part} must not import {name}"


def test_data_does_not_import_jax():
    for file in (PACKAGE / "data").glob("**/*.py"):
        assert not top_level(file) & {"jax", "flax", "optax", "orbax"}, file


def test_model_does_not_use_the_training_config():
    for file in (PACKAGE / "model").glob("**/*.py"):
        others = {"Config", "DataConfig", "TokenizerConfig", "TrainingConfig", "DecodingConfig"}
        assert not {name.rpartition(".")[2] for _, name in imports(file)} & others, file
        assert not top_level(file) & {"optax", "orbax", "grain"}, file


@pytest.mark.parametrize("library", ONE_FILE)
def test_each_optional_library_is_imported_in_one_file(library):
    users = [str(file.relative_to(ROOT)) for file in FILES if library in top_level(file)]
    assert len(users) == 1, f"{library} is imported in {users}"


def python_files() -> Iterator[Path]:
    for folder in ("transformer_jax", "configs", "tests", "benchmarks"):
        yield from (ROOT / folder).rglob("*.py")
    yield from ROOT.glob("*.py")


def test_files_are_short():
    for file in python_files():
        name = str(file.relative_to(ROOT))
        length = len(file.read_text(encoding="utf-8").splitlines())
        assert length <= LONGER.get(name, MAX_LINES), f"{name} has {length} lines"


MAX_FUNCTION_LINES, MAX_PARAMETERS, MAX_PUBLIC_PARAMETERS = 80, 8, 10
# Functions above these limits, with their numbers of lines and of parameters. Remove an entry with its reason.
LONGER_FUNCTIONS: dict[str, int] = {}
MORE_PARAMETERS: dict[str, int] = {
    "evaluation/evaluate.py::evaluate_runs": 9,
}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the package's functions and methods, nested ones too, as `model/layers.py::Encoder.setup`."""

    def below(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            named = is_function or isinstance(child, ast.ClassDef)
            if is_function:
                yield prefix + child.name, child
            yield from below(child, f"{prefix}{child.name}." if named else prefix)

    for file in FILES:
        yield from below(ast.parse(file.read_text(encoding="utf-8")), f"{file.relative_to(PACKAGE)}::")


def test_functions_are_short_and_take_few_parameters():
    public = {f"{module.replace('.', '/')}.py::{name}" for name, module in api().items()}
    long, many = {}, {}
    for name, node in functions():
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([parameter for parameter in parameters if parameter.arg not in ("self", "cls")])
        if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
            long[name] = node.end_lineno - node.lineno + 1
        if count > (MAX_PUBLIC_PARAMETERS if name in public else MAX_PARAMETERS):
            many[name] = count
    assert {name: lines for name, lines in long.items() if lines > LONGER_FUNCTIONS.get(name, 0)} == {}
    assert {name: count for name, count in many.items() if count > MORE_PARAMETERS.get(name, 0)} == {}


def test_package_root_has_few_modules():
    modules = [file.name for file in PACKAGE.glob("*.py") if not file.name.startswith("__")]
    assert len(modules) <= 8, modules


def test_imports_have_no_cycles():
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    graph = {}
    for module, file in modules.items():
        names = {name if name in modules else name.rpartition(".")[0] for _, name in imports(file)}
        graph[module] = names & modules.keys() - {module, PACKAGE.name}
    while leaves := {module for module, names in graph.items() if not names & graph.keys()}:
        graph = {module: names for module, names in graph.items() if module not in leaves}
    assert not graph, f"among these modules is a circle: {sorted(graph)}"


MAX_ANY = 60


def test_any_is_used_sparingly():
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in FILES]
    count = sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees for node in ast.walk(tree))
    assert count <= MAX_ANY, f"{count} uses of Any; use a real type, such as Params, PyTree or a dataclass"


def test_checker_suppressions_have_a_reason():
    silent = re.compile(r"#\s*(?:type:\s*ignore|noqa)(?:\[[\w, -]+\]|:\s*[A-Z]+\d+(?:,\s*[A-Z]+\d+)*)?(.*)$")
    missing = []
    for file in python_files():
        with tokenize.open(file) as stream:
            comments = [token for token in tokenize.generate_tokens(stream.readline) if token.type == tokenize.COMMENT]
        for token in comments:
            found = silent.search(token.string)
            if found and not found[1].strip(" #-:()"):
                missing.append(f"{file.relative_to(ROOT)}:{token.start[0]}: {token.string}")
    assert not missing, missing


def undocumented(tree: ast.Module) -> Iterator[str]:
    """Public functions, classes and methods without a docstring. A method may have it in another class of the file,
    such as the protocol that its class follows; `setup` is called by Linen alone."""
    kinds = ast.FunctionDef | ast.ClassDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    yield from (node.name for node in public if not ast.get_docstring(node))
    methods = [(owner, node) for owner in tree.body if isinstance(owner, ast.ClassDef) for node in owner.body]
    methods = [(owner, node) for owner, node in methods if isinstance(node, kinds)]
    documented = {node.name for _, node in methods if ast.get_docstring(node)} | {"setup"}
    for owner, node in methods:
        if owner in public and not node.name.startswith("_") and node.name not in documented:
            yield f"{owner.name}.{node.name}"


def test_public_names_have_docstrings():
    missing = []
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree) or not tree.body, f"{file} has no docstring"
        missing += [f"{file.relative_to(ROOT)}: {name}" for name in undocumented(tree)]
    assert not missing, missing


MODULES = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in FILES if file.stem != "__main__"]


NEEDS_TORCH = {f"{PACKAGE.name}.parity.{name}" for name in ("oracles", "peers", "torch_models")}
DOCUMENTED = [
    pytest.param(name, marks=[pytest.mark.slow] if name in NEEDS_TORCH else [])
    for name in (name.removesuffix(".__init__") for name in MODULES)
]


@pytest.mark.parametrize("module", DOCUMENTED)
def test_docstring_examples_run(module):
    loaded = importlib.import_module(module)
    result = doctest.testmod(loaded)
    assert result.failed == 0
    source = Path(loaded.__file__).read_text(encoding="utf-8")
    assert result.attempted >= source.count("    >>> ") - source.count("doctest: +SKIP")


def test_readme_starts_with_two_commands():
    blocks = readme.fenced_blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) >= 2
    for block, word in zip(blocks, ("train.py", "pytest"), strict=False):
        (command,) = block.text.splitlines()
        assert word in command
        assert not command.startswith(("$", ">", "%", "#"))
        assert "git clone" not in command


def test_fenced_blocks_are_parsed():
    text = "a\n```bash\nls\n\n```\n  ~~~~\n```\nnot closed by another fence\n~~~~\n```console\n$ ls\n```\n"
    assert readme.fenced_blocks(text) == [
        ("bash", "ls\n\n"),
        ("", "```\nnot closed by another fence\n"),
        ("console", "$ ls\n"),
    ]
    with pytest.raises(ValueError, match="not closed"):
        readme.fenced_blocks("```\nls\n")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, optional_package) -> Path:
    """Build the project's wheel offline. The build backend is part of the tests' extra."""
    optional_package("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_wheel_contains_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    others = {"transformer_jax/py.typed", "transformer_jax/visualization/attention.html"}
    expected = {str(file.relative_to(ROOT)) for file in FILES} | others
    assert expected <= set(names)
    assert all(name.startswith(("transformer_jax/", "transformer_jax-")) for name in names), names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_installed_wheel_provides_the_command_and_the_default_recipe(wheel, tmp_path):
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-index", "--no-deps", "--target", str(target), str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    environment = {**os.environ, "PYTHONPATH": str(target)}
    code = "import transformer_jax; print(transformer_jax.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(str(target)), done.stdout + done.stderr

    command = [str(target / "bin" / "transformer-jax"), "train", "--help"]
    done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "--training.num-steps" in done.stdout
    assert "numbers" in done.stdout  # the default recipe's data source
    assert not list(elsewhere.iterdir())
