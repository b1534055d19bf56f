"""What is ready for training or translating here, and what needs fixing: `transformer-jax doctor`."""

import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.data.corpus import read_split
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.model.transformer import abstract_params, count_parameters
from transformer_jax.presets import load_recipe
from transformer_jax.runtime.environment import VARIABLE
from transformer_jax.training.sharding import make_mesh
from transformer_jax.types import UserError, first_line

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "tokenizers",
    "datasets",
    "sacrebleu",
)
CLUSTER = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "PMIX_",
    "JAX_",
    "KUBERNETES_",
    "TPU_",
    "CLOUD_TPU_",
    "NCCL_",
    "CUDA_VISIBLE",
    "XLA_",
)

# Texts that a tokenizer may stumble over: spaces, marks, both directions, letters beyond 16 bits, line ends of others.
SENTENCES = ("A dog runs.", " two  spaces ", "e\u0301 \u05e9\u05dc\u05d5\u05dd", "\U0001f389 木", "a\u2028b\tc", "</s>")


class Finding(NamedTuple):
    """What one check found."""

    name: str
    ok: bool
    text: str
    """The fact, or what to do."""

    def __str__(self) -> str:
        return f"{'ok ' if self.ok else 'FIX'}  {self.name}: {' '.join(self.text.split())}"


class _FixError(Exception):
    """What a check raises to say what to do."""


def run_checks(subject: str = "") -> Iterator[Finding]:
    """Check this machine, and a recipe or a run, and yield a finding per check as soon as it is done.

    Args:
        subject: A recipe (FILE or FILE:NAME), the folder of a run, or its `config.json`. Empty checks the machine
            alone.
    """
    checks: list[tuple[str, Callable[[], str]]] = [
        ("packages", _packages),
        ("devices", _devices),
        ("precision", _precision),
        ("compile cache", _compile_cache),
        ("cluster", _cluster),
    ]
    config = None
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
        checks += [(f"data, {split}", partial(_dataset, config, split)) for split in ("train", "valid", "test")]
    if config is not None and run is not None:
        checks += [("tokenizer", partial(_tokenizer, config, run)), ("checkpoint", partial(_checkpoint, config, run))]
    for name, check in checks:
        try:
            finding = Finding(name, True, check())
        except (_FixError, UserError) as error:
            finding = Finding(name, False, str(error))
        except Exception as error:  # a check that fails is a finding too
            finding = Finding(name, False, f"cannot be checked: {first_line(error)}")
        yield finding


def _raise(error: Exception) -> str:
    raise error


def _packages() -> str:
    found, missing = [f"Python {platform.python_version()}"], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise _FixError(f"{', '.join(missing)} not installed: python -m pip install transformer-jax")
    return ", ".join(found)


def _devices() -> str:
    devices = jax.devices()
    if jax.default_backend() == "cpu" and Path("/dev/nvidia0").exists():
        raise _FixError("there is an NVIDIA GPU and jax uses the CPU: python -m pip install 'transformer-jax[cuda]'")
    processes = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()}), {os.cpu_count()} CPU cores{processes}"


