"""Check a machine, a recipe or a run, and report what needs fixing: `transformer-jax doctor`."""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.data.corpus import read_split
from transformer_jax.data.pairs import Split
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.model.transformer import abstract_params, count_parameters
from transformer_jax.presets import load_recipe
from transformer_jax.runtime.environment import VARIABLE
from transformer_jax.runtime.fields import require
from transformer_jax.training.sharding import AXES, make_mesh
from transformer_jax.types import UserError, first_line

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"),
    *("numpy", "tokenizers", "datasets", "sacrebleu"),
)
CLUSTER_PREFIXES = (
    *("SLURM_", "OMPI_", "PMI_", "PMIX_", "KUBERNETES_", "JAX_"),
    *("TPU_", "CLOUD_TPU_", "NCCL_", "CUDA_VISIBLE", "XLA_"),
)

# Difficult text: spaces, combining marks, both directions, characters beyond 16 bits, other line ends, a special token.
SENTENCES = ("A dog runs.", " two  spaces ", "e\u0301 \u05e9\u05dc\u05d5\u05dd", "\U0001f389 木", "a\u2028b\tc", "</s>")
NORMALIZING = ("sentencepiece", "huggingface")  # kinds of tokenizers that may change the text


class Finding(NamedTuple):
    """What a check found, and the fix if it is not ok."""

    name: str
    ok: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok ' if self.ok else 'FIX'}  {self.name}: {' '.join(self.text.split())}"


def run_checks(subject: str = "") -> Iterator[Finding]:
    """Check this machine, and a recipe (FILE or FILE:NAME) or a run, and yield each finding as soon as it is made."""
    checks, config = list(MACHINE_CHECKS.items()), None
    run = RunDir(Path(subject)) if subject and Path(subject).is_dir() else None
    if subject:
        try:
            config = run.load_config() if run else load_recipe(subject)
        except Exception as error:  # a recipe is a program, which may fail in any way
            checks.append(("configuration", partial(_raise, error)))
    checks.append(("memory", partial(_memory, config)))
    if config is not None:
        folder = run.path if run else Path.cwd()
        checks += [("mesh", partial(_mesh, config)), ("disk", partial(_disk, config, folder))]
        checks += [(f"data, {split}", partial(_dataset, config, split)) for split in get_args(Split)]
    if config is not None and run is not None:
        checks += [("tokenizer", partial(_tokenizer, config, run)), ("checkpoint", partial(_checkpoint, config, run))]
    for name, check in checks:
        try:
            yield Finding(name, True, check())
        except UserError as error:
            yield Finding(name, False, str(error))
        except Exception as error:  # a check that fails is a finding too
            yield Finding(name, False, f"cannot be checked: {first_line(error)}")


def _raise(error: Exception) -> str:
    raise error


def _packages() -> str:
    found, missing = [f"Python {platform.python_version()}"], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    require(not missing, f"{', '.join(missing)} not installed. Run: python -m pip install transformer-jax")
    return ", ".join(found)


def _devices() -> str:
    devices = jax.devices()
    is_idle, fix = Path("/dev/nvidia0").exists(), "Run: python -m pip install 'transformer-jax[cuda]'"
    require(jax.default_backend() != "cpu" or not is_idle, f"jax uses the CPU, although there is an NVIDIA GPU. {fix}")
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()}), {os.cpu_count()} CPU cores{processes}"


def _precision() -> str:
    """Compare products of random matrices, as training computes them, with float64."""
    a, b = np.random.default_rng(0).standard_normal((2, 256, 256))
    exact, errors = a @ b, {}
    for name, limit in (("float32", 2e-2), ("bfloat16", 5e-2)):  # GPUs may compute float32 in 19 bits: 1e-3
        product = jnp.matmul(jnp.asarray(a, name), jnp.asarray(b, name), preferred_element_type=jnp.float32)
        errors[name] = float(np.abs(np.asarray(product, np.float64) - exact).max() / np.abs(exact).max())
        problem = f"the error of a {name} matrix product is {errors[name]:.1e} of its largest entry, above {limit:g}"
        require(errors[name] < limit, f"{problem}. This device computes wrong results: do not train on it")
    fact = f"largest error of a matrix product: {', '.join(f'{name} {error:.1e}' for name, error in errors.items())}"
    if errors["float32"] > 1e-5:
        fact += " (float32 products use fewer bits; JAX_DEFAULT_MATMUL_PRECISION=highest uses all)"
    return fact


