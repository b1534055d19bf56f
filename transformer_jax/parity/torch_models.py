"""Torch models to compare with: `torch.nn.Transformer` with embeddings, and annotated-transformer's formulas.

Their state dicts have the names that `torch_format` reads. They have no dropout, because they are made for comparing.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from transformer_jax.config import ModelConfig, StackSize
from transformer_jax.interop.tables import check_expressible
from transformer_jax.interop.torch_format import ANNOTATED, TORCH
from transformer_jax.model.positional import sinusoids


def load_numpy(module: nn.Module, tensors: Mapping[str, np.ndarray]) -> None:
    """Load arrays into a module by their names, in the module's dtype."""
    module.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})


class TorchTransformer(nn.Module):
    """Model of a `ModelConfig` in PyTorch: embeddings, `torch.nn.Transformer` and an output layer.

    `forward(src, tgt_in)` returns logits `b t v`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        TORCH.check(config)
        self.config, d_model = config, config.d_model
        encoder, decoder = config.encoder, config.decoder
        common: dict[str, object] = {
            "dropout": 0.0,
            "activation": getattr(nn.functional, {"swish": "silu"}.get(config.activation, config.activation)),
            "layer_norm_eps": config.norm_epsilon,
            "batch_first": True,
            "norm_first": config.norm_position == "pre",
        }
        encoder_layer = nn.TransformerEncoderLayer(d_model, encoder.num_heads, encoder.d_ff, **common)
        decoder_layer = nn.TransformerDecoderLayer(d_model, decoder.num_heads, decoder.d_ff, **common)
        norms = [nn.LayerNorm(d_model, config.norm_epsilon) if config.final_norm else None for _ in range(2)]
        self.transformer = nn.Transformer(
            d_model,
            encoder.num_heads,
            custom_encoder=nn.TransformerEncoder(
                encoder_layer, encoder.num_layers, norms[0], enable_nested_tensor=False
            ),
            custom_decoder=nn.TransformerDecoder(decoder_layer, decoder.num_layers, norms[1]),
            batch_first=True,
        )
        self.src_embed = nn.Embedding(config.source_rows, d_model)
        self.tgt_embed = nn.Embedding(config.vocab_size, d_model)
        self.generator = nn.Linear(d_model, config.vocab_size, bias=config.logits_bias)
        if config.tie_embeddings == "all":
            self.src_embed.weight = self.tgt_embed.weight
        if config.tie_embeddings != "none":
            self.generator.weight = self.tgt_embed.weight
        if config.positions == "learned":
            self.src_positions = nn.Embedding(config.max_length, d_model)
            self.tgt_positions = nn.Embedding(config.max_length, d_model)

    def forward(self, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token at each target position."""
        causal = torch.ones(tgt_in.shape[1], tgt_in.shape[1], dtype=torch.bool).triu(1)
        src_padding, padding = src == self.config.pad_id, tgt_in == self.config.pad_id
        padding[:, 0] = False  # the start token may have the padding's id
        memory = self.transformer.encoder(self.embed(src, "src"), src_key_padding_mask=src_padding)
        x = self.transformer.decoder(
            self.embed(tgt_in, "tgt"),
            memory,
            tgt_mask=causal,
            tgt_key_padding_mask=padding,
            memory_key_padding_mask=src_padding,
        )
        return self.generator(x)

    def embed(self, tokens: torch.Tensor, side: str) -> torch.Tensor:
        """Return embeddings plus positions."""
        config, length, first = self.config, tokens.shape[1], self.config.position_offset
        x = getattr(self, f"{side}_embed")(tokens)
        if config.scale_embeddings:
            x = x * math.sqrt(config.d_model)
        if side == "tgt" and config.decoder_start == "zeros":
            x = torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], dim=1)
        if config.positions == "learned":
            return x + getattr(self, f"{side}_positions").weight[first : first + length]
        table = sinusoids(length, config.d_model, config.positions, config.position_exponent, first)
        return x + torch.from_numpy(table).to(x.dtype)


# ------------------------------------------------------------ annotated-transformer


