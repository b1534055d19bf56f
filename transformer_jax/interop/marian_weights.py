"""The weights of Hugging Face's Marian models: names, and the order of the d_model axis.

Marian's position tables have all sines before all cosines. The paper's alternate. Both tables have equal columns in
another order, so permuting every d_model axis of the weights converts a model with one into a model with the other.
"""

from typing import Any

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.interop.exchange import check_expressible, check_plain_heads
from transformer_jax.interop.tables import (
    Table,
    Tensors,
    embeddings,
    fairseq_stack,
    flatten,
    from_foreign,
    row,
    to_foreign,
    unflatten,
)
from transformer_jax.model.positional import sinusoids
from transformer_jax.types import Params, UserError

_SHARED, _LOGITS_BIAS = "model.shared.weight", "final_logits_bias"
_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_OUTPUT = "lm_head.weight"
_POSITIONS = tuple(f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder"))


TABLE = Table(
    rows=(
        # transformers writes the first of several names.
        row(_SHARED, "embedding/table"),
        *embeddings((_SOURCE, _SHARED), (_TARGET, _SHARED), _OUTPUT),
        row(_LOGITS_BIAS, "logits_bias", leading=1),
        *fairseq_stack("encoder", {"self_attn": "self_attention"}, "model."),
        *fairseq_stack("decoder", {"self_attn": "self_attention", "encoder_attn": "cross_attention"}, "model."),
    ),
)
_WRITTEN_ONCE = {"all": (_SOURCE, _TARGET, _OUTPUT), "target": (_OUTPUT,), "none": ()}


def params_from_marian(tensors: Tensors, model: ModelConfig, origin: str) -> Params:
    """Convert the tensors of a `MarianMTModel`.

    Raises:
        UserError: Names, shapes or values do not fit, all of which are listed, or a position table is not Marian's.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name not in _POSITIONS}
    if model.tie_embeddings != "all" and {_SOURCE, _TARGET} <= rest.keys():
        rest.pop(_SHARED, None)
    for name in tensors.keys() & set(_POSITIONS):
        table = tensors[name]
        expected = sinusoids(len(table), model.d_model, "halves") if table.ndim == 2 else np.zeros(())
        if table.shape != expected.shape or not np.allclose(table, expected, rtol=0, atol=1e-5):
            raise UserError(f"{origin}: {name} {list(table.shape)} is not Marian's position table")
    return from_foreign(rest, TABLE, model, origin)


def marian_tensors(params: Params, model: ModelConfig) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a `MarianMTModel` that computes the same function.

    Raises:
        UserError: Marian cannot express the model. The fields are named.
    """
    check_marian(model)
    if model.positions == "interleaved":
        params = in_halves(params, model.d_model)
    tensors = to_foreign(params, TABLE, model)
    for name in _WRITTEN_ONCE[model.tie_embeddings]:
        del tensors[name]
    tensors.setdefault(_LOGITS_BIAS, np.zeros((1, model.vocab_size)))
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def check_marian(model: ModelConfig) -> None:
    """Raise UserError unless a Marian model can compute the model."""
    legal: dict[str, tuple[Any, ...]] = {
        "norm_position": ("post",),
        "final_norm": (False,),
        "norm_epsilon": (1e-5,),
        "norm_variant": ("standard",),
        "positions": ("interleaved", "halves"),
        "position_exponent": ("paper",),
        "position_offset": (0,),
        "decoder_start": ("bos", "eos", "pad"),
        "source_bos": (False,),
    }
    check_expressible(model, "marian", legal)
    check_plain_heads(model, "marian")


def in_halves(params: Params, d_model: int) -> Params:
    """Convert the parameters of a model with interleaved positions for a model with halves that is equal to it."""
    return reorder(params, np.concatenate([np.arange(0, d_model, 2), np.arange(1, d_model, 2)]))


def reorder(params: Params, order: np.ndarray) -> Params:
    """Permute every d_model axis: new[..., i] is old[..., order[i]].

    The model computes the same function if the columns of its position table are permuted likewise.
    """
    leaves = {}
    for path, leaf in flatten(params).items():
        axis = _model_axis(path)
        leaves[path] = np.asarray(leaf) if axis is None else np.take(np.asarray(leaf), order, axis)
    return unflatten(leaves)


def _model_axis(path: str) -> int | None:
    """Return the axis of a parameter that is d_model, or None."""
    if path.endswith("/table"):
        return 1
    if path.endswith(("output/kernel", "outer/kernel")):
        return -1
    if path.endswith(("logits_bias", "query/bias", "key/bias", "value/bias", "inner/bias")):
        return None
    return 0
