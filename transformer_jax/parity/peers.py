"""The implementations to compare with: for each a torch module, its weights and the names of its sub-layers."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from transformer_jax.config import ModelConfig
from transformer_jax.interop import fairseq_format, marian_format, torch_format
from transformer_jax.parity.oracles import Oracle, Peer
from transformer_jax.parity.torch_models import AnnotatedTransformer, TorchTransformer
from transformer_jax.presets import preset
from transformer_jax.types import Params


def make_oracle(against: str, config: ModelConfig, params: Params, folder: Path | None = None) -> Oracle:
    """Return an implementation's model with the given parameters, or for marian with the weights in `folder`."""
    PEERS[against].check(config)
    return Oracle(PEERS[against], config, params, folder)


_UNLIKE_A_RUN = {"max_position_embeddings": 512, "num_beams": 1}
"""Settings of models of transformers that a comparison needs, whatever the configuration has."""


def _prepared(module: nn.Module, config: ModelConfig) -> nn.Module:
    """Make all parameters of a transformers model trainable, and reset its generation settings."""
    import transformers

    module.generation_config = transformers.GenerationConfig()
    if config.logits_bias:  # a buffer has no gradient
        module.final_logits_bias = nn.Parameter(module.final_logits_bias.detach())
    # transformers omits the gradient of the padding's row, and the decoder may start from padding.
    for name, place in module.named_modules():
        if name.endswith(("embed_tokens", "shared")):
            place.padding_idx = None
    return module


def _fairseq(config: ModelConfig, _: Path | None) -> nn.Module:
    import transformers

    settings = transformers.FSMTConfig(
        **marian_format.shared_settings(config) | _UNLIKE_A_RUN,
        src_vocab_size=config.source_rows,
        tgt_vocab_size=config.vocab_size,
        tie_word_embeddings=config.tie_embeddings == "all",
    )
    module = transformers.FSMTForConditionalGeneration(settings)
    decoder = module.model.decoder
    if config.tie_embeddings != "none":
        decoder.output_projection.weight = decoder.embed_tokens.weight
    if config.tie_embeddings == "all":
        module.model.encoder.embed_tokens.weight = decoder.embed_tokens.weight
    return _prepared(module, config)


def _fairseq_logits(module: nn.Module, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
    # Call the two stacks separately, because the code around them cannot make a causal mask in float64.
    seen = (src != module.config.pad_token_id).long()
    memory = module.model.encoder(input_ids=src, attention_mask=seen).last_hidden_state
    padding = tgt_in == module.config.pad_token_id
    length = tgt_in.shape[1]
    causal = torch.full((length, length), -torch.inf, dtype=memory.dtype).triu(1)
    return module.model.decoder(tgt_in, memory, seen, padding, causal, use_cache=False).last_hidden_state


def _marian(config: ModelConfig, folder: Path | None) -> nn.Module:
    import transformers

    if folder is not None:
        with _quiet(transformers.logging):
            return _prepared(transformers.MarianMTModel.from_pretrained(folder), config)
    settings = transformers.MarianConfig(**marian_format.marian_settings(config) | _UNLIKE_A_RUN)
    return _prepared(transformers.MarianMTModel(settings), config)


@contextlib.contextmanager
def _quiet(logging: ModuleType) -> Iterator[None]:
    """Silence the progress bars and hints of transformers, given its module of that name."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _marian_logits(module: nn.Module, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
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


def _small(name: str = "paper_base", /, **fields: object) -> ModelConfig:
    """Return a small model with the conventions of a preset, whose encoder and decoder differ in size."""
    sizes = {"d_model": 32, "num_layers": 2, "num_heads": 4, "decoder_num_heads": 2, "d_ff": 56, "decoder_d_ff": 40}
    return preset(name, 43, attention_bias=True, **sizes, **fields).model


_HUGGING_FACE = {
    "encoder": "self_attn self_attn_layer_norm fc2 final_layer_norm",
    "decoder": "self_attn self_attn_layer_norm encoder_attn encoder_attn_layer_norm fc2 final_layer_norm",
}
_PEERS = (
    Peer(
        name="torch",
        default=_small(norm_epsilon=1e-5),
        table=torch_format.TORCH,
        build=lambda config, _: TorchTransformer(config),
        stacks="transformer.",
        sublayers={
            "encoder": "self_attn norm1 linear2 norm2",
            "decoder": "self_attn norm1 multihead_attn norm2 linear2 norm3",
        },
    ),
    Peer(
        name="annotated",
        default=_small(logits_bias=True, tie_embeddings="none", **torch_format.ANNOTATED.conventions),
        table=torch_format.ANNOTATED,
        build=lambda config, _: AnnotatedTransformer(config),
        stacks="",
        sublayers={
            "encoder": "self_attn sublayer.0.norm feed_forward sublayer.1.norm",
            "decoder": "self_attn sublayer.0.norm src_attn sublayer.1.norm feed_forward sublayer.2.norm",
        },
    ),
    Peer(
        name="fairseq",
        default=_small("fairseq"),
        table=fairseq_format.FAIRSEQ,
        narrower=("FSMT of transformers", {"norm_position": ("post",), "positions": ("halves",)}),
        build=_fairseq,
        logits=_fairseq_logits,
        stacks="model.",
        sublayers=_HUGGING_FACE,
        prefix="model.",
        time_first=True,
        generates=True,
    ),
    Peer(
        name="marian",
        default=_small(
            norm_epsilon=1e-5, activation="swish", positions="halves", decoder_start="pad", logits_bias=True
        ),
        table=marian_format.MARIAN,
        narrower=("MarianMTModel", {"positions": ("halves",)}),
        build=_marian,
        logits=_marian_logits,
        stacks="model.",
        sublayers=_HUGGING_FACE,
        generates=True,
    ),
)
PEERS = {peer.name: peer for peer in _PEERS}
