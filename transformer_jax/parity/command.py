"""`compare`: makes or loads a model on both sides and compares them."""

import dataclasses
import importlib.util
from pathlib import Path

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config
from transformer_jax.interop.fairseq_format import read_fairseq
from transformer_jax.interop.marian_weights import in_halves
from transformer_jax.interop.tensor_files import import_torch, read_tensors
from transformer_jax.interop.torch_format import params_from_annotated, params_from_torch
from transformer_jax.model.transformer import abstract_params
from transformer_jax.parity.compare import ParityReport, compare_models, random_params
from transformer_jax.presets import load_config, load_recipe
from transformer_jax.types import Params, UserError

AGAINST = ("torch", "annotated", "fairseq", "marian")


def compare(
    against: str,
    path: str | Path | None = None,
    config: str | Path | Config | None = None,
    dtype: str = "float32",
) -> ParityReport:
    """Compares the model here with another software's, both with the same weights.

    Args:
        against: torch, annotated, fairseq or marian.
        path: a run; or a state dict (torch, annotated), a checkpoint (fairseq), a folder (marian). None: random
            weights, of a small model with the conventions of the other side unless there is a `config`.
        config: a recipe or a config.json: what a state dict does not store, or which model to make.
        dtype: float32 or float64.

    Raises:
        UserError: torch or transformers is not installed, a file does not fit, the other side cannot compute what the
            configuration says: the fields are named.
    """
    for name, value, legal in (("against", against, AGAINST), ("dtype", dtype, ("float32", "float64"))):
        if value not in legal:
            raise UserError(f"{name} is {value!r}; legal: {', '.join(legal)}")
    import_torch(f"to compare with {against}")
    if against in ("fairseq", "marian") and importlib.util.find_spec("transformers") is None:
        raise UserError(f"transformers is needed to compare with {against}: python -m pip install transformers")
    from transformer_jax.parity.peers import PEERS, make_oracle

    if config is not None and not isinstance(config, Config):
        config = load_recipe(str(config))
    folder, notes = None, list[str]()
    if path is None:
        config = config or Config(model=PEERS[against].default)
        params = random_params(config.model)
    else:
        config, params = _load(against, Path(path), config)
        folder = Path(path) if against == "marian" and not _is_run(Path(path)) else None
    model = config.model
    if against == "marian" and model.positions == "interleaved":
        # Halves are the same columns in another order: reordered weights are the same function of them.
        model, params = dataclasses.replace(model, positions="halves"), in_halves(params, model.d_model)
        notes = ["model.positions 'interleaved' is 'halves' in Marian; compared with the d_model axis so reordered"]
    oracle = make_oracle(against, model, params, folder)
    report = compare_models(model, params, oracle, dtype=dtype, training=config.training, decoding=config.decoding)
    return dataclasses.replace(report, notes=(*notes, *report.notes))


def _load(against: str, path: Path, config: Config | None) -> tuple[Config, Params]:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if _is_run(path) or against in ("fairseq", "marian"):
        if config is not None:
            raise UserError(f"{path} stores the configuration of its model; leave out --config")
        if not _is_run(path):
            from transformer_jax.interop.marian_format import read_marian

            imported = (read_fairseq if against == "fairseq" else read_marian)(path)
            return imported.config, imported.params
        run = RunDir(path)
        config = run.load_config()
        checkpoint = resolve_checkpoint(run, config.decoding.checkpoint, config.training.best_by)
        return config, load_params(checkpoint, abstract_params(config.model))
    beside = (path if path.is_dir() else path.parent) / "config.json"
    if config is None and beside.is_file():
        config = load_config(beside)
    if config is None:
        raise UserError(
            f"{path}: a state dict stores neither the number of heads nor positions and norms: give --config, a recipe "
            "or a config.json"
        )
    read = params_from_torch if against == "torch" else params_from_annotated
    return config, read(read_tensors(path), config.model, str(path))


def _is_run(path: Path) -> bool:
    return RunDir(path).checkpoints.is_dir()
