"""`torch.nn.Transformer`, and stacks of its encoder and decoder layers, with embeddings and an output layer.

Names are those of `torch_model.TorchTransformer`; the usual other names of the same things are read too. A state dict
does not say how many heads there are, where the LayerNorms stand, what the positions are or whether embeddings are
scaled: the configuration says so. Position tables that are stored are compared with it.
"""

import re
from collections.abc import Mapping

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.interop.imported import check_expressible, check_plain_heads
from transformer_jax.interop.tables import (
    Row,
    Table,
    Tensors,
    embeddings,
    from_foreign,
    linear,
    norm,
    renamed,
    row,
    to_foreign,
)
from transformer_jax.model.positional import sinusoids
from transformer_jax.types import Params, UserError


def _attention(foreign: str, ours: str) -> list[Row]:
    inputs = [f"{ours}/{name}" for name in ("query", "key", "value")]
    return [
        row(f"{foreign}.in_proj_weight", *(f"{name}/kernel" for name in inputs)),
        row(f"{foreign}.in_proj_bias", *(f"{name}/bias" for name in inputs), zeros=True),
        *linear(f"{foreign}.out_proj", f"{ours}/output", zeros=True),
    ]


def _stack(foreign: str, ours: str, attentions: Mapping[str, str]) -> list[Row]:
    rows: list[Row] = []
    for number, (there, here) in enumerate(attentions.items(), 1):
        rows += _attention(f"{foreign}.layers.{{i}}.{there}", f"{ours}/layer_{{i}}/{here}")
        rows += norm(f"{foreign}.layers.{{i}}.norm{number}", f"{ours}/layer_{{i}}/{here}_norm")
    rows += linear(f"{foreign}.layers.{{i}}.linear1", f"{ours}/layer_{{i}}/feed_forward/inner")
    rows += linear(f"{foreign}.layers.{{i}}.linear2", f"{ours}/layer_{{i}}/feed_forward/outer")
    rows += norm(f"{foreign}.layers.{{i}}.norm{len(attentions) + 1}", f"{ours}/layer_{{i}}/feed_forward_norm")
    return rows + norm(f"{foreign}.norm", f"{ours}/final_norm")


SHARED = ("embedding.weight", "embed.weight", "shared.weight", "tok_emb.weight")
SOURCE = ("src_embed.weight", "src_tok_emb.embedding.weight", "src_embedding.weight", "encoder_embedding.weight")
TARGET = ("tgt_embed.weight", "tgt_tok_emb.embedding.weight", "tgt_embedding.weight", "decoder_embedding.weight")
OUTPUT = ("generator.weight", "fc_out.weight", "output_projection.weight", "lm_head.weight", "fc.weight", "out.weight")

TABLE = Table(
    rows=(
        # A shared table may stand for both sides.
        *embeddings((*SOURCE, *SHARED), (*TARGET, *SHARED), OUTPUT),
        row(tuple(name.replace("weight", "bias") for name in OUTPUT), "logits_bias"),
        row("src_positions.weight", "source_positions/table"),
        row("tgt_positions.weight", "target_positions/table"),
        *_stack("transformer.encoder", "encoder", {"self_attn": "self_attention"}),
        *_stack("transformer.decoder", "decoder", {"self_attn": "self_attention", "multihead_attn": "cross_attention"}),
    ),
    ignored=(".pe", "pos_embedding", "positional_encoding", "pos_encoding"),
)

# What a state dict may put before the names above, and what the stacks are called outside torch.nn.Transformer.
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.|model\.)+")
_STACKS = re.compile(r"^(?:transformer[._])?(encoder|decoder)\.(?=layers\.|norm\.)")


def params_from_torch(tensors: Tensors, config: ModelConfig, origin: str = "the state dict") -> Params:
    """The parameters here, of the tensors of a state dict.

    Raises:
        UserError: names, shapes, values or position tables that do not fit; all of them are listed.
    """
    check_torch(config)
    tensors = renamed(tensors, lambda name: _STACKS.sub(r"transformer.\1.", _PREFIXES.sub("", name)), origin)
    check_position_tables(tensors, TABLE, config, origin)
    return from_foreign(tensors, TABLE, config, origin)


def torch_from_params(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """The state dict of `torch_model.TorchTransformer`, of the parameters here."""
    check_torch(config)
    return to_foreign(params, TABLE, config)


def check_torch(config: ModelConfig) -> None:
    """Raises UserError unless torch's modules can compute this model."""
    check_plain_heads(config, "torch")
    check_expressible(config, "torch", {"norm_variant": ("standard",)})


def check_position_tables(tensors: Tensors, table: Table, config: ModelConfig, origin: str) -> None:
    """Raises UserError if a stored table of positions is not the one that the configuration describes."""
    for name, stored in tensors.items():
        if not name.endswith(table.ignored or ("\0",)) or stored.size == 0 or config.positions == "learned":
            continue
        stored = np.squeeze(stored)
        if stored.ndim != 2 or stored.shape[1] != config.d_model:
            raise UserError(
                f"{origin}: {name} has shape {list(stored.shape)}; a table of positions has d_model columns"
            )
        ours = sinusoids(
            len(stored), config.d_model, config.positions, config.position_exponent, config.position_offset
        )
        difference = np.abs(stored - ours).max()
        if not difference <= 1e-3:  # float32 tables of 5,000 rows are off by some 1e-4 themselves
            raise UserError(
                f"{origin}: {name} is not the table that the configuration describes (largest difference "
                f"{difference:.2g}): see model.positions {config.positions!r}, model.position_exponent "
                f"{config.position_exponent!r} and model.position_offset {config.position_offset}"
            )
