"""Presets, which are the choices of the paper and of other implementations by name, and loading of recipe files."""

import inspect
import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformer_jax.config import (
    RENAMED_FIELDS,
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError

# Values that several presets share.
_HALVES = {"positions": "halves", "position_exponent": "tensor2tensor"}
_TORCH = {"norm_epsilon": 1e-5, "attention_bias": True, "initialization": "torch_fused"}
_DROPOUT_INSIDE = {"attention_dropout": 0.1, "activation_dropout": 0.1}


def _ids(**ids: int) -> dict[str, int]:
    return {f"{token}_id": index for token, index in ids.items()}


def paper_base(vocab_size: int) -> Config:
    """Return the base model of the paper: 100,000 steps, and the average of the last 5 checkpoints (section 6.1)."""
    return Config(
        model=ModelConfig.base(vocab_size),
        data=DataConfig(batch_tokens=25_000),
        training=TrainingConfig(average_last=5),
        decoding=DecodingConfig(checkpoint="average"),
    )


def paper_big(vocab_size: int) -> Config:
    """Return the big model of the paper: 300,000 steps, and the average of the last 20 checkpoints (section 6.1)."""
    training = {"num_steps": 300_000, "average_last": 20, "keep_checkpoints": 20}
    return replace(paper_base(vocab_size), model=ModelConfig.big(vocab_size)).with_changes(training=training)


def t2t_2017(vocab_size: int) -> Config:
    """Return the first release of tensor2tensor, June 2017, by the authors of the paper."""
    return paper_base(vocab_size).with_changes(
        model={"attention_bias": True, "decoder_start": "zeros", **_HALVES, **_ids(pad=0, bos=0, eos=1, unk=0)},
        data={"batch_tokens": 32_768},
    )


def t2t_2018(vocab_size: int) -> Config:
    """Return `transformer_base` of tensor2tensor since 2018: pre-norm, more dropout and another learning rate."""
    return t2t_2017(vocab_size).with_changes(
        model={"norm_position": "pre", "final_norm": True, "attention_bias": False, **_DROPOUT_INSIDE},
        training={"learning_rate_scale": 2.0, "warmup_steps": 8_000, "adam_beta2": 0.997},
        decoding={"max_length_offset": 100},
    )


def fairseq(vocab_size: int) -> Config:
    """Return the `transformer` of fairseq with its recipe for WMT14/16 English to German."""
    return paper_base(vocab_size).with_changes(
        model={**_TORCH, **_HALVES, "position_offset": 2, "decoder_start": "eos", **_ids(pad=1, bos=0, eos=2, unk=3)},
        data={"batch_tokens": 28_672, "max_length": 250, "max_length_ratio": 1.5},
        training={"schedule": "inverse_sqrt", "peak_learning_rate": 5e-4, "adam_epsilon": 1e-8},
        decoding={"length_penalty": "power", "stopping": "ctranslate2", "max_length_offset": 200, "min_length": 1},
    )


def marian(vocab_size: int) -> Config:
    """Return `MarianMTModel` of Hugging Face with the OPUS-MT checkpoints, whose PAD is the last row of the table."""
    return paper_base(vocab_size).with_changes(
        model={
            "norm_epsilon": 1e-5,
            "activation": "swish",
            "attention_bias": True,
            "logits_bias": True,
            "positions": "halves",
            "decoder_start": "pad",
            **_ids(pad=vocab_size - 1, bos=vocab_size - 1, eos=0, unk=1),
        },
        training={"label_smoothing_over": "all"},
        decoding={"alpha": 1.0, "length_penalty": "power", "stopping": "huggingface", "max_length_offset": 512},
    )


def torch(vocab_size: int) -> Config:
    """Return `torch.nn.Transformer`, `CrossEntropyLoss` and `torch.optim.Adam` with their defaults."""
    return paper_base(vocab_size).with_changes(
        model={"final_norm": True, **_TORCH, **_DROPOUT_INSIDE},
        training={"adam_beta2": 0.999, "adam_epsilon": 1e-8, "label_smoothing_over": "all"},
    )


PRESETS: dict[str, Callable[[int], Config]] = {
    function.__name__: function for function in (paper_base, paper_big, t2t_2017, t2t_2018, fairseq, marian, torch)
}
"""The function of every preset by its name. docs/faithfulness.md gives the source of each value."""


def preset(name: str, vocab_size: int, **model_changes: object) -> Config:
    """Return the configuration of a preset, with changes to the model.

    A tokenizer that is trained by this package assigns the ids 0 to 3 to PAD, BOS, EOS and UNK. To train one for a
    preset with other ids, set them back: `preset("fairseq", 37_000, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
    position_offset=1)`.

    Args:
        name: Name of the preset, a key of `PRESETS`.
        vocab_size: Number of rows of the embedding table.
        **model_changes: Fields of `ModelConfig` that replace the values of the preset.

    Raises:
        UserError: The name is unknown, or a value is not legal.

    >>> preset("marian", 58_101).model.pad_id
    58100
    """
    require(name in PRESETS, f"there is no preset {name!r}; legal: {', '.join(PRESETS)}")
    return PRESETS[name](vocab_size).with_changes(model=model_changes)


def numbers_config() -> Config:
    """Return the offline default: spelled-out numbers from English to German, two minutes on two CPU cores.

    The model is post-norm with epsilon 1e-5 and has one vocabulary, so that it can be exported to every format.
    """
    return Config(
        model=ModelConfig(vocab_size=400, d_model=128, num_layers=2, num_heads=4, d_ff=512, norm_epsilon=1e-5),
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
    """Return what `get_config()` in a Python file FILE returns, or `get_config(NAME)` for the recipe `FILE:NAME`.

    FILE may also be the `config.json` of a run.
    """
    path, _, name = recipe.partition(":")
    advice = "Pass a Python file that defines get_config(), such as configs/numbers.py"
    require(Path(path).is_file(), f"{path}: no such recipe. {advice}")
    if path.endswith(".json"):
        return Config.load(Path(path))
    require(path.endswith(".py"), f"{path} is not a Python file. Pass a .py file that defines get_config()")
    try:
        config = _call_get_config(runpy.run_path(path).get("get_config"), path, name)
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from error
    except TypeError as error:  # of the constructor of a section, at the top level of the file or in a function
        old = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        new = [fields[old[1]] for fields in RENAMED_FIELDS.values() if old[1] in fields] if old else []
        if not old or not new:
            raise
        raise UserError(f"{path}: the field {old[1]} was renamed to {new[0]}. Change it in the file") from error
    if not isinstance(config, Config):
        raise UserError(f"{path}: get_config() returned {type(config).__name__}; it must return a Config")
    return config


def _call_get_config(get_config: object, path: str, name: str) -> object:
    """Call a recipe file's `get_config` with `name`, if there is one, and return the result."""
    if not callable(get_config):
        raise UserError(f"{path} defines no get_config(). Add a function get_config() that returns a Config")
    if name and not inspect.signature(get_config).parameters:
        raise UserError(f"{path} has only one recipe. Remove {':' + name!r}")
    if not name:
        try:
            inspect.signature(get_config).bind()
        except TypeError:
            raise UserError(f"{path} has several recipes. Pass {path}:NAME") from None
    return get_config(name) if name else get_config()