def _compile_cache() -> str:
    folder = os.environ.get(VARIABLE)
    if not folder:
        return "off: every command compiles its programs again"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        sizes = [file.stat().st_size for file in Path(folder).iterdir() if file.is_file()]
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}. Set {VARIABLE} to another folder") from error
    return f"{folder}, {len(sizes)} files, {_bytes(sum(sizes))}"


def _cluster() -> str:
    names = sorted(name for name in os.environ if name.startswith(CLUSTER_PREFIXES))
    return f"{len(names)} environment variables: {', '.join(names)}" if names else "no environment variables"


MACHINE_CHECKS = {
    "packages": _packages,
    "devices": _devices,
    "precision": _precision,
    "compile cache": _compile_cache,
    "cluster": _cluster,
}


def _memory(config: Config | None) -> str:
    free, total = _host_memory()
    facts = [f"{_bytes(free)} of {_bytes(total)} free" if total else "host memory unknown"]
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    capacity = free
    if stats and "bytes_limit" in stats:
        capacity = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        facts.append(f"{_bytes(capacity)} free on a device")
    if config is not None:
        # Parameters, gradients, Adam's two averages, and the average of parameters. The mesh splits them over devices.
        split = config.training.mesh_fsdp * config.training.mesh_tensor if stats else 1
        needed = (5 if config.training.ema_decay else 4) * _parameter_bytes(config) // split
        facts.append(f"parameters, gradients and Adam need {_bytes(needed)}, in addition to activations")
        fix = "Use a smaller model, or raise training.mesh_fsdp on more devices"
        require(needed <= capacity or not total, f"{'; '.join(facts)}. {fix}")
    return "; ".join(facts)


def _host_memory() -> tuple[int, int]:
    """Return the available and the total bytes of memory, or zeros where the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        table = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return table["MemAvailable"], table["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0


def _mesh(config: Config) -> str:
    sizes = (getattr(config.training, f"mesh_{axis}") for axis in AXES)
    return ", ".join(f"{name} {size}" for name, size in make_mesh(*sizes).shape.items())


def _disk(config: Config, folder: Path) -> str:
    free = shutil.disk_usage(folder).free
    number = config.training.keep_checkpoints + 2  # the best one, and the one that is being written
    copies = 4 if config.training.ema_decay else 3  # the parameters, Adam's two averages, and the average of parameters
    needed = number * copies * _parameter_bytes(config)
    fact = f"{_bytes(free)} free in {folder}, {number} checkpoints need {_bytes(needed)}"
    fix = "Free disk space, choose another --workdir, or lower training.keep_checkpoints"
    require(free >= needed, f"{fact}. {fix}")
    return fact


def _dataset(config: Config, split: Split) -> str:
    pairs = read_split(config.data, split)
    if pairs is None:
        return f"none (data.{split} is empty)"
    blank = sum(not s.strip() or not t.strip() for texts in pairs.chunks() for s, t in zip(*texts, strict=True))
    return f"{len(pairs):,} pairs from {pairs.origin}, {blank:,} of them with an empty side"


def _tokenizer(config: Config, run: RunDir) -> str:
    pair = TokenizerPair.load(run.tokenizer)
    pair.check_fits(config.model)
    facts, exception = [], ""
    for side, tokenizer in (("source", pair.source), ("target", pair.target)):
        facts.append(f"{side} {tokenizer.kind} of {tokenizer.vocab_size:,} entries")
        rows = tokenizer.encode(SENTENCES)
        if unknown := sum(i == tokenizer.unk_id for row in rows for i in row):
            facts[-1] += f", {unknown} unknown words in {len(SENTENCES)} test sentences"
            exception = " except for unknown words"
        for text, expected, row in zip(tokenizer.decode(rows), map(tokenizer.plain, SENTENCES), rows, strict=True):
            is_legal = text == expected or tokenizer.kind in NORMALIZING or tokenizer.unk_id in row
            problem = f"the {side} tokenizer decodes {expected!r} to {text!r}"
            require(is_legal, f"{run.tokenizer}: {problem}. Restore its files")
    return f"{'; '.join(facts)}: decoding restores the encoded text{exception}"


def _checkpoint(config: Config, run: RunDir) -> str:
    path = resolve_checkpoint(run, config.decoding.checkpoint, config.training.best_by)
    params = load_params(path, abstract_params(config.model))
    is_finite = all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))
    require(is_finite, f"{path}: some parameters are not finite. Select an earlier step with --checkpoint STEP")
    return f"{path} is readable and complete, {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters"


def _parameter_bytes(config: Config) -> int:
    return count_parameters(config.model) * jnp.dtype(config.model.param_dtype).itemsize


def _bytes(number: float) -> str:
    """Return a number of bytes with a decimal unit.

    >>> _bytes(2_345_678)
    '2.35 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
