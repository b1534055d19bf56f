"""State dicts of annotated-transformer and of the opus_books teaching model."""

import numpy as np
import pytest
from interop_cases import REAL, SRC, TGT_IN, assert_same_trees, logits, odd, random_params

from transformer_jax.config import Config, DataConfig
from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.translator import Translator
from transformer_jax.interop.convert import import_run
from transformer_jax.interop.tables import flatten, from_foreign, to_foreign, unflatten
from transformer_jax.interop.torch_format import ANNOTATED, OPUS_BOOKS
from transformer_jax.types import SPECIAL_TOKENS, UserError

CONVENTIONS = {
    "norm_position": "pre",
    "final_norm": True,
    "norm_variant": "unbiased_std",
    "norm_epsilon": 1e-6,
    "attention_bias": True,
    "logits_bias": True,
    "tie_embeddings": "none",
    "source_vocab_size": 19,
    "decoder_num_heads": 3,
}
CONFIG = odd(**CONVENTIONS)


class Teaching:
    """The teaching model's forward pass from its state dict, in NumPy float64, written from its formulas."""

    def __init__(self, state, heads):
        self.state, self.heads = {name: np.asarray(value, np.float64) for name, value in state.items()}, heads

    def linear(self, x, name):
        return x @ self.state[f"{name}.weight"].T + self.state.get(f"{name}.bias", 0)

    def norm(self, x, name):
        scale, shift = self.state[f"{name}.alpha"], self.state[f"{name}.bias"]
        return scale * (x - x.mean(-1, keepdims=True)) / (x.std(-1, ddof=1, keepdims=True) + 1e-6) + shift

    def attention(self, x, memory, mask, name):
        def split(y, letter):
            y = self.linear(y, f"{name}.w_{letter}")
            return y.reshape(*y.shape[:2], self.heads, -1).swapaxes(1, 2)

        query, key, value = split(x, "q"), split(memory, "k"), split(memory, "v")
        scores = np.where(mask, query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1]), -1e9)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = (weights / weights.sum(-1, keepdims=True)) @ value
        return self.linear(out.swapaxes(1, 2).reshape(*x.shape), f"{name}.w_o")

    def feed_forward(self, x, name):
        return self.linear(np.maximum(self.linear(x, f"{name}.linear_1"), 0), f"{name}.linear_2")

    def embed(self, tokens, name):
        table = self.state[f"{name}.embedding.weight"]
        width = table.shape[1]
        angle = np.arange(tokens.shape[1])[:, None] * np.exp(np.arange(0, width, 2) * -np.log(10000) / width)
        positions = np.stack([np.sin(angle), np.cos(angle)], -1).reshape(-1, width)
        return table[tokens] * np.sqrt(width) + positions

    def __call__(self, src, tgt, layers):
        src_mask = (src != 0)[:, None, None, :]
        tgt_mask = (tgt != 0)[:, None, None, :] & np.tril(np.ones((tgt.shape[1],) * 2, bool))
        x = self.embed(src, "src_embed")
        for i in range(layers[0]):
            name = f"encoder.layers.{i}"
            y = self.norm(x, f"{name}.residual_connections.0.norm")
            x = x + self.attention(y, y, src_mask, f"{name}.self_attention_block")
            y = self.norm(x, f"{name}.residual_connections.1.norm")
            x = x + self.feed_forward(y, f"{name}.feed_forward_block")
        memory, x = self.norm(x, "encoder.norm"), self.embed(tgt, "tgt_embed")
        for i in range(layers[1]):
            name = f"decoder.layers.{i}"
            y = self.norm(x, f"{name}.residual_connections.0.norm")
            x = x + self.attention(y, y, tgt_mask, f"{name}.self_attention_block")
            y = self.norm(x, f"{name}.residual_connections.1.norm")
            x = x + self.attention(y, memory, src_mask, f"{name}.cross_attention_block")
            y = self.norm(x, f"{name}.residual_connections.2.norm")
            x = x + self.feed_forward(y, f"{name}.feed_forward_block")
        return self.linear(self.norm(x, "decoder.norm"), "projection_layer.proj")


@pytest.mark.parametrize("bias", [True, False])
def test_teaching_model_equals_its_formulas(bias):
    config = odd(**CONVENTIONS | {"attention_bias": bias})
    params = random_params(config)
    state = to_foreign(params, OPUS_BOOKS, config)
    theirs = Teaching(state, 3)(SRC, TGT_IN, (2, 3))[REAL]
    np.testing.assert_allclose(logits(config, params), theirs, atol=2e-5, rtol=1e-5)
    assert_same_trees(from_foreign(state, OPUS_BOOKS, config), params)


def test_norms_with_scalar_parameters_are_imported():
    """Early versions have one scalar scale and one scalar bias for all columns."""
    state = to_foreign(random_params(CONFIG), OPUS_BOOKS, CONFIG)
    state = {name: value[:1] if ".norm." in name else value for name, value in state.items()}
    theirs = Teaching(state, 3)(SRC, TGT_IN, (2, 3))[REAL]
    np.testing.assert_allclose(logits(CONFIG, from_foreign(state, OPUS_BOOKS, CONFIG)), theirs, atol=2e-5, rtol=1e-5)


