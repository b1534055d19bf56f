"""Import and export: a run from foreign files, and foreign files from a run."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint, save_params
from transformer_jax.checkpoint.run_dir import RunDir, load_config
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.ctranslate2_format import read_ctranslate2, write_ctranslate2
from transformer_jax.interop.exchange import OWN_TOKENIZER, Imported
from transformer_jax.interop.fairseq_format import read_fairseq
from transformer_jax.interop.mapping import check_mapping, read_mapping
from transformer_jax.interop.marian_format import read_marian, write_marian
from transformer_jax.interop.proposal import propose_config, propose_standard_config
from transformer_jax.interop.tables import Table, flatten, from_foreign, in_dtype, unflatten
from transformer_jax.interop.tensor_files import read_tensors, save_torch, write_safetensors
from transformer_jax.interop.torch_format import (
    check_position_tables,
    params_from_annotated,
    params_from_torch,
    torch_from_params,
)
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.files import atomic_dir, read_json, to_json, write_atomically
from transformer_jax.types import Params, UserError, first_line

ImportFormat = Literal["torch", "annotated", "fairseq", "marian", "ctranslate2", "safetensors"]
ExportFormat = Literal["safetensors", "torch", "marian", "ctranslate2"]

logger = logging.getLogger(__name__)

_MARKER = "exported.json"
"""File that distinguishes an earlier export, which may be replaced, from any other folder."""
_COMPLETE = ("marian", "fairseq", "ctranslate2")
"""Formats that store the configuration and the tokenizers of their models."""


def import_run(
    path: str | Path,
    source: ImportFormat,
    output: str | Path,
    *,
    config: Config | None = None,
    tokenizer: str | Path | None = None,
    mapping: str | Path | None = None,
    overwrite: bool = False,
    **model: Any,
) -> RunDir:
    """Make a run from another program's model.

    Args:
        path: Foreign file or folder.
        source: Its format.
        output: Folder of the new run.
        config: Configuration of the model. None uses the `config.json` next to a state dict, or proposes a
            configuration from its tensors.
        tokenizer: A run, its folder `tokenizer/`, or a `tokenizer.json`. Only state dicts need it.
        mapping: File that names the tensors of any other PyTorch model (see `mapping.read_mapping`).
        overwrite: Whether to replace an earlier import.
        **model: Fields of `ModelConfig` that a state dict does not show, such as `num_heads=8, source_bos=True`. They
            override `config`. The format ctranslate2 takes `num_heads` alone.

    Returns:
        The new run, which can be translated with, evaluated, exported, and fine-tuned.

    Raises:
        UserError: A file is missing or damaged, an argument is missing, or the model is not supported. The output is
            then unchanged.
    """
    path, run = Path(path), RunDir(Path(output))
    _check_output(run.path, overwrite, run.imported.name, "an imported run")
    _check_arguments(source, config, tokenizer, mapping, model)
    try:
        imported = _read(path, source, config, tokenizer, mapping, model)
    except UserError:
        raise
    except Exception as error:  # a foreign file may hold values of any type in any place
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
    """Write a run's model for another program.

    Args:
        run: Folder of the run.
        target: Format to write.
        output: Folder to write, which must be empty or missing.
        checkpoint: last, best, average or a step. None uses the run's `decoding.checkpoint`.
        overwrite: Whether to replace an earlier export.
        warn: Called with each setting that the format can express only approximately.

    Returns:
        The output folder.

    Raises:
        UserError: The format cannot express the model. The fields are named, and the output is unchanged.
    """
    folder, output = RunDir(Path(run)), Path(output)
    config = folder.load_config()
    _check_output(output, overwrite, _MARKER, "an exported model")
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
            tokenizers.save(unfinished / OWN_TOKENIZER)
        write_atomically(unfinished / _MARKER, to_json({"to": target, "run": str(run)}) + "\n")
    return output


def _check_output(folder: Path, overwrite: bool, marker: str, kind: str) -> None:
    """Raise UserError if the output is something that may not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / marker).is_file():
        raise UserError(f"{folder} exists and is not {kind} (it has no {marker}). Choose another output")
    if not overwrite:
        raise UserError(f"{folder} is not empty. Choose another output, or replace it with --overwrite")


