"""State dicts of PyTorch models: `torch.nn.Transformer`, annotated-transformer, and the opus_books teaching model.

The first layout has the names of `torch_models.TorchTransformer`; usual other names of the same tensors are read too.
annotated-transformer and the teaching model normalize by (x - mean) / (std + epsilon) with the unbiased std, before
each sub-layer and once more after each stack, which is another function than `torch.nn.LayerNorm`.

A state dict does not show the number of heads, where `torch.nn.Transformer` normalizes, whether embeddings are scaled
or what the source looks like. The configuration states these. Position tables in a state dict are compared with it.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.interop.exchange import check_expressible, check_plain_heads
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

# ------------------------------------------------------------------------------------------------ torch.nn.Transformer


def _attention(foreign: str, ours: str) -> list[Row]:
    inputs = [f"{ours}/{name}" for name in ("query", "key", "value")]
    return [
        row(f"{foreign}.in_proj_weight", *(f"{name}/kernel" for name in inputs)),
        row(f"{foreign}.in_proj_bias", *(f"{name}/bias" for name in inputs), zeros=True),
        *linear(f"{foreign}.out_proj", f"{ours}/output", zeros=True),
    ]


def attention_from_torch(state_dict: Tensors, num_heads: int) -> Params:
    """Convert the state dict of a `torch.nn.MultiheadAttention` to parameters of a `MultiHeadAttention`.

    Args:
        state_dict: NumPy arrays `in_proj_weight` [3 * d_model, d_model] and `out_proj.weight` [d_model, d_model]; with
            biases also `in_proj_bias` and `out_proj.bias`.
        num_heads: Number of heads, which a state dict does not show.

    Returns:
        Parameters of `MultiHeadAttention(d_model, num_heads, use_bias="in_proj_bias" in state_dict)`.

    Raises:
        UserError: The state dict has other tensors, or `num_heads` does not divide d_model.
    """
    biases = {"in_proj_bias", "out_proj.bias"}
    if set(state_dict) - biases != {"in_proj_weight", "out_proj.weight"} or len(biases & set(state_dict)) == 1:
        raise UserError(
            f"the state dict has {', '.join(sorted(state_dict))}; in_proj_weight and out_proj.weight are needed, with "
            "or without in_proj_bias and out_proj.bias. Use a module without kdim, vdim, bias_k and bias_v."
        )
    d_model = len(state_dict["out_proj.weight"])
    if d_model % num_heads:
        raise UserError(f"num_heads={num_heads} does not divide d_model={d_model}. Pass the module's num_heads.")
    heads = num_heads, d_model // num_heads
    params: dict[str, dict[str, np.ndarray]] = {
        name: {"kernel": weight.T.reshape(d_model, *heads)}
        for name, weight in zip(("query", "key", "value"), np.split(state_dict["in_proj_weight"], 3), strict=True)
    }
    params["output"] = {"kernel": state_dict["out_proj.weight"].T.reshape(*heads, d_model)}
    if "in_proj_bias" in state_dict:
        for name, bias in zip(params, np.split(state_dict["in_proj_bias"], 3), strict=False):
            params[name]["bias"] = bias.reshape(heads)
        params["output"]["bias"] = state_dict["out_proj.bias"]
    return params


def attention_to_torch(params: Params) -> dict[str, np.ndarray]:
    """Convert parameters of a `MultiHeadAttention` to a state dict of `torch.nn.MultiheadAttention`, in NumPy arrays.

    Raises:
        UserError: d_k or d_v is not d_model / num_heads, for which torch has no module.
    """
    inputs = [params[name] for name in ("query", "key", "value")]
    d_model, num_heads, _ = inputs[0]["kernel"].shape
    for name in ("query", "key", "value"):
        shape = params[name]["kernel"].shape
        if shape[1] * shape[2] != d_model:
            raise UserError(
                f"{name}/kernel has shape {list(shape)}; torch.nn.MultiheadAttention needs heads of width d_model / "
                f"num_heads = {d_model / num_heads:g}"
            )
    tensors = {
        "in_proj_weight": np.concatenate([np.asarray(part["kernel"]).reshape(d_model, -1).T for part in inputs]),
        "out_proj.weight": np.asarray(params["output"]["kernel"]).reshape(-1, d_model).T.copy(),
    }
    if "bias" in params["output"]:
        tensors["in_proj_bias"] = np.concatenate([np.asarray(part["bias"]).reshape(-1) for part in inputs])
        tensors["out_proj.bias"] = np.asarray(params["output"]["bias"])
    return tensors


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
        # A shared table may serve as the source's and as the target's.
        *embeddings((*SOURCE, *SHARED), (*TARGET, *SHARED), OUTPUT),
        row(tuple(name.replace("weight", "bias") for name in OUTPUT), "logits_bias"),
        row("src_positions.weight", "source_positions/table"),
        row("tgt_positions.weight", "target_positions/table"),
        *_stack("transformer.encoder", "encoder", {"self_attn": "self_attention"}),
        *_stack("transformer.decoder", "decoder", {"self_attn": "self_attention", "multihead_attn": "cross_attention"}),
    ),
    ignored=(".pe", "pos_embedding", "positional_encoding", "pos_encoding"),
)

# Prefixes that a training script adds to the names above, and names of the stacks outside torch.nn.Transformer.
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.|model\.)+")
_STACKS = re.compile(r"^(?:transformer[._])?(encoder|decoder)\.(?=layers\.|norm\.)")


def standard_torch_names(tensors: Tensors, origin: str) -> dict[str, np.ndarray]:
    """Rename the tensors of a state dict to the names that `TABLE` uses.

    Raises:
        UserError: Two tensors would get the same name.
    """
    return renamed(tensors, lambda name: _STACKS.sub(r"transformer.\1.", _PREFIXES.sub("", name)), origin)


def params_from_torch(tensors: Tensors, config: ModelConfig, origin: str = "the state dict") -> Params:
    """Convert the state dict of a model with embeddings, a `torch.nn.Transformer` and an output layer.

    Args:
        tensors: Tensors of the state dict.
        config: Model that the state dict is for.
        origin: Where the tensors come from, for errors.

    Raises:
        UserError: Names, shapes, values or position tables do not match the configuration. The message lists all
            problems.
    """
    check_torch(config)
    tensors = standard_torch_names(tensors, origin)
    check_position_tables(tensors, TABLE, config, origin)
    return from_foreign(tensors, TABLE, config, origin)


def torch_from_params(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Convert parameters to a state dict that `torch_models.TorchTransformer` loads."""
    check_torch(config)
    return to_foreign(params, TABLE, config)


