"""The implementations to compare with: for each a torch module, its weights and the names of its sub-layers."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from transformer_jax.config import ModelConfig
from transformer_jax.interop import fairseq_format, marian_weights, torch_format
from transformer_jax.interop.exchange import check_expressible
from transformer_jax.interop.tables import Table, from_foreign, to_foreign
from transformer_jax.parity.oracles import Arrays, Hook, TorchOracle
from transformer_jax.parity.torch_models import AnnotatedTransformer, TorchTransformer
from transformer_jax.types import Params, UserError

SMALL: dict[str, Any] = {
    "vocab_size": 43,
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_num_heads": 2,
    "d_ff": 56,
    "decoder_d_ff": 40,
    "attention_bias": True,
}


@dataclass(frozen=True)
class Peer:
    """How to compare with an implementation.

    Args:
        default: A small model with its conventions.
        check: Raises UserError unless it can compute a model.
        table: Its names of parameters.
        module: Makes its module, without the weights.
        hooks: Hooks for `TorchOracle`.
        oracle: Further arguments of `TorchOracle`.
        prefix: Prefix of its names before those of the table.
    """

    default: ModelConfig
    check: Callable[[ModelConfig], None]
    table: Table
    module: Callable[[ModelConfig], nn.Module]
    hooks: dict[str, Hook]
    oracle: dict[str, Any]
    prefix: str = ""


def make_oracle(against: str, config: ModelConfig, params: Params, folder: Path | None = None) -> TorchOracle:
    """Return an implementation's model with the given parameters.

    Args:
        against: Key of `PEERS`.
        config: Configuration of the model.
        params: Parameters of the model.
        folder: For marian, folder from which `from_pretrained` reads the weights in place of `params`.

    Raises:
        UserError: The implementation cannot compute the model, or its package is not installed.
    """
    peer = PEERS[against]
    peer.check(config)
    tensors = to_foreign(params, peer.table, config)
    # Tensors that the format always has and the model lacks are zero, and must stay zero in training.
    ones = jax.tree.map(lambda leaf: np.ones(np.shape(leaf), np.float32), params)
    fillers = {peer.prefix + name for name, tensor in to_foreign(ones, peer.table, config).items() if not tensor.any()}

    def build(dtype: str) -> nn.Module:
        if folder is None:
            module = peer.module(config).to(getattr(torch, dtype))
            _load(module, {peer.prefix + name: tensor for name, tensor in tensors.items()})
        else:
            with _quiet():
                module = _prepared(_transformers().MarianMTModel.from_pretrained(folder), config)
            module = module.to(getattr(torch, dtype))
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in fillers or name.endswith(peer.oracle.get("skipped", "\0")):
                parameter.requires_grad_(False)
        if dtype == "float64":
            _widen_positions(module)
        return module

    def to_params(tensors: Arrays, config: ModelConfig) -> Params:
        known = {name.removeprefix(peer.prefix): tensor for name, tensor in tensors.items()}
        return from_foreign(known, peer.table, config, f"{against}'s module")

    return TorchOracle(against, config, build, peer.hooks, to_params, **peer.oracle)


def _load(module: nn.Module, tensors: Arrays) -> None:
    """Copy arrays into a module's parameters and buffers by name, and leave the others unchanged."""
    state = {name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()}
    missing, unexpected = module.load_state_dict(state, strict=False)
    named = dict(module.named_parameters(remove_duplicate=False))
    loaded = {id(named[name]) for name in state if name in named}
    lost = [n for n in missing if not n.endswith("embed_positions.weight") and id(named.get(n)) not in loaded]
    if lost or unexpected:
        raise RuntimeError(f"no weights for {lost}, no place for {unexpected}")