def _precision() -> str:
    """Products of random matrices as the training computes them, against float64."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 256, 256))
    exact, errors = a @ b, {}
    for name, most in (("float32", 2e-2), ("bfloat16", 5e-2)):  # float32 in 19 bits, as GPUs may: 1e-3
        product = jnp.matmul(jnp.asarray(a, name), jnp.asarray(b, name), preferred_element_type=jnp.float32)
        errors[name] = float(np.abs(np.asarray(product, np.float64) - exact).max() / np.abs(exact).max())
        if not errors[name] < most:
            raise _FixError(
                f"a {name} product is off by {errors[name]:.1e} of its largest entry: this device computes wrongly"
            )
    words = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    short = " (fewer bits than float32 has: JAX_DEFAULT_MATMUL_PRECISION=highest gives all)"
    return f"largest error of a product: {words}{short if errors['float32'] > 1e-5 else ''}"


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
        raise _FixError(
            f"{folder} cannot be written ({error.strerror}): set {VARIABLE} to a folder that can"
        ) from error
    return f"{folder}, {len(sizes)} files, {_bytes(sum(sizes))}"


def _cluster() -> str:
    names = sorted(name for name in os.environ if name.startswith(CLUSTER))
    return f"{len(names)} variables: {', '.join(names)}" if names else "no variables of a cluster"


def _memory(config: Config | None) -> str:
    free, total = _host_memory()
    facts, room = [f"{_bytes(free)} of {_bytes(total)} free"] if total else ["size of the host's unknown"], free
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        room = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        facts.append(f"{_bytes(room)} free on a device")
    if config is not None:
        # Parameters, their gradients, Adam's two averages, and their own; they are split along fsdp and tensor.
        split = config.training.mesh_fsdp * config.training.mesh_tensor
        copies = 5 if config.training.ema_decay else 4
        needed = copies * _parameter_bytes(config) // (split if stats else 1)
        facts.append(f"parameters, gradients and Adam need {_bytes(needed)}, and activations more")
        if total and needed > room:
            raise _FixError(f"{'; '.join(facts)}: a smaller model, or training.mesh_fsdp over more devices")
    return "; ".join(facts)


def _host_memory() -> tuple[int, int]:
    """Bytes available and in all; zeros where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        table = {line.partition(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        return table["MemAvailable"], table["MemTotal"]
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0


def _mesh(config: Config) -> str:
    training = config.training
    mesh = make_mesh(training.mesh_data, training.mesh_fsdp, training.mesh_tensor)
    return ", ".join(f"{name} {size}" for name, size in mesh.shape.items())


def _disk(config: Config, folder: Path) -> str:
    """Room for the checkpoints that are kept, the best one, and the one that is being written."""
    free = shutil.disk_usage(folder).free
    number = config.training.keep_checkpoints + 2
    copies = 4 if config.training.ema_decay else 3  # the parameters, Adam's two, and their average
    needed = number * copies * _parameter_bytes(config)
    fact = f"{_bytes(free)} free in {folder}, {number} checkpoints need {_bytes(needed)}"
    if free < needed:
        raise _FixError(f"{fact}: free some, put --workdir elsewhere, or lower training.keep_checkpoints")
    return fact


def _dataset(config: Config, split: str) -> str:
    pairs = read_split(config.data, split)  # type: ignore[arg-type]  # one of SPLITS
    if pairs is None:
        return f"none (data.{split} is empty)"
    blank = sum(not s.strip() or not t.strip() for texts in pairs.chunks() for s, t in zip(*texts, strict=True))
    return f"{len(pairs):,} pairs from {pairs.origin}, {blank:,} of them with an empty side"


def _tokenizer(config: Config, run: RunDir) -> str:
    pair = TokenizerPair.load(run.tokenizer)
    pair.check_fits(config.model)
    facts, all_known = [], True
    for side, tokenizer in (("source", pair.source), ("target", pair.target)):
        rows = tokenizer.encode(SENTENCES)
        back = tokenizer.decode(rows)
        unknown = sum(i == tokenizer.unk_id for row in rows for i in row)
        for text, expected, row in zip(back, map(tokenizer.plain, SENTENCES), rows, strict=True):
            if (
                text != expected
                and tokenizer.kind not in ("sentencepiece", "huggingface")
                and tokenizer.unk_id not in row
            ):
                raise _FixError(f"{run.tokenizer}: the {side}'s makes {text!r} of {expected!r}: put its files back")
        facts.append(f"{side} {tokenizer.kind} of {tokenizer.vocab_size:,} entries")
        if unknown:
            all_known = False
            facts[-1] += f", {unknown} unknown words in {len(SENTENCES)} odd sentences"
    return f"{'; '.join(facts)}: sentences come back as they were{'' if all_known else ', but for those'}"


def _checkpoint(config: Config, run: RunDir) -> str:
    path = resolve_checkpoint(run, config.decoding.checkpoint, config.training.best_by)
    params = load_params(path, abstract_params(config.model))
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params)):
        raise _FixError(f"{path}: not all parameters are finite: take an earlier one, with --checkpoint STEP")
    return f"{path} is readable and whole, {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters"


def _parameter_bytes(config: Config) -> int:
    return count_parameters(config.model) * jnp.dtype(config.model.param_dtype).itemsize


def _bytes(number: float) -> str:
    """In words, by powers of 1000.

    >>> _bytes(2_345_678)
    '2.35 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"
