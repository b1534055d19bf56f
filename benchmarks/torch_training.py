"""The training step's side of PyTorch: `torch.nn.Transformer` as its users write it, doing the same work.

Post-norm, tied embeddings, sinusoids, no biases on the attention's projections, label smoothing, Adam (fused) with the
paper's schedule. Dropout is where the paper has it, or everywhere, as `torch.nn.Transformer` has it by itself.
Self-attention of the decoder takes the causal kernel of scaled_dot_product_attention where there is one; padding is at
the end, so it needs no mask of its own there.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from benchmarks.child import peak_memory
from benchmarks.sizes import SIZES, Size, random_batch

Answer = dict[str, Any]
DROPOUT, SMOOTHING, PAD_ID, WARMUP = 0.1, 0.1, 0, 4000


class Model(nn.Module):
    """Computes the loss from token ids."""

    def __init__(self, size: Size, length: int, dropout: str) -> None:
        super().__init__()
        d_model, heads = size.d_model, size.num_heads
        common: dict[str, Any] = {"dropout": DROPOUT, "batch_first": True, "norm_first": False}

        def attention() -> nn.MultiheadAttention:
            rate = DROPOUT if dropout == "everywhere" else 0.0
            return nn.MultiheadAttention(d_model, heads, dropout=rate, bias=False, batch_first=True)

        encoder_layer = nn.TransformerEncoderLayer(d_model, heads, size.d_ff, **common)
        decoder_layer = nn.TransformerDecoderLayer(d_model, heads, size.d_ff, **common)
        for layer in (encoder_layer, decoder_layer):
            layer.self_attn = attention()
            if dropout == "paper":
                layer.dropout = nn.Identity()  # after the activation
        decoder_layer.multihead_attn = attention()
        self.transformer = nn.Transformer(
            d_model,
            heads,
            custom_encoder=nn.TransformerEncoder(encoder_layer, size.num_layers, enable_nested_tensor=False),
            custom_decoder=nn.TransformerDecoder(decoder_layer, size.num_layers),
            batch_first=True,
        )  # draws its matrices anew, Xavier uniform
        self.embedding = nn.Embedding(size.vocab_size, d_model)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.dropout = nn.Dropout(DROPOUT)
        self.register_buffer("positions", sinusoids(length, d_model))
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, src: torch.Tensor, tgt_in: torch.Tensor, tgt_out: torch.Tensor) -> torch.Tensor:
        """The label-smoothed cross-entropy, the mean over the target tokens that are no padding."""
        padding = src == PAD_ID
        memory = self.transformer.encoder(self.embed(src), src_key_padding_mask=padding)
        x = self.transformer.decoder(
            self.embed(tgt_in), memory, tgt_mask=self.causal, tgt_is_causal=True, memory_key_padding_mask=padding
        )
        logits = nn.functional.linear(x, self.embedding.weight)
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), tgt_out.flatten(), ignore_index=PAD_ID, label_smoothing=SMOOTHING
        )

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sums of embeddings and positions."""
        return self.dropout(self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim) + self.positions)


def sinusoids(length: int, d_model: int) -> torch.Tensor:
    """The paper's positions, `length d_model`."""
    angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(0, d_model, 2) / d_model)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def peer(spec: Mapping[str, Any]) -> tuple[Answer, Callable[[Answer], Answer]]:
    """A step of the model above.

    Args:
        spec: `size`, `rows`, `length` and `dropout` as for ours; `device`; `compile`: through torch.compile;
            `autocast`: in bfloat16.
    """
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(spec.get("matmul_precision", "highest"))
    size = SIZES[spec["size"]]
    rows, length = spec.get("rows") or size.rows, spec.get("length") or size.length
    device = "cuda" if spec.get("device") == "gpu" else "cpu"
    model = Model(size, length, spec.get("dropout", "paper")).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: size.d_model**-0.5 * min((n + 1) ** -0.5, (n + 1) * WARMUP**-1.5)
    )
    batch = [torch.from_numpy(side).long().to(device) for side in random_batch(size.vocab_size, rows, length)]
    forward = torch.compile(model) if spec.get("compile") else model

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        context = torch.autocast(device, torch.bfloat16) if spec.get("autocast") else contextlib.nullcontext()
        with context:
            loss = forward(*batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        return loss

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    started = time.perf_counter()
    first_loss = step().item()
    first_seconds = time.perf_counter() - started

    def turn(command: Answer) -> Answer:
        if command.get("measure") == "memory":
            return {"peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory()}
        start = time.perf_counter()
        for _ in range(command["units"]):
            step()
        wait()
        return {"seconds": (time.perf_counter() - start) / command["units"]}

    parameters = sum(parameter.numel() for parameter in model.parameters())
    info = {"first_loss": first_loss, "parameters": parameters, "compile_seconds": round(first_seconds, 2)}
    return info | {"torch_threads": torch.get_num_threads()}, turn
