"""The choices of the paper and of other implementations by name, and recipes: files that define `get_config()`."""

import ast
import dataclasses
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_jax.config import (
    RENAMED_FIELDS,
    Config,
    DataConfig,
    DecodingConfig,
    ModelConfig,
    TokenizerConfig,
    TrainingConfig,
)
from transformer_jax.runtime.files import read_text
from transformer_jax.types import UserError

# The id -1 is the last row of the embedding table.
_TABLE = """
model               paper_base    paper_big     t2t_2017      t2t_2018      fairseq       marian        torch
d_model             512           1024          512           512           512           512           512
num_layers          6             6             6             6             6             6             6
num_heads           8             16            8             8             8             8             8
d_ff                2048          4096          2048          2048          2048          2048          2048
norm_position       post          post          post          pre           post          post          post
final_norm          False         False         False         True          False         False         True
norm_epsilon        1e-6          1e-6          1e-6          1e-6          1e-5          1e-5          1e-5
norm_variant        standard      standard      standard      standard      standard      standard      standard
activation          relu          relu          relu          relu          relu          swish         relu
attention_bias      False         False         True          False         True          True          True
logits_bias         False         False         False         False         False         True          False
residual_dropout    0.1           0.3           0.1           0.1           0.1           0.1           0.1
attention_dropout   0.0           0.0           0.0           0.1           0.0           0.0           0.1
activation_dropout  0.0           0.0           0.0           0.1           0.0           0.0           0.1
positions           interleaved   interleaved   halves        halves        halves        halves        interleaved
position_exponent   paper         paper         tensor2tensor tensor2tensor tensor2tensor paper         paper
position_offset     0             0             0             0             2             0             0
tie_embeddings      all           all           all           all           all           all           all
scale_embeddings    True          True          True          True          True          True          True
decoder_start       bos           bos           zeros         zeros         eos           pad           bos
source_bos          False         False         False         False         False         False         False
source_eos          True          True          True          True          True          True          True
pad_id              0             0             0             0             1             -1            0
bos_id              1             1             0             0             0             -1            1
eos_id              2             2             1             1             2             0             2
unk_id              3             3             0             0             3             1             3
initialization      tensor2tensor tensor2tensor tensor2tensor tensor2tensor torch_fused   tensor2tensor torch_fused
dtype               float32       float32       float32       float32       float32       float32       float32
param_dtype         float32       float32       float32       float32       float32       float32       float32

data                paper_base    paper_big     t2t_2017      t2t_2018      fairseq       marian        torch
batch_tokens        25000         25000         32768         32768         28672         25000         25000
max_length          256           256           256           256           250           256           256
max_length_ratio    9.0           9.0           9.0           9.0           1.5           9.0           9.0

tokenizer           paper_base    paper_big     t2t_2017      t2t_2018      fairseq       marian        torch
joint               True          True          True          True          True          True          True

training            paper_base    paper_big     t2t_2017      t2t_2018      fairseq       marian        torch
num_steps           100000        300000        100000        100000        100000        100000        100000
schedule            noam          noam          noam          noam          inverse_sqrt  noam          noam
learning_rate_scale 1.0           1.0           1.0           2.0           1.0           1.0           1.0
peak_learning_rate  7e-4          7e-4          7e-4          7e-4          5e-4          7e-4          7e-4
warmup_steps        4000          4000          4000          8000          4000          4000          4000
adam_beta1          0.9           0.9           0.9           0.9           0.9           0.9           0.9
adam_beta2          0.98          0.98          0.98          0.997         0.98          0.98          0.999
adam_epsilon        1e-9          1e-9          1e-9          1e-9          1e-8          1e-9          1e-8
clip_norm           None          None          None          None          None          None          None
label_smoothing     0.1           0.1           0.1           0.1           0.1           0.1           0.1
label_smoothing_over  non_target  non_target  non_target  non_target  non_target        all           all
average_last        5             20            5             5             5             5             5
keep_checkpoints    5             20            5             5             5             5             5

decoding            paper_base    paper_big     t2t_2017      t2t_2018      fairseq       marian        torch
beam_size           4             4             4             4             4             4             4
alpha               0.6           0.6           0.6           0.6           0.6           1.0           0.6
length_penalty      gnmt          gnmt          gnmt          gnmt          power         power         gnmt
stopping            paper         paper         paper         paper         ctranslate2   huggingface   paper
max_length_offset           50            50            50            100           200           512           50
min_length          0             0             0             0             1             0             0
checkpoint          average       average       average       average       average       average       average
"""


def _value(cell: str) -> Any:
    """A number, truth value or None; else the word itself."""
    try:
        return ast.literal_eval(cell)
    except ValueError:
        return cell


def _parse(table: str) -> dict[str, dict[str, Any]]:
    presets: dict[str, dict[str, Any]] = {}
    for block in table.strip().split("\n\n"):
        (section, *names), *rows = (line.split() for line in block.splitlines())
        for field, *cells in rows:
            for name, cell in zip(names, cells, strict=True):
                presets.setdefault(name, {})[f"{section}.{field}"] = _value(cell)
    return presets


PRESETS: dict[str, dict[str, Any]] = _parse(_TABLE)
"""{"paper_base": {"model.d_model": 512, ...}, ...}; a negative id counts from the end of the vocabulary."""


def preset(name: str, vocab_size: int, **model_changes: Any) -> Config:
    """The configuration that a name of `PRESETS` stands for.

    A tokenizer trained here has the ids 0 to 3 for PAD, BOS, EOS and UNK. To train one with a preset that has others,
    change them back: `preset("fairseq", 37_000, pad_id=0, bos_id=1, eos_id=2, unk_id=3, position_offset=1)`.

    Args:
        name: one of `PRESETS`.
        vocab_size: rows of the embedding table.
        model_changes: fields of `ModelConfig` that replace the preset's.

    Raises:
        UserError: an unknown name, or values that `Config` refuses.

    >>> preset("marian", 58_101).model.pad_id
    58100
    """
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}; legal: {', '.join(PRESETS)}")
    sections: dict[str, dict[str, Any]] = {"model": {"vocab_size": vocab_size}}
    for field, value in PRESETS[name].items():
        section, _, key = field.partition(".")
        from_the_end = key.endswith("_id") and value < 0
        sections.setdefault(section, {})[key] = vocab_size + value if from_the_end else value
    sections["model"] |= model_changes
    kinds = {item.name: item.type for item in dataclasses.fields(Config)}
    made = {section: kinds[section](**values) for section, values in sections.items()}  # type: ignore[operator]  # classes
    return Config(**made)


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
    try:
        config = get_config(name) if name else get_config()
    except TypeError as error:
        old = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        new = [fields[old[1]] for fields in RENAMED_FIELDS.values() if old[1] in fields] if old else []
        if not old or not new:
            raise
        raise UserError(f"{path}: the field {old[1]} is now {new[0]}") from error
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
    return Config.from_json(read_text(path), str(path))
