"""Presets: the choices of the paper, of its released code and of other software, by name.

docs/faithfulness.md says where each value comes from. Where a software decides nothing (torch.nn.Transformer has no
embeddings, and no learning rate) the preset keeps the paper's choice, or ours where the paper is silent too. A preset
sets every field of that ledger; the sizes are those of the base model, or of the big one.
"""

import ast
import dataclasses
from typing import Any

from transformer_jax.config import Config
from transformer_jax.errors import UserError

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
smoothing_mass      others        others        others        others        others        all           all
average_last        5             20            5             5             5             5             5
keep_checkpoints    5             20            5             5             5             5             5

decoding            paper_base    paper_big     t2t_2017      t2t_2018      fairseq       marian        torch
beam_size           4             4             4             4             4             4             4
alpha               0.6           0.6           0.6           0.6           0.6           1.0           0.6
length_penalty      gnmt          gnmt          gnmt          gnmt          power         power         gnmt
stopping            paper         paper         paper         paper         ctranslate2   huggingface   paper
max_extra           50            50            50            100           200           512           50
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
    return Config(**{section: kinds[section](**values) for section, values in sections.items()})  # type: ignore[operator]
