"""Files of tensors: the only place that unpickles, and that only with `torch.load(weights_only=True)`."""

import contextlib
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from transformer_jax.types import UserError, first_line

# Under which names a training script's checkpoint keeps the state dict among other things.
_CONTAINERS = ("model_state_dict", "state_dict", "model")


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file that torch or safetensors wrote, or of the one such file in a folder.

    Raises:
        UserError: no such file, or several; it is damaged, or holds other objects.
    """
    if path.is_dir():
        files = [file for ending in ("*.safetensors", "*.pt", "*.pth", "*.bin") for file in sorted(path.glob(ending))]
        if len(files) != 1:
            found = ", ".join(file.name for file in files) or "none"
            raise UserError(f"{path}: one file of tensors is needed, and there is {found}; name the file")
        path = files[0]
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    state: Any = load_torch(path)
    for name in _CONTAINERS:
        if isinstance(state, dict) and isinstance(state.get(name), dict):
            state = state[name]
    return state_dict_arrays(state, str(path))


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a `.safetensors` file; 16-bit floats become float32.

    Raises:
        UserError: no such file, or it is damaged.
    """
    safetensors = _import_safetensors(f"to read {path}")
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            return {name: _widened(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except Exception as error:  # of the library, of the system, or of NumPy for a type that it does not know
        raise UserError(f"{path}: not a readable .safetensors file: {first_line(error)}") from error


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a `.safetensors` file."""
    safetensors = _import_safetensors(f"to write {path}")
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(contiguous, path, metadata=dict(metadata or {}))


def load_torch(path: Path, safe_globals: tuple[Any, ...] = ()) -> Any:
    """What `torch.save` wrote, by `torch.load(weights_only=True)`: nothing in the file is executed.

    Args:
        path: the file.
        safe_globals: classes that the file may hold besides tensors and containers.

    Raises:
        UserError: torch is not installed; the file is damaged, or holds other classes: they are named.
    """
    torch = import_torch(f"to read {path}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    try:
        # Mapped where the format allows it, so that a large file is not held twice.
        mapped = zipfile.is_zipfile(path)
        with torch.serialization.safe_globals(list(safe_globals)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles of other protocols, which fail anyway
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(str(path)) if mapped else []
            if refused:
                raise UserError(_refusal(path, refused))
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails in any of a dozen ways
        raise UserError(
            f"{path}: torch.load(weights_only=True) cannot read it: {first_line(error)} (a file that needs other "
            "classes has to be saved again as a plain state dict: torch.save(model.state_dict(), FILE))"
        ) from error


def _refusal(path: Path, refused: list[str]) -> str:
    return (
        f"{path} holds objects of {', '.join(sorted(refused))}, which reading would execute; it is refused. Where the "
        "file is trusted, save it again without them: c = torch.load(FILE, weights_only=False); "
        f"torch.save({{k: c[k] for k in {('args', 'cfg', *_CONTAINERS)} if k in c}}, NEW_FILE)"
    )


def state_dict_arrays(state: Any, origin: str) -> dict[str, np.ndarray]:
    """A state dict's tensors as NumPy arrays; 16-bit floats become float32.

    Raises:
        UserError: something else than a mapping of names to tensors.
    """
    torch = import_torch(f"to read {origin}")
    if not isinstance(state, Mapping) or not state:
        raise UserError(f"{origin} holds {type(state).__name__}, not a state dict (names to tensors)")
    strange = [str(n) for n, value in state.items() if not isinstance(n, str) or not isinstance(value, torch.Tensor)]
    if strange:
        raise UserError(f"{origin}: not tensors: {', '.join(strange[:10])}; a state dict has only tensors, each named")
    names = "float16 bfloat16 float32 float64 int8 int16 int32 int64 uint8 bool"
    plain = {getattr(torch, name) for name in names.split()}
    strange = [
        f"{name} ({tensor.dtype}, {tensor.layout})"
        for name, tensor in state.items()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.dtype not in plain
    ]
    if strange:
        raise UserError(f"{origin}: tensors that are no plain arrays: {', '.join(strange[:10])}")
    wide = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
    return {name: tensor.detach().to(wide.get(tensor.dtype, tensor.dtype)).numpy() for name, tensor in state.items()}


def save_torch(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a state dict with `torch.save`."""
    torch = import_torch(f"to write {path}")
    torch.save({name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()}, path)


def import_torch(purpose: str) -> Any:
    """The module torch.

    Raises:
        UserError: it is not installed.
    """
    with contextlib.suppress(ImportError):
        import torch

        return torch
    raise UserError(f"torch is needed {purpose}: python -m pip install 'transformer-jax[torch]'")


def _import_safetensors(purpose: str) -> Any:
    with contextlib.suppress(ImportError):
        import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by name from here on
        import safetensors.numpy

        return safetensors
    raise UserError(f"safetensors is needed {purpose}: python -m pip install 'transformer-jax[interop]'")


def _widened(tensor: np.ndarray) -> np.ndarray:
    return tensor.astype(np.float32) if tensor.dtype.itemsize == 2 and tensor.dtype.kind in "fV" else tensor
