"""fairseq checkpoints, with `transformers.FSMTForConditionalGeneration` as the oracle for its conventions."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_cases import Malicious, assert_same_trees

from transformer_jax import cli
from transformer_jax.decoding.translator import Translator
from transformer_jax.interop.fairseq_format import FAIRSEQ, read_fairseq
from transformer_jax.interop.tables import from_foreign, to_foreign
from transformer_jax.model.transformer import Transformer
from transformer_jax.types import UserError

SOURCE_WORDS, TARGET_WORDS = [f"s{i}" for i in range(12)], [f"t{i}" for i in range(9)]
SRC = np.array([[5, 6, 7, 8, 2], [5, 4, 2, 1, 1]], np.int32)
TGT_IN = np.array([[2, 4, 5, 6], [2, 9, 1, 1]], np.int32)

ARGS = {
    "arch": "transformer", "source_lang": "de", "target_lang": "en", "encoder_layers": 2, "decoder_layers": 3,
    "encoder_embed_dim": 12, "decoder_embed_dim": 12, "encoder_ffn_embed_dim": 20, "decoder_ffn_embed_dim": 28,
    "encoder_attention_heads": 3, "decoder_attention_heads": 2, "dropout": 0.2, "label_smoothing": 0.1,
    "share_decoder_input_output_embed": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def torch(optional_package):
    return optional_package("torch")


@pytest.fixture(scope="module")
def fsmt(torch, optional_package):
    transformers = optional_package("transformers")
    torch.manual_seed(0)
    config = transformers.FSMTConfig(
        langs=["de", "en"], src_vocab_size=16, tgt_vocab_size=13, d_model=12, encoder_layers=2, decoder_layers=3,
        encoder_ffn_dim=20, decoder_ffn_dim=28, encoder_attention_heads=3, decoder_attention_heads=2,
        max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, init_std=0.3,
    )  # fmt: skip
    model = transformers.FSMTForConditionalGeneration(config).eval()
    model.model.decoder.output_projection.weight = model.model.decoder.embed_tokens.weight
    return model


def tensors_of(fsmt):
    """Return the tensors under fairseq's names. fairseq computes its positions and stores none."""
    state = {name.removeprefix("model."): tensor.clone() for name, tensor in fsmt.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if "embed_positions" not in name}


@pytest.fixture
def write(torch, tmp_path):
    """Return `write(checkpoint)`, which writes a folder of the checkpoint and two dictionaries."""

    def make(checkpoint, name="model.pt"):
        torch.save(checkpoint, tmp_path / name)
        for language, words in (("de", SOURCE_WORDS), ("en", TARGET_WORDS)):
            lines = "".join(f"{word} {100 - i}\n" for i, word in enumerate(words))
            (tmp_path / f"dict.{language}.txt").write_text(lines)
        return tmp_path

    return make


def checkpoint(state, **changes):
    return {"args": argparse.Namespace(**ARGS | changes), "model": state}


def logits(imported):
    model = Transformer(imported.config.model)
    params = jax.tree.map(jnp.asarray, imported.params)
    return np.asarray(model.apply({"params": params}, jnp.asarray(SRC), jnp.asarray(TGT_IN)))


def test_logits_equal(torch, fsmt, write):
    imported = read_fairseq(write(checkpoint(tensors_of(fsmt))))
    with torch.no_grad():
        theirs = fsmt(
            torch.from_numpy(SRC).long(),
            attention_mask=torch.from_numpy(SRC != 1),
            decoder_input_ids=torch.from_numpy(TGT_IN).long(),
            use_cache=False,  # with a cache it processes tokens one by one
        ).logits.numpy()
    np.testing.assert_allclose(logits(imported)[TGT_IN != 1], theirs[TGT_IN != 1], atol=2e-5)
    model = imported.config.model
    assert (model.residual_dropout, model.decoder_start, model.position_offset) == (0.2, "eos", 2)
    assert imported.config.data.source_language == "de"
    written = to_foreign(imported.params, FAIRSEQ, model)
    assert_same_trees(from_foreign(written, FAIRSEQ, model), imported.params)


