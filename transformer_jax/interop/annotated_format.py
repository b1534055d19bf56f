"""State dicts of annotated-transformer and of the common opus_books teaching model.

Both normalize by (x - mean) / (std + epsilon) with the unbiased std, before each sub-layer and once more after each
stack: another function than `torch.nn.LayerNorm`. The number of heads is not in a state dict.
"""

from collections.abc import Sequence

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.interop.imported import check_expressible, check_plain_heads
from transformer_jax.interop.tables import Row, Table, Tensors, embeddings, from_foreign, linear, norm, row, to_foreign
from transformer_jax.interop.torch_format import check_position_tables
from transformer_jax.types import Params

PROJECTIONS = ("query", "key", "value", "output")
SUBLAYERS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}


def _table(
    attentions: dict[str, str],
    projections: Sequence[str],
    feed_forward: tuple[str, str],
    norms: str,
    norm_names: tuple[str, str],
    source: str,
    target: str,
    output: str,
) -> Table:
    rows: list[Row] = [
        *embeddings(f"{source}.weight", f"{target}.weight", f"{output}.weight"),
        row(f"{output}.bias", "logits_bias"),
    ]
    for stack, sublayers in SUBLAYERS.items():
        there, here = f"{stack}.layers.{{i}}", f"{stack}/layer_{{i}}"
        for number, sublayer in enumerate(sublayers):
            rows += norm(f"{there}.{norms}.{number}.norm", f"{here}/{sublayer}_norm", norm_names)
            if sublayer == "feed_forward":
                rows += linear(f"{there}.{feed_forward[0]}", f"{here}/feed_forward/inner")
                rows += linear(f"{there}.{feed_forward[1]}", f"{here}/feed_forward/outer")
                continue
            for projection, ours in zip(projections, PROJECTIONS, strict=True):
                rows += linear(f"{there}.{attentions[sublayer]}.{projection}", f"{here}/{sublayer}/{ours}")
        rows += norm(f"{stack}.norm", f"{stack}/final_norm", norm_names)
    return Table(tuple(rows), ignored=(".pe",))


ANNOTATED = _table(
    attentions={"self_attention": "self_attn", "cross_attention": "src_attn"},
    projections=[f"linears.{number}" for number in range(4)],
    feed_forward=("feed_forward.w_1", "feed_forward.w_2"),
    norms="sublayer",
    norm_names=("a_2", "b_2"),
    source="src_embed.0.lut",
    target="tgt_embed.0.lut",
    output="generator.proj",
)

OPUS_BOOKS = _table(
    attentions={"self_attention": "self_attention_block", "cross_attention": "cross_attention_block"},
    projections=["w_q", "w_k", "w_v", "w_o"],
    feed_forward=("feed_forward_block.linear_1", "feed_forward_block.linear_2"),
    norms="residual_connections",
    norm_names=("alpha", "bias"),
    source="src_embed.embedding",
    target="tgt_embed.embedding",
    output="projection_layer.proj",
)


def params_from_annotated(tensors: Tensors, config: ModelConfig, origin: str = "the state dict") -> Params:
    """The parameters here, of the tensors of a state dict in either layout: the names tell which.

    Raises:
        UserError: names, shapes, values or position tables that do not fit; all of them are listed.
    """
    check_annotated(config)
    table = OPUS_BOOKS if any("attention_block" in name for name in tensors) else ANNOTATED
    # Early versions of the teaching model have one scale and one shift for all columns.
    widened = {
        name: np.full(config.d_model, tensor[0], tensor.dtype)
        if tensor.shape == (1,) and name.endswith((".norm.alpha", ".norm.bias"))
        else tensor
        for name, tensor in tensors.items()
    }
    check_position_tables(widened, table, config, origin)
    return from_foreign(widened, table, config, origin)


def annotated_from_params(params: Params, config: ModelConfig, table: Table = ANNOTATED) -> dict[str, np.ndarray]:
    """The state dict, of the parameters here."""
    check_annotated(config)
    return to_foreign(params, table, config)


def check_annotated(config: ModelConfig) -> None:
    """Raises UserError unless these models compute what the configuration says."""
    legal = {
        "norm_variant": ("unbiased_std",),
        "norm_position": ("pre",),
        "final_norm": (True,),
        "activation": ("relu",),
        "scale_embeddings": (True,),
        "positions": ("interleaved",),
        "position_exponent": ("paper",),
        "position_offset": (0,),
    }
    check_expressible(config, "annotated", legal)
    check_plain_heads(config, "annotated")
