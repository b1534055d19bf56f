"""State dicts of PyTorch models: `torch.nn.Transformer`, annotated-transformer, and the opus_books teaching model.

The first format has the names of `torch_models.TorchTransformer`; usual other names of the same tensors are read too.
The others normalize by (x - mean) / (std + epsilon) with the unbiased std, unlike `torch.nn.LayerNorm`, before each
sub-layer and after each stack.
"""

import re
from collections.abc import Mapping

import jax
import numpy as np

from transformer_jax.interop.mapping import NormNames, names
from transformer_jax.interop.tables import Format, Row, Tensors, embeddings, flatten, renamed, unflatten
from transformer_jax.model.attention import MultiHeadAttention
from transformer_jax.runtime.fields import require
from transformer_jax.types import Params, UserError

_ATTENTION = names({"in_proj_": "{query,key,value}", "out_proj": "output"})


def attention_from_torch(state_dict: Tensors, num_heads: int) -> Params:
    """Convert the state dict of a `torch.nn.MultiheadAttention` to parameters of a `MultiHeadAttention`.

    The state dict has NumPy arrays `in_proj_weight` [3 * d_model, d_model] and `out_proj.weight` [d_model, d_model],
    and with biases (`use_bias=True`) also `in_proj_bias` and `out_proj.bias`.

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
    problem = f"num_heads={num_heads} does not divide d_model={d_model}"
    require(d_model % num_heads == 0, f"{problem}. Pass the module's num_heads.")
    module = MultiHeadAttention(d_model, num_heads, use_bias="in_proj_bias" in state_dict)
    abstract = jax.eval_shape(module.init, jax.random.key(0), np.zeros((1, 1, d_model), np.float32))["params"]
    shapes = {path: leaf.shape for path, leaf in flatten(abstract).items()}
    rows = [row for row in _ATTENTION if row.ours[0] in shapes]
    return unflatten({path: part for row in rows for path, part in row.split(state_dict[row.foreign[0]], shapes)})


def attention_to_torch(params: Params) -> dict[str, np.ndarray]:
    """Convert parameters of a `MultiHeadAttention` to a state dict of `torch.nn.MultiheadAttention`, in NumPy arrays.

    Raises:
        UserError: d_k or d_v is not d_model / num_heads, which `torch.nn.MultiheadAttention` does not support.
    """
    d_model, num_heads, _ = params["query"]["kernel"].shape
    for name in ("query", "key", "value"):
        shape = params[name]["kernel"].shape
        fix = f"torch.nn.MultiheadAttention needs heads of width d_model / num_heads = {d_model / num_heads:g}"
        require(shape[1] * shape[2] == d_model, f"{name}/kernel has shape {list(shape)}; {fix}")
    leaves = flatten(params)
    return {row.foreign[0]: row.stack(leaves) for row in _ATTENTION if row.ours[0] in leaves}


_SHARED = ("embedding.weight", "embed.weight", "shared.weight", "tok_emb.weight")
_SOURCE = ("src_embed.weight", "src_tok_emb.embedding.weight", "src_embedding.weight", "encoder_embedding.weight")
_TARGET = ("tgt_embed.weight", "tgt_tok_emb.embedding.weight", "tgt_embedding.weight", "decoder_embedding.weight")
_OUTPUT = ("generator", "fc_out", "output_projection", "lm_head", "fc", "out")
_POSITIONS = (".pe", "pos_embedding", "positional_encoding", "pos_encoding")

# Prefixes that a training script adds to the names below, and names of the stacks outside torch.nn.Transformer.
_PREFIXES = re.compile(r"^(module\.|_orig_mod\.|model\.)+")
_STACKS = re.compile(r"^(?:transformer[._])?(encoder|decoder)\.(?=layers\.|norm\.)")


def _standard_names(tensors: Tensors, origin: str) -> Tensors:
    return renamed(tensors, lambda name: _STACKS.sub(r"transformer.\1.", _PREFIXES.sub("", name)), origin)


TORCH = Format(
    "torch",
    rows=(
        # A shared table may serve as the source's and as the target's.
        *embeddings((*_SOURCE, *_SHARED), (*_TARGET, *_SHARED), tuple(f"{name}.weight" for name in _OUTPUT)),
        Row(tuple(f"{name}.bias" for name in _OUTPUT), ("logits_bias",)),
        *names(
            {
                "{src,tgt}_positions": "{source,target}_positions",
                "{layer}.{self_attn,multihead_attn}.in_proj_": "{layer}/{self,cross}_attention/{query,key,value}",
                "{layer}.{self_attn,multihead_attn}.out_proj": "{layer}/{self,cross}_attention/output",
                "{layer}.linear{1,2}": "{layer}/feed_forward/{inner,outer}",
                "{layer}.norm1": "{layer}/self_attention_norm",
                "transformer.encoder.layers.{i}.norm2": "encoder/layer_{i}/feed_forward_norm",
                "transformer.decoder.layers.{i}.norm{2,3}": "decoder/layer_{i}/{cross_attention,feed_forward}_norm",
                "transformer.{encoder,decoder}.norm": "{encoder,decoder}/final_norm",
            },
            "transformer.{encoder,decoder}.layers.{i}",
        ),
    ),
    ignored=_POSITIONS,
    positions=_POSITIONS,
    legal=lambda model: {"norm_variant": ("standard",)},
    prepare=_standard_names,
    conventions={"norm_epsilon": 1e-5, "norm_variant": "standard"},
)
"""A model with embeddings, a `torch.nn.Transformer` and an output layer."""

_ANNOTATED_CONVENTIONS = {
    "norm_variant": "unbiased_std",
    "norm_position": "pre",
    "final_norm": True,
    "activation": "relu",
    "scale_embeddings": True,
    "positions": "interleaved",
    "position_exponent": "paper",
    "position_offset": 0,
}


def _annotated(tables: tuple[str, str, str], table: Mapping[str, str], norm: NormNames) -> Format:
    """Return one variant of the format. `tables` names its source embedding, target embedding and output layer."""
    source, target, output = (f"{name}.weight" for name in tables)
    rows = embeddings((source,), (target,), (output,))
    rows += names(table, "{encoder,decoder}.layers.{i}", norm=norm, zeros=False)

    def widened(tensors: Tensors, origin: str) -> Tensors:
        """Repeat the single scale and shift that LayerNorm has in early versions of the opus_books model."""
        width = tensors[source].shape[-1] if source in tensors else 1
        return {
            name: np.full(width, tensor[0], tensor.dtype)
            if tensor.shape == (1,) and name.endswith((".norm.alpha", ".norm.bias"))
            else tensor
            for name, tensor in tensors.items()
        }

    return Format(
        "annotated",
        (*rows, Row((f"{tables[2]}.bias",), ("logits_bias",))),
        ignored=(".pe",),
        legal=lambda model: {name: (value,) for name, value in _ANNOTATED_CONVENTIONS.items()},
        prepare=widened,
        conventions=_ANNOTATED_CONVENTIONS | {"norm_epsilon": 1e-6},
    )


ANNOTATED = _annotated(
    ("src_embed.0.lut", "tgt_embed.0.lut", "generator.proj"),
    {
        "{layer}.{self,src}_attn.linears.{0,1,2,3}": "{layer}/{self,cross}_attention/{query,key,value,output}",
        "{layer}.feed_forward.w_{1,2}": "{layer}/feed_forward/{inner,outer}",
        "{layer}.sublayer.0.norm": "{layer}/self_attention_norm",
        "encoder.layers.{i}.sublayer.1.norm": "encoder/layer_{i}/feed_forward_norm",
        "decoder.layers.{i}.sublayer.{1,2}.norm": "decoder/layer_{i}/{cross_attention,feed_forward}_norm",
        "{encoder,decoder}.norm": "{encoder,decoder}/final_norm",
    },
    (("a_2",), ("b_2",)),
)
OPUS_BOOKS = _annotated(
    ("src_embed.embedding", "tgt_embed.embedding", "projection_layer.proj"),
    {
        "{layer}.{self,cross}_attention_block.w_{q,k,v,o}": "{layer}/{self,cross}_attention/{query,key,value,output}",
        "{layer}.feed_forward_block.linear_{1,2}": "{layer}/feed_forward/{inner,outer}",
        "{layer}.residual_connections.0.norm": "{layer}/self_attention_norm",
        "encoder.layers.{i}.residual_connections.1.norm": "encoder/layer_{i}/feed_forward_norm",
        "decoder.layers.{i}.residual_connections.{1,2}.norm": "decoder/layer_{i}/{cross_attention,feed_forward}_norm",
        "{encoder,decoder}.norm": "{encoder,decoder}/final_norm",
    },
    (("alpha",), ("bias",)),
)


def state_dict_format(source: str, tensors: Tensors) -> Format:
    """Return the format of a state dict. `annotated` has two variants, which differ in their tensor names."""
    if source == "torch":
        return TORCH
    return OPUS_BOOKS if any("attention_block" in name for name in tensors) else ANNOTATED
