"""Import and export of models: make a run from third-party files, and third-party files from a run."""

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from transformer_jax.checkpoint.checkpoint import load_params, resolve_checkpoint, save_params
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.interop.ctranslate2_format import read_ctranslate2, write_ctranslate2
from transformer_jax.interop.exchange import OWN_TOKENIZER, Imported, propose_config
from transformer_jax.interop.fairseq_format import read_fairseq
from transformer_jax.interop.mapping import check_mapping, read_mapping
from transformer_jax.interop.marian_format import read_marian, write_marian
from transformer_jax.interop.tables import Tensors, flatten, from_foreign, in_dtype, to_foreign, unflatten
from transformer_jax.interop.tensor_files import read_tensors, save_torch, write_safetensors
from transformer_jax.interop.torch_format import TORCH, state_dict_format
from transformer_jax.model.transformer import abstract_params
from transformer_jax.runtime.fields import require
from transformer_jax.runtime.files import atomic_dir, read_json, to_json, write_atomically
from transformer_jax.types import Params, UserError, library_errors

ImportFormat = Literal["torch", "annotated", "fairseq", "marian", "ctranslate2", "safetensors"]
ExportFormat = Literal["safetensors", "torch", "marian", "ctranslate2"]

logger = logging.getLogger(__name__)

_MARKER = "exported.json"
"""File that distinguishes an earlier export, which may be replaced, from any other folder."""
_ONE_CHECKPOINT = {"checkpoint": "last"}
_COMPLETE = {"marian": read_marian, "fairseq": read_fairseq, "ctranslate2": read_ctranslate2}
"""Readers of the formats that store the configuration and the tokenizers of their models."""


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
        path: Third-party file or folder.
        source: Its format.
        output: Folder of the new run.
        config: None uses the `config.json` next to a state dict, or proposes a configuration from its tensors.
        tokenizer: A run, its folder `tokenizer/`, or a `tokenizer.json`. Only state dicts need it.
        mapping: File that names the tensors of any other PyTorch model (see docs/interop.md).
        overwrite: Whether to replace an earlier import.
        **model: Fields of `ModelConfig` that a state dict does not determine, such as `num_heads=8, source_bos=True`.
            They override `config`. The format ctranslate2 accepts only `num_heads`.

    Returns:
        The new run, which can translate and be evaluated, exported and fine-tuned.

    Raises:
        UserError: A file or argument is missing, or the model is not supported. The output is then unchanged.
    """
    path, run = Path(path), RunDir(Path(output))
    _check_output(run.path, overwrite, run.imported.name, "an imported run")
    useless = []
    if source in _COMPLETE:
        useless += [name for name, value in (("config", config), ("tokenizer", tokenizer)) if value]
        useless += [name for name in model if not (source == "ctranslate2" and name == "num_heads")]
    if useless or (mapping and source != "torch"):
        useless += ["mapping"] if mapping else []
        raise UserError(f"the format {source} has no use for {', '.join(useless)}: leave it out")
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    unknown = [name for name in model if name not in known]
    require(not unknown, f"the model has no field {', '.join(unknown)}; its fields are {', '.join(sorted(known))}")
    require(path.exists(), f"{path}: no such file or folder")
    with library_errors(f"{path}: not readable as {source}"):  # the file may contain values of any type anywhere
        if source in _COMPLETE:
            imported = _COMPLETE[source](path, **model)
        else:
            imported = _read_state_dict(path, source, config, tokenizer, Path(mapping) if mapping else None, model)
    imported.tokenizers.check_fits(imported.config.model)
    with atomic_dir(run.path, replace=overwrite) as unfinished:
        new = RunDir(unfinished)
        new.write_config(imported.config.with_changes(decoding=_ONE_CHECKPOINT))
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
        if target in ("marian", "ctranslate2"):
            write = write_marian if target == "marian" else write_ctranslate2
            write(unfinished, config, params, tokenizers, warn)
        else:
            if target == "torch":
                save_torch(unfinished / "model.pt", to_foreign(params, TORCH, config.model))
            else:
                write_safetensors(unfinished / "model.safetensors", flatten(params), {"format": "transformer_jax"})
            write_atomically(unfinished / "config.json", config.with_changes(decoding=_ONE_CHECKPOINT).to_json())
            tokenizers.save(unfinished / OWN_TOKENIZER)
        write_atomically(unfinished / _MARKER, to_json({"to": target, "run": str(run)}) + "\n")
    return output


def _check_output(folder: Path, overwrite: bool, marker: str, kind: str) -> None:
    """Raise UserError if the output is something that may not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    is_own = (folder / marker).is_file()
    require(is_own, f"{folder} exists and is not {kind} (it has no {marker}). Choose another output")
    require(overwrite, f"{folder} is not empty. Choose another output, or replace it with --overwrite")


def _read_state_dict(
    path: Path,
    source: str,
    config: Config | None,
    tokenizer: str | Path | None,
    mapping: Path | None,
    stated: Mapping[str, object],
) -> Imported:
    config = stated_config(path, config, stated)
    siblings = path if path.is_dir() else path.parent
    if tokenizer is None and (siblings / OWN_TOKENIZER).is_dir():
        tokenizer = siblings
    if tokenizer is None:
        fix = "Pass a run's folder or a tokenizer.json with --tokenizer"
        raise UserError(f"{path}: the format {source} stores no tokenizer. {fix}")
    own = Path(tokenizer) / OWN_TOKENIZER
    tokenizers = TokenizerPair.load(own if own.is_dir() else Path(tokenizer))
    tensors = read_tensors(path)
    if source == "safetensors":
        if config is None:
            fix = "Pass a recipe or config.json with --config"
            raise UserError(f"{path}: the format {source} stores no configuration. {fix}")
        return Imported(config, _own_params(tensors, config.model, path), tokenizers)
    table = read_mapping(mapping) if mapping else state_dict_format(source, tensors)
    if config is None:
        config = propose_config(tensors, table, tokenizers, stated, str(path))
    elif source == "annotated" and not config.model.source_bos and "source_bos" not in stated:
        logger.warning(
            "%s: the configuration has model.source_bos=False. annotated-transformer's own batches and the opus_books "
            "teaching code start the source with BOS: state --source-bos True for such a model",
            path,
        )
    if mapping:
        check_mapping(table, config.model, mapping)
    return Imported(config, from_foreign(tensors, table, config.model, str(path)), tokenizers)


def stated_config(path: Path, config: Config | None, stated: Mapping[str, object]) -> Config | None:
    """Return `config`, or the `config.json` next to a state dict, with its model fields replaced by `stated`."""
    sibling = (path if path.is_dir() else path.parent) / "config.json"
    if config is None and sibling.is_file():
        tree = read_json(sibling)
        if "model" in tree and tree.keys() <= {field.name for field in dataclasses.fields(Config)}:
            config = Config.load(sibling)
        else:
            logger.warning("%s is not a configuration of this package and is ignored", sibling)
    return config and config.with_changes(model=stated)


def _own_params(tensors: Tensors, model: ModelConfig, path: Path) -> Params:
    wanted = flatten(abstract_params(model))
    problems = [f"{name} is missing" for name in wanted if name not in tensors]
    problems += [f"{name} is left over" for name in tensors if name not in wanted]
    leaves = {
        name: in_dtype(name, tensors[name], leaf.shape, np.dtype(leaf.dtype), problems)
        for name, leaf in wanted.items()
        if name in tensors
    }
    require(not problems, f"{path} does not fit the model: {'; '.join(problems)}")
    return unflatten(leaves)