def test_fairseq_import_never_generates_eos_first(torch, fsmt, write):
    """fairseq's generator has min_len 1, so EOS is never the first token."""
    state = tensors_of(fsmt)
    table = state["decoder.embed_tokens.weight"]
    table[:] = 0.1 * table
    # The last norm outputs only its bias, the embedding of EOS, so EOS is the most probable token everywhere.
    for kind, value in (("weight", torch.zeros(12)), ("bias", 50 * table[2])):
        state[f"decoder.layers.2.final_layer_norm.{kind}"] = value
    if "decoder.output_projection.weight" in state:
        state["decoder.output_projection.weight"] = table
    imported = read_fairseq(write(checkpoint(state)))
    assert imported.config.decoding.min_length == 1
    for beam_size in (1, 3):
        for min_length, expected in ((0, 1), (1, 2)):
            decoding = {"beam_size": beam_size, "min_length": min_length, "alpha": 0.0}
            config = imported.config.with_changes(decoding=decoding)
            translator = Translator(config, imported.params, imported.tokenizers)
            assert translator.translate_n_best(["s1 s2"], 1)[0][0].num_tokens == expected


def test_greedy_equals_generate(torch, fsmt, write):
    imported = read_fairseq(write(checkpoint(tensors_of(fsmt))))
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(SOURCE_WORDS, size=length)) for length in (1, 3, 5, 8)]
    config = imported.config.with_changes(decoding={"beam_size": 1, "max_length_offset": 7})
    translator = Translator(config, imported.params, imported.tokenizers)
    ours = translator.translate(texts)
    for text, translation in zip(texts, ours, strict=True):
        (ids,) = imported.tokenizers.source.encode([text])
        with torch.no_grad():
            theirs = fsmt.generate(
                torch.tensor([[*ids, 2]]), num_beams=1, do_sample=False, max_length=len(ids) + 1 + 7 + 1,
                min_length=2, forced_eos_token_id=None, decoder_start_token_id=2,
            )  # fmt: skip
        assert imported.tokenizers.target.decode(theirs[:, 1:].tolist()) == [translation]


def test_import_by_the_command(fsmt, write, tmp_path, capsys):
    folder = write(checkpoint(tensors_of(fsmt)))
    output = tmp_path / "run"
    assert cli.main(["import", "--from", "fairseq", str(folder), "--output", str(output)]) == 0
    imported = read_fairseq(folder)
    expected = Translator(imported.config, imported.params, imported.tokenizers).translate(["s1 s2", "", "s3"])
    assert Translator.load(output).translate(["s1 s2", "", "s3"]) == expected
    assert cli.main(["import", "--from", "fairseq", str(folder), "--output", str(tmp_path), "--config", "x.py"]) == 1
    assert "x.py: no such recipe" in capsys.readouterr().err