def check_torch(config: ModelConfig) -> None:
    """Raise UserError unless torch's modules can compute the model."""
    check_plain_heads(config, "torch")
    check_expressible(config, "torch", {"norm_variant": ("standard",)})


def check_position_tables(tensors: Tensors, table: Table, config: ModelConfig, origin: str) -> None:
    """Check that the position tables in a state dict equal the positions of the configuration.

    Raises:
        UserError: A position table differs.
    """
    for name, stored in tensors.items():
        if not name.endswith(table.ignored or ("\0",)) or stored.size == 0 or config.positions == "learned":
            continue
        stored = np.squeeze(stored)
        if stored.ndim != 2 or stored.shape[1] != config.d_model:
            raise UserError(
                f"{origin}: {name} has shape {list(stored.shape)}, but a position table has model.d_model="
                f"{config.d_model} columns"
            )
        ours = sinusoids(
            len(stored), config.d_model, config.positions, config.position_exponent, config.position_offset
        )
        difference = np.abs(stored - ours).max()
        if not difference <= 1e-3:  # float32 tables of 5,000 rows are off by about 1e-4 themselves
            raise UserError(
                f"{origin}: {name} is not the position table that the configuration describes (largest difference "
                f"{difference:.2g}). Check model.positions={config.positions!r}, model.position_exponent="
                f"{config.position_exponent!r} and model.position_offset={config.position_offset}"
            )


# ------------------------------------------------------------------- annotated-transformer and the teaching model

PROJECTIONS = ("query", "key", "value", "output")
SUBLAYERS = {
    "encoder": ("self_attention", "feed_forward"),
    "decoder": ("self_attention", "cross_attention", "feed_forward"),
}


