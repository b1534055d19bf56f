"""Files of tensors. Only this module unpickles, and only with `torch.load(weights_only=True)`."""

import contextlib
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError, first_line

# Names under which training scripts store the state dict in a checkpoint.
_CONTAINERS = ("model_state_dict", "state_dict", "model")


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a torch or safetensors file, or of the only such file in a folder."""
    path = single_file(path, ("*.safetensors", "*.pt", "*.pth", "*.bin"))
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    state: object = load_torch(path)
    for name in _CONTAINERS:
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            state = state[name]
    return state_dict_arrays(state, str(path))


def single_file(path: Path, patterns: tuple[str, ...], preferred: tuple[str, ...] = ()) -> Path:
    """Return the only file of some kinds in a folder, or the only one with a preferred name, or a path to a file."""
    if not path.is_dir():
        return path
    files = [file for pattern in patterns for file in sorted(path.glob(pattern))]
    if len(files) > 1:
        files = [file for file in files if file.name in preferred] or files
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise UserError(f"{path}: the folder has these files of tensors: {names}. Give the path of one file")
    return files[0]


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors of a `.safetensors` file, with 16-bit floats converted to float32."""
    safetensors = _import_safetensors(f"to read {path}")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return {name: _widened(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  not a mapping
    except Exception as error:  # of the library, of the system, or of NumPy for a type that it does not know
        raise UserError(f"{path}: not a readable .safetensors file: {first_line(error)}") from error


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Write a `.safetensors` file."""
    safetensors = _import_safetensors(f"to write {path}")
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(contiguous, path, metadata=dict(metadata or {}))


def load_torch(path: Path, safe_globals: tuple[type, ...] = ()) -> Any:
    """Read a file of tensors, containers and objects of the classes `safe_globals`, and execute nothing in it."""
    torch = import_torch(f"to read {path}")
    require(path.is_file(), f"{path}: no such file")
    try:
        # Memory-mapped where the format allows it, so that a large file is not in memory twice.
        mapped = zipfile.is_zipfile(path)
        with torch.serialization.safe_globals(list(safe_globals)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of other protocols, which fail anyway
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) if mapped else []
            if unsafe:
                raise UserError(
                    f"{path} holds objects of {', '.join(sorted(unsafe))}, and reading them would execute code. If you "
                    "trust the file, save it again without them: c = torch.load(FILE, weights_only=False); "
                    f"torch.save({{k: c[k] for k in {('args', 'cfg', *_CONTAINERS)} if k in c}}, NEW_FILE)"
                )
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise UserError(
            f"{path}: torch.load(weights_only=True) cannot read it: {first_line(error)} (save a file that needs other "
            "classes again as a plain state dict: torch.save(model.state_dict(), FILE))"
        ) from error


def state_dict_arrays(state: object, origin: str) -> dict[str, np.ndarray]:
    """Convert the tensors of a state dict to NumPy arrays, and 16-bit floats to float32."""
    torch = import_torch(f"to read {origin}")
    if not isinstance(state, Mapping) or not state:
        raise UserError(f"{origin} holds {type(state).__name__}, not a state dict (names to tensors)")
    others = [str(n) for n, value in state.items() if not isinstance(n, str) or not isinstance(value, torch.Tensor)]
    require(not others, f"{origin}: not tensors: {', '.join(others[:10])}. A state dict maps names to tensors")
    names = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 bool"
    plain = {getattr(torch, name) for name in names.split()}
    others = [
        f"{name} ({tensor.dtype}, {tensor.layout})"
        for name, tensor in state.items()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in plain
    ]
    require(not others, f"{origin}: tensors that are not plain arrays: {', '.join(others[:10])}")
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    return {name: tensor.detach().to(wide.get(tensor.dtype, tensor.dtype)).numpy() for name, tensor in state.items()}


def save_torch(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write a state dict with `torch.save`."""
    torch = import_torch(f"to write {path}")
    torch.save({name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()}, path)


def import_torch(purpose: str) -> Any:
    """Import torch and return the module. The purpose completes the error "torch is needed ..."."""
    with contextlib.suppress(ImportError):
        import torch

        return torch
    raise UserError(f"torch is needed {purpose}: python -m pip install 'transformer-jax[torch]'")


def _import_safetensors(purpose: str) -> Any:
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy
        import safetensors.numpy

        return safetensors
    raise UserError(f"safetensors is needed {purpose}: python -m pip install 'transformer-jax[interop]'")


def _widened(tensor: np.ndarray) -> np.ndarray:
    return tensor.astype(np.float32) if tensor.dtype.itemsize == 2 and tensor.dtype.kind in "fV" else tensor
