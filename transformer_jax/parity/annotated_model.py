"""The model of annotated-transformer's published formulas in torch: an oracle to compare with.

Pre-norm with a LayerNorm after each stack, and that LayerNorm is scale (x - mean) / (std + epsilon) + shift with the
unbiased std. Names of modules are those of its state dicts, which `torch_format` reads.
"""

import math

import torch
from torch import nn

from transformer_jax.config import ModelConfig, StackSize
from transformer_jax.interop.exchange import check_expressible
from transformer_jax.interop.torch_format import check_annotated


class LayerNorm(nn.Module):
    """a_2 (x - mean) / (std + eps) + b_2, the std with n - 1."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.zeros(d_model)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes the last axis."""
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, unbiased=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class MultiHeadedAttention(nn.Module):
    """`linears`: query, key, value, output."""

    def __init__(self, d_model: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model, bias=bias) for _ in range(4))

    def forward(self, query: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Queries from `query`, keys and values from `memory`; the mask is True where attention is allowed."""
        inputs = (query, memory, memory)
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear, x in zip(self.linears, inputs, strict=False)
        )
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~mask[:, None], -1e9)
        return self.linears[3]((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """w_2 relu(w_1 x)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same function at each position."""
        return self.w_2(self.w_1(x).relu())


class SublayerConnection(nn.Module):
    """What stands around a sub-layer; it owns the sub-layer's norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.d_model, config.norm_epsilon)


class Layer(nn.Module):
    """A layer of the encoder, or of the decoder where it has `src_attn`."""

    def __init__(self, config: ModelConfig, size: StackSize, cross: bool) -> None:
        super().__init__()
        self.self_attn = MultiHeadedAttention(config.d_model, size.num_heads, config.attention_bias)
        if cross:
            self.src_attn = MultiHeadedAttention(config.d_model, size.num_heads, config.attention_bias)
        self.feed_forward = FeedForward(config.d_model, size.d_ff)
        self.sublayer = nn.ModuleList(SublayerConnection(config) for _ in range(3 if cross else 2))

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor,
        memory: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x + Sublayer(LayerNorm(x)), two or three times."""
        norms = [connection.norm for connection in self.sublayer]
        y = norms[0](x)
        x = x + self.self_attn(y, y, mask)
        if memory is not None:
            x = x + self.src_attn(norms[1](x), memory, memory_mask)
        return x + self.feed_forward(norms[-1](x))


class Stack(nn.Module):
    """Layers and a last norm."""

    def __init__(self, config: ModelConfig, size: StackSize, cross: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, size, cross) for _ in range(size.num_layers))
        self.norm = LayerNorm(config.d_model, config.norm_epsilon)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """From embeddings to the normalized output."""
        for layer in self.layers:
            x = layer(x, *others)
        return self.norm(x)


class Embeddings(nn.Module):
    """Vectors times sqrt(d_model)."""

    def __init__(self, rows: int, d_model: int) -> None:
        super().__init__()
        self.lut, self.d_model = nn.Embedding(rows, d_model), d_model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The vectors of the tokens."""
        return self.lut(tokens) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    """Sine and cosine in turn, added to the embeddings."""

    def __init__(self, d_model: int, max_length: int = 1024) -> None:
        super().__init__()
        position = torch.arange(max_length, dtype=torch.float64)[:, None]
        wave = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * -(math.log(10000.0) / d_model))
        pe = torch.zeros(max_length, d_model, dtype=torch.float64)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * wave), torch.cos(position * wave)
        self.register_buffer("pe", pe, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x plus its positions."""
        return x + self.pe[: x.shape[1]].to(x.dtype)


class Generator(nn.Module):
    """The output layer; its softmax is left to the loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.d_model, config.vocab_size, bias=config.logits_bias)


class AnnotatedTransformer(nn.Module):
    """annotated-transformer's model, as a `ModelConfig` says. `forward(src, tgt_in)` gives logits; no dropout.

    Raises:
        UserError: it cannot say what the configuration does.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_annotated(config)
        check_expressible(config, "annotated", {"decoder_start": ("bos", "eos", "pad")})
        self.config = config
        self.encoder = Stack(config, config.encoder, cross=False)
        self.decoder = Stack(config, config.decoder, cross=True)
        self.src_embed, self.tgt_embed = (
            nn.Sequential(Embeddings(rows, config.d_model), PositionalEncoding(config.d_model))
            for rows in (config.source_rows, config.vocab_size)
        )
        self.generator = Generator(config)
        if config.tie_embeddings == "all":
            self.src_embed[0].lut.weight = self.tgt_embed[0].lut.weight
        if config.tie_embeddings != "none":
            self.generator.proj.weight = self.tgt_embed[0].lut.weight

    def forward(self, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each target position."""
        src_mask = (src != self.config.pad_id)[:, None]
        memory = self.encoder(self.src_embed(src), src_mask)
        length = tgt_in.shape[1]
        seen = tgt_in != self.config.pad_id
        seen[:, 0] = True  # the start token may have the padding's id
        tgt_mask = seen[:, None] & torch.ones(length, length, dtype=torch.bool).tril()
        return self.generator.proj(self.decoder(self.tgt_embed(tgt_in), tgt_mask, memory, src_mask))
