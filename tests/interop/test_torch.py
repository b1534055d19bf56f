"""Import and export of torch.nn.Transformer and of stacks of its layers: equal logits in both directions."""

import math

import numpy as np
import pytest
from interop_cases import REAL, SRC, TGT_IN, assert_same_trees, logits, odd, random_params

from transformer_jax.config import ModelConfig
from transformer_jax.interop.tables import from_foreign, to_foreign
from transformer_jax.interop.torch_format import TORCH
from transformer_jax.types import UserError


@pytest.fixture(scope="module")
def torch(optional_package):
    return optional_package("torch")


CASES = {
    "post-norm, tied three ways": odd(),
    "pre-norm, learned positions": odd(
        tie_embeddings="target", source_vocab_size=17, norm_position="pre", final_norm=True, attention_bias=True,
        logits_bias=True, positions="learned", position_offset=2, activation="gelu",
    ),
    "untied, from zeros": odd(
        tie_embeddings="none", decoder_start="zeros", final_norm=True, scale_embeddings=False, positions="halves",
        position_exponent="tensor2tensor", activation="swish", attention_bias=True, source_vocab_size=31,
    ),
}  # fmt: skip


@pytest.mark.parametrize("config", CASES.values(), ids=CASES.keys())
def test_logits_equal_torch_and_weights_round_trip(torch, config):
    from transformer_jax.parity.torch_models import TorchTransformer, load_numpy

    params = random_params(config)
    tensors = to_foreign(params, TORCH, config)
    model = TorchTransformer(config)
    load_numpy(model, tensors)
    with torch.no_grad():
        theirs = model(torch.from_numpy(SRC).long(), torch.from_numpy(TGT_IN).long()).numpy()[REAL]
    np.testing.assert_allclose(logits(config, params), theirs, atol=1e-5, rtol=1e-5)
    assert_same_trees(from_foreign(tensors, TORCH, config), params)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_plain_torch_transformer(torch):
    """Compare with the forward pass of a plain torch.nn.Transformer, to which only the embeddings are added."""
    torch.manual_seed(0)
    d_model, vocab = 16, 11
    inner = torch.nn.Transformer(d_model, 4, 2, 3, 24, 0.0, batch_first=True, norm_first=True).train()
    embed, generator = torch.nn.Embedding(vocab, d_model), torch.nn.Linear(d_model, vocab)
    positions = torch.zeros(20, d_model)
    angle = torch.arange(20)[:, None] * torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
    positions[:, 0::2], positions[:, 1::2] = torch.sin(angle), torch.cos(angle)
    state = {f"module.transformer.{name}": value for name, value in inner.state_dict().items()}
    state |= {"module.src_tok_emb.embedding.weight": embed.weight, "module.tgt_tok_emb.embedding.weight": embed.weight}
    state |= {f"module.generator.{name}": value for name, value in generator.state_dict().items()}
    state |= {"module.positional_encoding.pos_embedding": positions[:, None]}
    tensors = {name: value.detach().numpy() for name, value in state.items()}
    config = ModelConfig(
        vocab_size=vocab, d_model=d_model, num_heads=4, d_ff=24, num_layers=2, decoder_num_layers=3,
        norm_position="pre", final_norm=True, norm_epsilon=1e-5, attention_bias=True, logits_bias=True,
        tie_embeddings="none",
    )  # fmt: skip
    src, tgt = torch.from_numpy(SRC).long(), torch.from_numpy(TGT_IN).long()
    with torch.no_grad():
        x, y = (embed(ids) * math.sqrt(d_model) + positions[: ids.shape[1]] for ids in (src, tgt))
        out = inner(
            x, y, tgt_mask=torch.ones(4, 4, dtype=torch.bool).triu(1), src_key_padding_mask=src == 0,
            memory_key_padding_mask=src == 0, tgt_key_padding_mask=tgt == 0,
        )  # fmt: skip
        theirs = generator(out).numpy()[REAL]
    np.testing.assert_allclose(logits(config, from_foreign(tensors, TORCH, config)), theirs, atol=1e-5)

    with pytest.raises(UserError, match=r"pos_embedding is not the position table .* model.positions='halves'"):
        from_foreign(tensors, TORCH, ModelConfig(**{**vars(config), "positions": "halves"}))


def test_model_of_a_teaching_notebook_is_imported(torch):
    """Stacks of nn.TransformerEncoder and nn.TransformerDecoder, one embedding, fc_out: width 256, 3 + 3 layers."""
    torch.manual_seed(1)
    d_model, vocab = 256, 50

    class Seq2Seq(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(vocab, d_model)
            encoder = torch.nn.TransformerEncoderLayer(d_model, 8, 512, 0.0, batch_first=True)
            decoder = torch.nn.TransformerDecoderLayer(d_model, 8, 512, 0.0, batch_first=True)
            self.encoder = torch.nn.TransformerEncoder(encoder, 3, enable_nested_tensor=False)
            self.decoder = torch.nn.TransformerDecoder(decoder, 3)
            self.fc_out = torch.nn.Linear(d_model, vocab)

    model = Seq2Seq()
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    config = ModelConfig(
        vocab_size=vocab, d_model=d_model, num_heads=8, d_ff=512, num_layers=3, norm_epsilon=1e-5, attention_bias=True,
        logits_bias=True, tie_embeddings="none", positions="learned", max_length=16,
    )  # fmt: skip
    # The notebook adds no positions, which equals a learned table of zeros.
    zeros = np.zeros((16, d_model), np.float32)
    params = from_foreign(tensors | {"src_positions.weight": zeros, "tgt_positions.weight": zeros}, TORCH, config)
    src, tgt = torch.from_numpy(SRC).long(), torch.from_numpy(TGT_IN).long()
    with torch.no_grad():
        memory = model.encoder(model.embedding(src) * 16, src_key_padding_mask=src == 0)
        out = model.decoder(
            model.embedding(tgt) * 16, memory, tgt_mask=torch.ones(4, 4, dtype=torch.bool).triu(1),
            memory_key_padding_mask=src == 0, tgt_key_padding_mask=tgt == 0,
        )  # fmt: skip
        theirs = model.fc_out(out).numpy()[REAL]
    np.testing.assert_allclose(logits(config, params), theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"d_k": 5}, "d_k=5"), ({"decoder_d_v": 2}, "d_v=2"), ({"norm_variant": "unbiased_std"}, "norm_variant")],
)
def test_inexpressible_model_is_rejected(changes, named):
    config = odd(**changes)
    with pytest.raises(UserError, match=f"torch cannot express this model: .*{named}"):
        to_foreign(random_params(config), TORCH, config)