def test_annotated_names_round_trip():
    params = random_params(CONFIG)
    state = to_foreign(params, ANNOTATED, CONFIG)
    assert state["decoder.layers.2.src_attn.linears.3.weight"].shape == (12, 12)
    assert state["encoder.layers.1.sublayer.1.norm.a_2"].shape == (12,)
    assert_same_trees(from_foreign(state, ANNOTATED, CONFIG), params)


def test_stored_positions_are_compared():
    from transformer_jax.model.positional import sinusoids

    params = random_params(CONFIG)
    state = to_foreign(params, ANNOTATED, CONFIG)
    table = sinusoids(50, 12).astype(np.float32)[None]
    assert_same_trees(from_foreign(state | {"src_embed.1.pe": table}, ANNOTATED, CONFIG), params)
    with pytest.raises(UserError, match=r"src_embed.1.pe is not the position table"):
        from_foreign(state | {"src_embed.1.pe": table[:, 1:]}, ANNOTATED, CONFIG)


@pytest.mark.parametrize(
    "changes",
    [{"norm_variant": "standard"}, {"norm_position": "post"}, {"final_norm": False}, {"positions": "halves"},
     {"activation": "gelu"}, {"scale_embeddings": False}, {"position_offset": 1}],
)  # fmt: skip
def test_other_conventions_are_rejected(changes):
    config = odd(**CONVENTIONS | changes)
    with pytest.raises(UserError, match=f"annotated cannot express this model: .*{next(iter(changes))}"):
        from_foreign({}, ANNOTATED, config)


def greedy_ids(model, source, limit, start_id, end_id, torch):
    """Return the greedy output of a torch model, with EOS, for unchanged source ids."""
    tokens = [start_id]
    with torch.no_grad():
        while len(tokens) <= limit and (len(tokens) == 1 or tokens[-1] != end_id):
            tokens.append(int(model(torch.tensor([source]), torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[1:]


def test_model_trained_with_source_bos_translates_its_own_greedy_lines(optional_package, tmp_path):
    """Batches of annotated-transformer are <s> source </s>, so translations differ without source_bos."""
    torch = optional_package("torch")
    from transformer_jax.parity.torch_models import AnnotatedTransformer, load_numpy

    words = [f"w{i}" for i in range(18)]
    pair = TokenizerPair(*[WordTokenizer("word", [*SPECIAL_TOKENS, *words])] * 2)
    pair.save(tmp_path / "tokenizer")
    config = odd(**CONVENTIONS | {"vocab_size": 22, "source_vocab_size": 22, "decoder_num_heads": 3})
    model = AnnotatedTransformer(config).eval()
    # Weights whose greedy output depends on every source token.
    leaves = flatten(random_params(config, seed=2))
    leaves |= {path: 3 * leaf for path, leaf in leaves.items() if leaf.ndim > 1}
    leaves |= {path: 1 + leaf for path, leaf in leaves.items() if path.endswith("scale")}
    leaves["target_embedding/table"] = leaves["target_embedding/table"] / 12
    leaves["logits_bias"][2] += 1
    params = unflatten(leaves)
    load_numpy(model, to_foreign(params, ANNOTATED, config))
    torch.save(model.state_dict(), tmp_path / "model.pt")

    with pytest.raises(UserError, match=r"but not num_heads, source_bos\. Pass --num-heads .*; --source-bos"):
        import_run(tmp_path / "model.pt", "annotated", tmp_path / "run")
    with pytest.raises(UserError, match=r"but not source_bos\. Pass --source-bos \(whether .*<s> source </s>"):
        import_run(tmp_path / "model.pt", "annotated", tmp_path / "run", num_heads=3)
    assert not (tmp_path / "run").exists()

    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(words, length)) for length in (3, 4, 5, 6, 7, 8)]
    rows = [[1, *ids, 2] for ids in pair.source.encode(texts)]
    expected = pair.target.decode([greedy_ids(model, row, len(row) - 1 + 8, 1, 2, torch) for row in rows])
    equal = {}
    for source_bos in (True, False):
        run = import_run(
            tmp_path / "model.pt", "annotated", tmp_path / "run", num_heads=3, source_bos=source_bos, overwrite=True
        )
        assert run.load_config().model.source_bos is source_bos
        found = Translator.load(run.path, beam_size=1, max_length_offset=8).translate(texts)
        equal[source_bos] = sum(map(str.__eq__, found, expected))
    assert equal[True] == len(texts) > equal[False]


def test_annotated_model_with_a_configuration_without_source_bos_logs_a_warning(optional_package, tmp_path, caplog):
    torch = optional_package("torch")
    config = odd(**CONVENTIONS | {"source_vocab_size": None, "vocab_size": 22})
    pair = TokenizerPair(*[WordTokenizer("word", [*SPECIAL_TOKENS, *(f"w{i}" for i in range(18))])] * 2)
    pair.save(tmp_path / "tokenizer")
    state = to_foreign(random_params(config), ANNOTATED, config)
    torch.save({name: torch.tensor(value) for name, value in state.items()}, tmp_path / "model.pt")
    whole = Config(model=config, data=DataConfig(max_length=30))
    import_run(tmp_path / "model.pt", "annotated", tmp_path / "run", config=whole)
    assert "model.source_bos=False" in caplog.text
    caplog.clear()
    import_run(tmp_path / "model.pt", "annotated", tmp_path / "with", config=whole, source_bos=True)
    assert "source_bos" not in caplog.text