def _annotated_table(
    attentions: dict[str, str],
    projections: Sequence[str],
    feed_forward: tuple[str, str],
    norms: tuple[str, str, str],
    tables: tuple[str, str, str],
) -> Table:
    """Return the table of one layout.

    Args:
        attentions: Foreign name of each kind of attention.
        projections: Foreign names of the query, key, value and output projections.
        feed_forward: Foreign names of the two feed-forward projections.
        norms: Foreign name of the list of residual connections, and of a norm's scale and shift.
        tables: Foreign names of the source embedding, the target embedding and the output projection.
    """
    source, target, output = tables
    rows: list[Row] = [
        *embeddings(f"{source}.weight", f"{target}.weight", f"{output}.weight"),
        row(f"{output}.bias", "logits_bias"),
    ]
    for stack, sublayers in SUBLAYERS.items():
        there, here = f"{stack}.layers.{{i}}", f"{stack}/layer_{{i}}"
        for number, sublayer in enumerate(sublayers):
            rows += norm(f"{there}.{norms[0]}.{number}.norm", f"{here}/{sublayer}_norm", norms[1:])
            if sublayer == "feed_forward":
                rows += linear(f"{there}.{feed_forward[0]}", f"{here}/feed_forward/inner")
                rows += linear(f"{there}.{feed_forward[1]}", f"{here}/feed_forward/outer")
                continue
            for projection, ours in zip(projections, PROJECTIONS, strict=True):
                rows += linear(f"{there}.{attentions[sublayer]}.{projection}", f"{here}/{sublayer}/{ours}")
        rows += norm(f"{stack}.norm", f"{stack}/final_norm", norms[1:])
    return Table(tuple(rows), ignored=(".pe",))


ANNOTATED = _annotated_table(
    attentions={"self_attention": "self_attn", "cross_attention": "src_attn"},
    projections=[f"linears.{number}" for number in range(4)],
    feed_forward=("feed_forward.w_1", "feed_forward.w_2"),
    norms=("sublayer", "a_2", "b_2"),
    tables=("src_embed.0.lut", "tgt_embed.0.lut", "generator.proj"),
)

OPUS_BOOKS = _annotated_table(
    attentions={"self_attention": "self_attention_block", "cross_attention": "cross_attention_block"},
    projections=["w_q", "w_k", "w_v", "w_o"],
    feed_forward=("feed_forward_block.linear_1", "feed_forward_block.linear_2"),
    norms=("residual_connections", "alpha", "bias"),
    tables=("src_embed.embedding", "tgt_embed.embedding", "projection_layer.proj"),
)

ANNOTATED_CONVENTIONS = {
    "norm_variant": "unbiased_std",
    "norm_position": "pre",
    "final_norm": True,
    "activation": "relu",
    "scale_embeddings": True,
    "positions": "interleaved",
    "position_exponent": "paper",
    "position_offset": 0,
}


def annotated_layout(tensors: Tensors) -> Table:
    """Return the table of the layout that the names of a state dict belong to."""
    return OPUS_BOOKS if any("attention_block" in name for name in tensors) else ANNOTATED


def params_from_annotated(tensors: Tensors, config: ModelConfig, origin: str = "the state dict") -> Params:
    """Convert a state dict of annotated-transformer or of the opus_books teaching model.

    Args:
        tensors: Tensors of the state dict.
        config: Model that the state dict is for.
        origin: Where the tensors come from, for errors.

    Raises:
        UserError: Names, shapes, values or position tables do not match the configuration. The message lists all
            problems.
    """
    check_annotated(config)
    table = annotated_layout(tensors)
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
    """Return the state dict of annotated-transformer, or of the layout of `table`, with the given parameters."""
    check_annotated(config)
    return to_foreign(params, table, config)


def check_annotated(config: ModelConfig) -> None:
    """Raise UserError unless annotated-transformer can compute the model."""
    check_expressible(config, "annotated", {name: (value,) for name, value in ANNOTATED_CONVENTIONS.items()})
    check_plain_heads(config, "annotated")
