"""A run from foreign files, and foreign files from a run."""

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint, save_params
from transformer_jax.checkpoint.run_dir import RunDir, load_config
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.annotated_format import params_from_annotated
from transformer_jax.interop.ctranslate2_format import read_ctranslate2, write_ctranslate2
from transformer_jax.interop.fairseq_format import read_fairseq
from transformer_jax.interop.imported import Imported
from transformer_jax.interop.mapping import read_mapping
from transformer_jax.interop.marian_format import read_marian, write_marian
from transformer_jax.interop.tables import flatten, from_foreign, in_dtype, unflatten
from transformer_jax.interop.tensor_files import read_tensors, save_torch, write_safetensors
from transformer_jax.interop.torch_format import check_position_tables, params_from_torch, torch_from_params
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.files import atomic_dir, to_json, write_atomically
from transformer_jax.types import Params, UserError, first_line

ImportFormat = Literal["torch", "annotated", "fairseq", "marian", "ctranslate2", "safetensors"]
ExportFormat = Literal["safetensors", "torch", "marian", "ctranslate2"]


def import_run(
    path: str | Path,
    source: ImportFormat,
    output: str | Path,
    *,
    config: Config | None = None,
    tokenizer: str | Path | None = None,
    mapping: str | Path | None = None,
    num_heads: int | None = None,
    overwrite: bool = False,
) -> RunDir:
    """Makes a run of foreign files.

    Args:
        path: the file or folder.
        source: what it is.
        output: the new run's folder.
        config: what a state dict does not store: heads, positions, places of the norms and so on.
        tokenizer: a run, or its `tokenizer/`.
        mapping: with `torch`, a file that names the tensors of a model of one's own (see `mapping.read_mapping`).
        num_heads: with `ctranslate2`, where the file does not store it.
        overwrite: replace an earlier import.

    Raises:
        UserError: anything that is missing, damaged or cannot be said here; the output is then as it was.
    """
    path, run = Path(path), RunDir(Path(output))
    _check_free(run.path, overwrite, run.imported.name, "an imported run")
    _check_arguments(source, config, tokenizer, mapping, num_heads)
    try:
        imported = _read(path, source, config, tokenizer, mapping, num_heads)
    except UserError:
        raise
    except Exception as error:  # values of types that nobody expects, in one of many files
        raise UserError(f"{path}: not readable as {source}: {first_line(error)}") from error
    imported.tokenizers.check_fits(imported.config.model)
    with atomic_dir(run.path, replace=overwrite) as unfinished:
        new = RunDir(unfinished)
        decoding = dataclasses.replace(imported.config.decoding, checkpoint="last")
        new.write_config(dataclasses.replace(imported.config, decoding=decoding))
        imported.tokenizers.save(new.tokenizer)
        save_params(new.checkpoints / "0", imported.params)
        new.write(new.imported.name, to_json({"from": source, "path": str(path)}) + "\n")
        new.seal()
    return run


def export_run(
    run: str | Path,
    target: ExportFormat,
    output: str | Path,
    *,
    checkpoint: str | None = None,
    overwrite: bool = False,
    warn: Callable[[str], None] = warnings.warn,
) -> Path:
    """Writes a run for other software into a folder.

    Args:
        run: the run's folder.
        target: for which software.
        output: the folder; it must be empty or not there.
        checkpoint: last, best, average or a step; None: as the run's configuration says.
        overwrite: replace an earlier export.
        warn: called with what the format can only say nearly.

    Raises:
        UserError: the format cannot say what the model does: the fields are named; the output is then as it was.
    """
    folder, output = RunDir(Path(run)), Path(output)
    config = folder.load_config()
    _check_free(output, overwrite, _MARKER, "an exported model")
    chosen = resolve_checkpoint(folder, checkpoint or config.decoding.checkpoint, config.training.best_by)
    params = jax.tree.map(np.asarray, load_params(chosen, abstract_params(config.model)))
    tokenizers = TokenizerPair.load(folder.tokenizer)
    with atomic_dir(output, replace=overwrite) as unfinished:
        if target == "marian":
            write_marian(unfinished, config, params, tokenizers, warn)
        elif target == "ctranslate2":
            write_ctranslate2(unfinished, config, params, tokenizers, warn)
        else:
            if target == "torch":
                save_torch(unfinished / "model.pt", torch_from_params(params, config.model))
            else:
                write_safetensors(unfinished / "model.safetensors", flatten(params), {"format": "transformer_jax"})
            decoding = dataclasses.replace(config.decoding, checkpoint="last")
            write_atomically(unfinished / "config.json", dataclasses.replace(config, decoding=decoding).to_json())
            tokenizers.save(unfinished / "tokenizer")
        write_atomically(unfinished / _MARKER, json.dumps({"to": target, "run": str(run)}) + "\n")
    return output