def _widen_positions(module: nn.Module) -> None:
    """Replace position tables that transformers computes in float32 by tables in float64."""
    for name, place in module.named_modules():
        if not name.endswith("embed_positions"):
            continue
        old: torch.Tensor = place.weight.detach()
        rows, width = old.shape
        # fairseq's exponent is i / (d / 2 - 1), Marian's 2i / d.
        is_fairseq = hasattr(place, "make_positions")
        steps = torch.arange(width // 2, dtype=torch.float64) / (width // 2 - 1 if is_fairseq else width / 2)
        angles = torch.arange(rows, dtype=torch.float64)[:, None] * torch.exp(-math.log(10000.0) * steps)
        new = torch.cat([angles.sin(), angles.cos()], dim=1)
        if is_fairseq:
            new[place.padding_idx] = 0
        if (new - old).abs().max() > 1e-3:
            raise RuntimeError(f"{name} of transformers is not the table that it is known to have")
        place.weight.data = new


def _prepared(module: Any, config: ModelConfig) -> nn.Module:
    """Make all parameters of a transformers model trainable, and reset its generation settings."""
    module.generation_config = _transformers().GenerationConfig()
    if config.logits_bias:  # a buffer has no gradient
        module.final_logits_bias = nn.Parameter(module.final_logits_bias.detach())
    # transformers omits the gradient of the padding's row, and the decoder may start from padding.
    for name, place in module.named_modules():
        if name.endswith(("embed_tokens", "shared")):
            place.padding_idx = None
    return module


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UserError("transformers is needed to compare with fairseq or marian: pip install transformers") from error
    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and hints of transformers."""
    logging = _transformers().logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _common(config: ModelConfig) -> dict[str, Any]:
    """Return the settings that all configurations of transformers share."""
    encoder, decoder = config.encoder, config.decoder
    return {
        "d_model": config.d_model,
        "encoder_layers": encoder.num_layers,
        "decoder_layers": decoder.num_layers,
        "encoder_attention_heads": encoder.num_heads,
        "decoder_attention_heads": decoder.num_heads,
        "encoder_ffn_dim": encoder.d_ff,
        "decoder_ffn_dim": decoder.d_ff,
        "activation_function": {"swish": "silu"}.get(config.activation, config.activation),
        "scale_embedding": config.scale_embeddings,
        "pad_token_id": config.pad_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.start_id,
        "forced_eos_token_id": None,
        "tie_word_embeddings": config.tie_embeddings == "all",
        "max_position_embeddings": 512,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    }


def _fsmt(config: ModelConfig) -> nn.Module:
    transformers = _transformers()
    settings = transformers.FSMTConfig(
        **_common(config), src_vocab_size=config.source_rows, tgt_vocab_size=config.vocab_size, num_beams=1
    )
    module = transformers.FSMTForConditionalGeneration(settings)
    decoder = module.model.decoder
    if config.tie_embeddings != "none":
        decoder.output_projection.weight = decoder.embed_tokens.weight
    if config.tie_embeddings == "all":
        module.model.encoder.embed_tokens.weight = decoder.embed_tokens.weight
    return _prepared(module, config)


def _marian(config: ModelConfig) -> nn.Module:
    transformers = _transformers()
    shared = config.tie_embeddings == "all"
    settings = transformers.MarianConfig(
        **_common(config) | {"tie_word_embeddings": config.tie_embeddings != "none"},
        vocab_size=config.source_rows,
        decoder_vocab_size=config.vocab_size,
        share_encoder_decoder_embeddings=shared,
        num_beams=1,
    )
    return _prepared(transformers.MarianMTModel(settings), config)


def _fsmt_logits(module: Any, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
    # Call the two stacks separately, because the code around them cannot make a causal mask in float64.
    seen = (src != module.config.pad_token_id).long()
    memory = module.model.encoder(input_ids=src, attention_mask=seen).last_hidden_state
    padding = tgt_in == module.config.pad_token_id
    length = tgt_in.shape[1]
    causal = torch.full((length, length), -torch.inf, dtype=memory.dtype).triu(1)
    return module.model.decoder(tgt_in, memory, seen, padding, causal, use_cache=False).last_hidden_state


def _marian_logits(module: Any, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
    pad_id = module.config.pad_token_id
    seen = tgt_in != pad_id
    seen[:, 0] = True  # the start token may have the padding's id
    return module(
        input_ids=src,
        attention_mask=(src != pad_id).long(),
        decoder_input_ids=tgt_in,
        decoder_attention_mask=seen.long(),
        use_cache=False,
    ).logits


def _torch_logits(module: Any, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
    return module(src, tgt_in)


def _check_fsmt(config: ModelConfig) -> None:
    fairseq_format.check_fairseq(config)
    check_expressible(config, "FSMT of transformers", {"norm_position": ("post",), "positions": ("halves",)})


def _check_marian(config: ModelConfig) -> None:
    marian_weights.check_marian(config)
    check_expressible(config, "MarianMTModel", {"positions": ("halves",)})


def _hooks(encoder: str, decoder: str, names: dict[str, str]) -> dict[str, Hook]:
    """Return the hooks of both stacks, given the module name of each sub-layer."""
    hooks = {}
    for ours, foreign in (("encoder", encoder), ("decoder", decoder)):
        hooks[f"{ours}/embedding"] = Hook(f"{foreign}.layers.0", is_input=True)
        for name, place in names.items():
            only, _, name = name.rpartition(".")
            if name == "final_norm":
                hooks[f"{ours}/final_norm"] = Hook(f"{foreign}.{place}")
            elif only in ("", ours) and not (name.startswith("cross") and ours == "encoder"):
                hooks[f"{ours}/layer_{{i}}/{name}"] = Hook(f"{foreign}.layers.{{i}}.{place}")
    return hooks


_HUGGING_FACE = {
    "self_attention": "self_attn",
    "self_attention_norm": "self_attn_layer_norm",
    "cross_attention": "encoder_attn",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "feed_forward": "fc2",
    "feed_forward_norm": "final_layer_norm",
}
_TORCH = {
    "self_attention": "self_attn",
    "self_attention_norm": "norm1",
    "cross_attention": "multihead_attn",
    "cross_attention_norm": "norm2",
    "feed_forward": "linear2",
    "encoder.feed_forward_norm": "norm2",
    "decoder.feed_forward_norm": "norm3",
    "final_norm": "norm",
}
_ANNOTATED = {
    "self_attention": "self_attn",
    "self_attention_norm": "sublayer.0.norm",
    "cross_attention": "src_attn",
    "cross_attention_norm": "sublayer.1.norm",
    "feed_forward": "feed_forward",
    "encoder.feed_forward_norm": "sublayer.1.norm",
    "decoder.feed_forward_norm": "sublayer.2.norm",
    "final_norm": "norm",
}

PEERS = {
    "torch": Peer(
        default=ModelConfig(**SMALL, norm_epsilon=1e-5),
        check=torch_format.check_torch,
        table=torch_format.TABLE,
        module=TorchTransformer,
        hooks=_hooks("transformer.encoder", "transformer.decoder", _TORCH),
        oracle={"logits": _torch_logits},
    ),
    "annotated": Peer(
        default=ModelConfig(
            **SMALL,
            norm_position="pre",
            final_norm=True,
            norm_variant="unbiased_std",
            tie_embeddings="none",
            logits_bias=True,
        ),
        check=torch_format.check_annotated,
        table=torch_format.ANNOTATED,
        module=AnnotatedTransformer,
        hooks=_hooks("encoder", "decoder", _ANNOTATED),
        oracle={"logits": _torch_logits},
    ),
    "fairseq": Peer(
        default=ModelConfig(
            **SMALL,
            norm_epsilon=1e-5,
            positions="halves",
            position_exponent="tensor2tensor",
            position_offset=fairseq_format.PAD_ID + 1,
            decoder_start="eos",
            bos_id=fairseq_format.BOS_ID,
            pad_id=fairseq_format.PAD_ID,
            eos_id=fairseq_format.EOS_ID,
            unk_id=fairseq_format.UNK_ID,
        ),
        check=_check_fsmt,
        table=fairseq_format.TABLE,
        module=_fsmt,
        hooks=_hooks("model.encoder", "model.decoder", _HUGGING_FACE),
        oracle={
            "logits": _fsmt_logits,
            "skipped": ("embed_positions.weight",),
            "time_first": True,
            "generates": True,
        },
        prefix="model.",
    ),
    "marian": Peer(
        default=ModelConfig(
            **SMALL,
            norm_epsilon=1e-5,
            activation="swish",
            positions="halves",
            decoder_start="pad",
            logits_bias=True,
        ),
        check=_check_marian,
        table=marian_weights.TABLE,
        module=_marian,
        hooks=_hooks("model.encoder", "model.decoder", _HUGGING_FACE),
        oracle={"logits": _marian_logits, "skipped": ("embed_positions.weight",), "generates": True},
    ),
}