def _check_arguments(
    source: ImportFormat,
    config: Config | None,
    tokenizer: str | Path | None,
    mapping: str | Path | None,
    model: Mapping[str, Any],
) -> None:
    """Raise UserError for an argument that the format has no use for."""
    is_complete = source in _COMPLETE
    useless = [name for name, value in (("config", config), ("tokenizer", tokenizer)) if is_complete and value]
    useless += ["mapping"] if mapping and source != "torch" else []
    useless += [name for name in model if is_complete and not (source == "ctranslate2" and name == "num_heads")]
    if useless:
        raise UserError(f"the format {source} has no use for {', '.join(useless)}: leave it out")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    unknown = [name for name in model if name not in known]
    if unknown:
        raise UserError(f"the model has no field {', '.join(unknown)}; its fields are {', '.join(sorted(known))}")


def _read(
    path: Path,
    source: ImportFormat,
    config: Config | None,
    tokenizer: str | Path | None,
    mapping: str | Path | None,
    model: Mapping[str, Any],
) -> Imported:
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if source == "ctranslate2":
        return read_ctranslate2(path, model.get("num_heads"))
    if source == "marian":
        return read_marian(path)
    if source == "fairseq":
        return read_fairseq(path)
    siblings = path if path.is_dir() else path.parent
    if config is None and (siblings / "config.json").is_file():
        config = _sibling_config(siblings / "config.json")
    if tokenizer is None and (siblings / OWN_TOKENIZER).is_dir():
        tokenizer = siblings
    if tokenizer is None:
        raise UserError(
            f"{path}: the format {source} stores no tokenizer. Pass a run's folder or a tokenizer.json with --tokenizer"
        )
    tokenizer = Path(tokenizer)
    own = tokenizer / OWN_TOKENIZER
    tokenizers = TokenizerPair.load(own if own.is_dir() else tokenizer)
    return _read_state_dict(path, source, config, tokenizers, Path(mapping) if mapping else None, model)


def _sibling_config(file: Path) -> Config | None:
    """Return the configuration next to a state dict, or None for a `config.json` of another program."""
    tree = read_json(file)
    sections = {field.name for field in dataclasses.fields(Config)}
    if "model" in tree and tree.keys() <= sections:
        return load_config(file)
    logger.warning("%s is not a configuration of this package and is ignored", file)
    return None


def _read_state_dict(
    path: Path,
    source: ImportFormat,
    config: Config | None,
    tokenizers: TokenizerPair,
    mapping: Path | None,
    stated: Mapping[str, Any],
) -> Imported:
    tensors, origin = read_tensors(path), str(path)
    table = read_mapping(mapping) if mapping else None
    if config is not None:
        config = config.with_changes(model=stated)
        if source == "annotated" and not config.model.source_bos and "source_bos" not in stated:
            logger.warning(
                "%s: the configuration has model.source_bos=False. annotated-transformer's own batches and the "
                "opus_books teaching code start the source with BOS: state --source-bos True for such a model",
                origin,
            )
    elif table is not None:
        config = propose_config(tensors, table, tokenizers, {"norm_epsilon": 1e-5, **stated}, origin, is_mapping=True)
    elif source in ("torch", "annotated"):
        config = propose_standard_config(tensors, source, tokenizers, stated, origin)
    else:
        raise UserError(
            f"{path}: the format {source} stores no configuration. Pass a recipe or config.json with --config"
        )
    model = config.model
    if table is not None and mapping is not None:
        params = _mapped_params(tensors, table, model, mapping, origin)
    elif source == "safetensors":
        params = _own_params(tensors, model, origin)
    else:
        params = (params_from_torch if source == "torch" else params_from_annotated)(tensors, model, origin)
    return Imported(config, params, tokenizers)


def _mapped_params(
    tensors: dict[str, np.ndarray], table: Table, model: ModelConfig, mapping: Path, origin: str
) -> Params:
    check_mapping(table, model, mapping)
    # Ignored tensors may hold anything, but one with this ending is a position table.
    positions = {name: tensor for name, tensor in tensors.items() if name.endswith(".pe")}
    check_position_tables(positions, table, model, origin)
    return from_foreign(tensors, table, model, origin)


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
