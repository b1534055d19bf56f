"""Several runs that translate together: which can, and what they are made of."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.tokenizer import TokenizerPair
from transformer_jax.errors import UserError
from transformer_jax.run.checkpoint import load_params, resolve_checkpoint
from transformer_jax.run.folder import RunFolder
from transformer_jax.types import Params

_SAME = ("vocab_size", "source_rows", "pad_id", "bos_id", "eos_id", "unk_id", "start_id", "source_eos")


class Member(NamedTuple):
    """A model of an ensemble."""

    config: ModelConfig
    params: Params
    checkpoint: str = ""
    """Which parameters of its run these are: last, best, average or a step."""


def run_params(folder: RunFolder, config: Config) -> Params:
    """The parameters of a run's checkpoint, as `decoding.checkpoint` says.

    Raises:
        UserError: there is no such checkpoint.
    """
    checkpoint = resolve_checkpoint(folder, config.decoding.checkpoint, config.training.best_by)
    return load_params(checkpoint, config.model)


def load_member(
    run: str | Path, first: Path, config: Config, tokenizers: TokenizerPair, checkpoint: str | None
) -> Member:
    """Another run, for an ensemble with the first.

    Args:
        run: its folder.
        first: the first run's.
        config, tokenizers: of that.
        checkpoint: which parameters; None: as the other run says.

    Raises:
        UserError: no such run or checkpoint, or its tokens are others.
    """
    folder, refusal = RunFolder(Path(run)), f"{run} cannot be in an ensemble with {first}: "
    own = folder.load_config()
    for name in _SAME:
        if getattr(own.model, name) != getattr(config.model, name):
            there, here = getattr(own.model, name), getattr(config.model, name)
            raise UserError(f"{refusal}model.{name} is {there} there and {here} here")
    if not TokenizerPair.load(folder.tokenizer).is_like(tokenizers):
        raise UserError(f"{refusal}their tokenizers are not the same")
    if checkpoint is not None:
        own = dataclasses.replace(own, decoding=dataclasses.replace(own.decoding, checkpoint=checkpoint))
    return Member(own.model, run_params(folder, own), own.decoding.checkpoint)