_MARKER = "exported.json"
"""What tells an earlier export, which may be replaced, from a folder of somebody else's."""


_STORES_ALL = ("marian", "fairseq", "ctranslate2")
"""Formats with the configuration and the tokenizers of their models."""


def _check_arguments(source: ImportFormat, config: Any, tokenizer: Any, mapping: Any, num_heads: Any) -> None:
    """Raises UserError if something is given that the format has no use for."""
    stores_all = source in _STORES_ALL
    for name, value, useless in (
        ("config", config, stores_all),
        ("tokenizer", tokenizer, stores_all),
        ("mapping", mapping, source != "torch"),
        ("num_heads", num_heads, source != "ctranslate2"),
    ):
        if value is not None and useless:
            raise UserError(f"{name} is given, and the format {source} has no use for it; leave it out")


def _read(
    path: Path,
    source: ImportFormat,
    config: Config | None,
    tokenizer: str | Path | None,
    mapping: str | Path | None,
    num_heads: int | None,
) -> Imported:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if source in _STORES_ALL:
        if source == "ctranslate2":
            return read_ctranslate2(path, num_heads)
        return read_marian(path) if source == "marian" else read_fairseq(path)
    beside = path if path.is_dir() else path.parent
    if config is None and (beside / "config.json").is_file():
        config = load_config(beside / "config.json")
    if tokenizer is None and (beside / "tokenizer").is_dir():
        tokenizer = beside
    if config is None:
        raise UserError(
            f"{path}: the format {source} stores neither the number of heads nor positions, norms and special ids: "
            "give them with --config, a recipe or a config.json"
        )
    if tokenizer is None:
        raise UserError(f"{path}: the format {source} stores no tokenizer: give one with --tokenizer, a run's folder")
    tokenizer = Path(tokenizer)
    tokenizers = TokenizerPair.load(tokenizer / "tokenizer" if (tokenizer / "tokenizer").is_dir() else tokenizer)
    tensors = read_tensors(path)
    model = config.model
    if mapping is not None:
        table = read_mapping(Path(mapping), model)
        # What is ignored may be anything; that ending says a table of positions.
        check_position_tables({n: value for n, value in tensors.items() if n.endswith(".pe")}, table, model, str(path))
        params = from_foreign(tensors, table, model, str(path))
    elif source == "safetensors":
        params = _own_params(tensors, model, str(path))
    else:
        params = (params_from_torch if source == "torch" else params_from_annotated)(tensors, model, str(path))
    return Imported(config, params, tokenizers)


def _own_params(tensors: dict[str, np.ndarray], model: ModelConfig, origin: str) -> Params:
    wanted = flatten(abstract_params(model))
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is left over" for name in tensors if name not in wanted]
    leaves = {}
    for name in wanted.keys() & tensors.keys():
        leaves[name], wrong = in_dtype(name, tensors[name], wanted[name].shape, np.dtype(wanted[name].dtype))
        problems += wrong
    if problems:
        raise UserError(f"{origin} does not fit the model: {'; '.join(problems)}")
    return unflatten({name: leaves[name] for name in wanted})


def _check_free(folder: Path, overwrite: bool, marker: str, what: str) -> None:
    """Raises UserError if the folder holds something that is not to be, or must not be, replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / marker).is_file():
        raise UserError(f"{folder} exists and is not {what} (no {marker}): give another output")
    if not overwrite:
        raise UserError(f"{folder} is not empty: give another output, or --overwrite to replace it")
