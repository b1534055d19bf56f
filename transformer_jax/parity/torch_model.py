"""A model of torch's own modules: what the state dicts of `torch_format` load into, and an oracle to compare with."""

import math
from typing import Any

import numpy as np
import torch
from torch import nn

from transformer_jax.config import ModelConfig
from transformer_jax.interop.torch_format import check_torch
from transformer_jax.model.positional import sinusoids

ACTIVATIONS: dict[str, Any] = {"relu": nn.functional.relu, "gelu": nn.functional.gelu, "swish": nn.functional.silu}


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` between embeddings and an output layer, as a `ModelConfig` says.

    `forward(src, tgt_in)` gives logits `b t v`. Dropout is 0: this model is for comparing.

    Raises:
        UserError: torch's modules cannot say what the configuration does.
    """

    def __init__(self, config: ModelConfig, max_length: int = 1024) -> None:
        super().__init__()
        check_torch(config)
        self.config, d_model = config, config.d_model
        common: dict[str, Any] = {
            "dropout": 0.0,
            "activation": ACTIVATIONS[config.activation],
            "layer_norm_eps": config.norm_epsilon,
            "batch_first": True,
            "norm_first": config.norm_position == "pre",
        }
        encoder, decoder = config.encoder, config.decoder
        final = [nn.LayerNorm(d_model, config.norm_epsilon) if config.final_norm else None for _ in range(2)]
        self.transformer = nn.Transformer(
            d_model,
            encoder.num_heads,
            custom_encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(d_model, encoder.num_heads, encoder.d_ff, **common),
                encoder.num_layers,
                final[0],
                enable_nested_tensor=False,
            ),
            custom_decoder=nn.TransformerDecoder(
                nn.TransformerDecoderLayer(d_model, decoder.num_heads, decoder.d_ff, **common),
                decoder.num_layers,
                final[1],
            ),
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
        else:
            table = sinusoids(max_length, d_model, config.positions, config.position_exponent, config.position_offset)
            self.register_buffer("pe", torch.from_numpy(table), persistent=False)

    def forward(self, src: torch.Tensor, tgt_in: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each target position."""
        return self.decode(tgt_in, self.encode(src), src)

    def encode(self, src: torch.Tensor) -> torch.Tensor:
        """The encoder's output."""
        x = self.embed(src, "src")
        return self.transformer.encoder(x, src_key_padding_mask=src == self.config.pad_id)

    def decode(self, tgt_in: torch.Tensor, memory: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        """Logits at every position of `tgt_in`."""
        causal = torch.ones(tgt_in.shape[1], tgt_in.shape[1], dtype=torch.bool).triu(1)
        padding = tgt_in == self.config.pad_id
        padding[:, 0] = False  # the start token may have the padding's id
        x = self.transformer.decoder(
            self.embed(tgt_in, "tgt"),
            memory,
            tgt_mask=causal,
            tgt_key_padding_mask=padding,
            memory_key_padding_mask=src == self.config.pad_id,
        )
        return self.generator(x)

    def embed(self, tokens: torch.Tensor, side: str) -> torch.Tensor:
        """Embeddings and positions."""
        config = self.config
        x = getattr(self, f"{side}_embed")(tokens)
        if config.scale_embeddings:
            x = x * math.sqrt(config.d_model)
        if side == "tgt" and config.decoder_start == "zeros":
            x = torch.cat([torch.zeros_like(x[:, :1]), x[:, 1:]], dim=1)
        if config.positions == "learned":
            rows = getattr(self, f"{side}_positions").weight
            return x + rows[config.position_offset : config.position_offset + tokens.shape[1]]
        return x + self.pe[: tokens.shape[1]].to(x.dtype)


def load_numpy(module: nn.Module, tensors: dict[str, np.ndarray]) -> None:
    """Puts arrays into a module, under their names, in the module's dtype.

    Raises:
        RuntimeError: names or shapes differ (torch's own message).
    """
    module.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