def test_fused_projections_and_old_names(torch, fsmt, write):
    state = tensors_of(fsmt)
    expected = read_fairseq(write(checkpoint(dict(state)))).params
    for name in [name for name in state if ".q_proj." in name]:
        parts = [state.pop(name.replace(".q_proj.", f".{letter}_proj.")) for letter in "qkv"]
        state[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
    old = {"self_attn_layer_norm": 0, "final_layer_norm": 1}
    for name in [name for name in state if name.startswith("encoder.layers") and "layer_norm" in name]:
        *start, norm, kind = name.split(".")
        state[".".join([*start, "layer_norms", str(old[norm]), kind])] = state.pop(name)
    state["encoder.version"] = torch.tensor([3.0])
    state["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    languages = {name: ARGS[name] for name in ("source_lang", "target_lang")}
    model = {name: value for name, value in ARGS.items() if name not in (*languages, "label_smoothing")}
    cfg = {"model": argparse.Namespace(**model), "task": languages, "criterion": {"label_smoothing": 0.3}}
    found = read_fairseq(write({"cfg": cfg, "model": state}))
    assert_same_trees(found.params, expected)
    assert found.config.training.label_smoothing == 0.3
    state["encoder.layers.0.self_attn.q_proj.weight"] = torch.zeros(12, 12)
    with pytest.raises(UserError, match=r"in_proj_weight and encoder.*.q_proj.weight hold the same weights"):
        read_fairseq(write({"cfg": cfg, "model": state}))


def test_codes_split_the_text(fsmt, write):
    folder = write(checkpoint(tensors_of(fsmt)))
    (folder / "dict.de.txt").write_text("".join(f"{p} 1\n" for p in ["lo@@", "w@@", "er", "low", *"abcdefgh"]))
    (folder / "bpecodes").write_text("l o 9\ne r</w> 8\nw</w> x 7\n")
    imported = read_fairseq(folder)
    source = imported.tokenizers.source
    assert imported.config.tokenizer.kind == "subword_nmt"
    (ids,) = source.encode(["lower b"])
    assert source.tokens(ids) == ["lo@@", "w@@", "er", "b"]
    assert source.decode([ids]) == ["lower b"]


@pytest.mark.parametrize("rows", [20, 1026])
def test_learned_positions_limit_the_training_length(rows, torch, fsmt, write):
    state = tensors_of(fsmt)
    for stack in ("encoder", "decoder"):
        state[f"{stack}.embed_positions.weight"] = torch.randn(rows, 12)
    learned = {f"{stack}_learned_pos": True for stack in ("encoder", "decoder")}
    config = read_fairseq(write(checkpoint(state, **learned))).config
    assert (config.model.positions, config.model.max_length, config.model.position_offset) == ("learned", rows, 2)
    assert config.data.max_length == min(256, rows - 2)


def test_code_in_a_checkpoint_is_not_executed(fsmt, write, tmp_path):
    folder = write({**checkpoint(tensors_of(fsmt)), "extra": Malicious(tmp_path / "made")})
    with pytest.raises(UserError, match=r"model.pt holds objects of .*mkdir.*execute code.*save it again"):
        read_fairseq(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adaptive_input": True}, "the setting adaptive_input is True"),
        ({"layernorm_embedding": True}, "the setting layernorm_embedding is True"),
        (
            {"encoder_normalize_before": True},
            "decoder_normalize_before is missing; only the value of encoder_normalize_before",
        ),
        ({"encoder_layers": 3}, r"encoder.layers.2.self_attn.q_proj.weight is missing"),
        ({"source_lang": None}, r"name no source_lang and target_lang.*dict.de.txt"),
        ({"share_all_embeddings": True}, "differ, and the model shares all embeddings"),
        ({"encoder_attention_heads": None}, "the setting encoder_attention_heads is missing"),
        ({"decoder_attention_heads": 2.0}, "the setting decoder_attention_heads is 2.0; only an integer of at least 0"),
        ({"encoder_normalize_before": "False"}, "the setting encoder_normalize_before is 'False'"),
        ({"encoder": argparse.Namespace(layers=2)}, "the settings encoder are tables"),
        ({"source_lang": "fr"}, "dict.fr.txt: cannot be read: No such file"),
        ({"source_lang": "x/../../secret"}, "name the language 'x/../../secret', which may not"),
    ],
)
def test_unsupported_setting_is_rejected(changes, message, fsmt, write):
    with pytest.raises(UserError, match=message):
        read_fairseq(write(checkpoint(tensors_of(fsmt), **changes)))


def test_folder_with_several_checkpoints_requires_a_path(torch, fsmt, write):
    folder = write(checkpoint(tensors_of(fsmt)), "a.pt")
    write({}, "b.pt")
    with pytest.raises(UserError, match=r"the folder has these files of tensors: a.pt, b.pt"):
        read_fairseq(folder)
    assert read_fairseq(folder / "a.pt").config.model.num_layers == 2
    with pytest.raises(UserError, match="no settings of a model"):
        read_fairseq(folder / "b.pt")


def test_damaged_dictionary_is_rejected(fsmt, write):
    folder = write(checkpoint(tensors_of(fsmt)))
    (folder / "dict.en.txt").write_text("a 5\nb 5\na 4 #fairseq:overwrite\nb 1\n")
    with pytest.raises(UserError, match=r"dict.en.txt, line 4: 'b' is listed twice"):
        read_fairseq(folder)
    (folder / "dict.en.txt").write_text("t0 5\nt1\n")
    with pytest.raises(UserError, match=r"dict.en.txt, line 2: 't1' is not a piece and its count"):
        read_fairseq(folder)
