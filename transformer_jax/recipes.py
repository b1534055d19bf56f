"""Recipes: the default one, and files that define `get_config()`."""

import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_jax.config import (
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.errors import UserError


def numbers_config() -> Config:
    """The offline default: spelled-out numbers from English to German, about two minutes on two CPU cores.

    A 2 + 2-layer model of d_model 128 learns from 40,000 numbers below one million (4 % of them) and is tested on 2,000
    others. It is post-norm with epsilon 1e-5 and one vocabulary, so that every format can hold it.
    """
    return Config(
        model=ModelConfig(
            vocab_size=400,
            d_model=128,
            num_layers=2,
            num_heads=4,
            d_ff=512,
            norm_epsilon=1e-5,
        ),
        data=DataConfig(source="numbers", batch_tokens=2_048, max_shapes=2),
        tokenizer=TokenizerConfig(kind="bpe"),
        training=TrainingConfig(
            num_steps=430,
            schedule="inverse_sqrt",
            warmup_steps=150,
            peak_learning_rate=2e-3,
            log_every=10,
            validate_every=215,
            valid_sentences=200,
            checkpoint_every=50,
            checkpoint_seconds=4.0,
            keep_checkpoints=3,
        ),
        decoding=DecodingConfig(length_penalty="power", alpha=1.0, batch_tokens=1_024),
    )


def load_recipe(recipe: str) -> Config:
    """The configuration that `FILE` or `FILE:NAME` stands for.

    The file's `get_config()` returns it; with a name, `get_config(NAME)`. A run's `config.json` serves too.

    Raises:
        UserError: no such file, no `get_config` in it, or it knows no such name.
    """
    path, _, name = recipe.partition(":")
    if not Path(path).is_file():
        raise UserError(
            f"{path}: no such recipe; give a Python file that defines get_config(), such as configs/numbers.py"
        )
    if path.endswith(".json"):
        return load_config(Path(path))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; a recipe is one that defines get_config()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from error
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UserError(f"{path} defines no get_config()")
    if name and not inspect.signature(get_config).parameters:
        raise UserError(f"{path} has one recipe only: leave out {':' + name!r}")
    if not name and not _callable_without_arguments(get_config):
        raise UserError(f"{path} has several recipes: name one, as {path}:NAME")
    config = get_config(name) if name else get_config()
    if not isinstance(config, Config):
        raise UserError(f"{path}: get_config() returned {type(config).__name__}; it must return a Config")
    return config


def _callable_without_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return False
    return True


def load_config(path: Path) -> Config:
    """Reads a `config.json`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return Config.from_json(text, str(path))