class LayerNorm(nn.Module):
    """a_2 (x - mean) / (std + eps) + b_2, with the unbiased std."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize `x` over its last axis."""
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, unbiased=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class MultiHeadedAttention(nn.Module):
    """Multi-head attention, with the projections of query, key, value and output in `linears`."""

    def __init__(self, d_model: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model, bias=bias) for _ in range(4))

    def forward(self, query: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Attend from `query` to `memory` where the mask is True."""
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in zip(self.linears, (query, memory, memory), strict=False)
        )
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask[:, None], -1e9)
        return self.linears[3]((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder if it has `src_attn`. Each entry of `sublayer` owns a norm."""

    def __init__(self, config: ModelConfig, size: StackSize, cross: bool) -> None:
        super().__init__()
        d_model = config.d_model
        self.self_attn = MultiHeadedAttention(d_model, size.num_heads, config.attention_bias)
        if cross:
            self.src_attn = MultiHeadedAttention(d_model, size.num_heads, config.attention_bias)
        inner, outer = nn.Linear(d_model, size.d_ff), nn.Linear(size.d_ff, d_model)
        self.feed_forward = nn.Sequential(OrderedDict(w_1=inner, relu=nn.ReLU(), w_2=outer))
        norms = (LayerNorm(d_model, config.norm_epsilon) for _ in range(3 if cross else 2))
        self.sublayer = nn.ModuleList(nn.ModuleDict({"norm": norm}) for norm in norms)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *memory: torch.Tensor) -> torch.Tensor:
        """Apply x + Sublayer(LayerNorm(x)) for each sub-layer. A decoder needs the memory and its mask."""
        norms = [connection["norm"] for connection in self.sublayer]
        y = norms[0](x)
        x = x + self.self_attn(y, y, mask)
        if memory:
            x = x + self.src_attn(norms[1](x), *memory)
        return x + self.feed_forward(norms[-1](x))


class Stack(nn.Module):
    """Layers and a final norm."""

    def __init__(self, config: ModelConfig, size: StackSize, cross: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, size, cross) for _ in range(size.num_layers))
        self.norm = LayerNorm(config.d_model, config.norm_epsilon)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return the normalized output of the last layer."""
        for layer in self.layers:
            x = layer(x, *others)
        return self.norm(x)


class Embeddings(nn.Module):
    """Vectors of a table times sqrt(d_model), plus alternating sines and cosines of the position."""

    def __init__(self, rows: int, d_model: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(rows, d_model)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the vectors of the tokens."""
        d_model = self.lut.embedding_dim
        wave = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * -(math.log(10000.0) / d_model))
        angles = torch.arange(tokens.shape[1], dtype=torch.float64)[:, None] * wave
        positions = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)
        return self.lut(tokens) * math.sqrt(d_model) + positions.to(self.lut.weight.dtype)


class AnnotatedTransformer(nn.Module):
    """annotated-transformer's model, as a `ModelConfig` describes it.

    Its LayerNorm divides by std + epsilon with the unbiased std, before each sub-layer and after each stack.
    `forward(src, tgt_in)` returns logits `b t v`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        ANNOTATED.check(config)
        check_expressible(config, "annotated", {"decoder_start": ("bos", "eos", "pad")})
        self.config = config
        self.encoder = Stack(config, config.encoder, cross=False)
        self.decoder = Stack(config, config.decoder, cross=True)
        self.src_embed, self.tgt_embed = (
            nn.Sequential(Embeddings(rows, config.d_model)) for rows in (config.source_rows, config.vocab_size)
        )
        projection = nn.Linear(config.d_model, config.vocab_size, bias=config.logits_bias)
        self.generator = nn.ModuleDict({"proj": projection})
        if config.tie_embeddings == "all":
            self.src_embed[0].lut.weight = self.tgt_embed[0].lut.weight
        if config.tie_embeddings != "none":
            projection.weight = self.tgt_embed[0].lut.weight

    def forward(self, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
        """Return logits of the next token at each target position."""
        src_mask = (src != self.config.pad_id)[:, None]
        memory = self.encoder(self.src_embed(src), src_mask)
        length = tgt_in.shape[1]
        seen = tgt_in != self.config.pad_id
        seen[:, 0] = True  # the start token may have the padding's id
        tgt_mask = seen[:, None] & torch.ones(length, length, dtype=torch.bool).tril()
        return self.generator["proj"](self.decoder(self.tgt_embed(tgt_in), tgt_mask, memory, src_mask))
