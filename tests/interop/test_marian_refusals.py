"""Marian folders that are damaged, incomplete or unsupported, and the time and memory of an import."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from interop_cases import Malicious, change_json, copy_files
from marian_cases import make_folder

from transformer_jax.config import ModelConfig
from transformer_jax.interop.marian_format import marian_tensors, read_marian
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def original(optional_package, tmp_path_factory):
    for name in ("torch", "transformers", "sentencepiece", "sacremoses", "safetensors"):
        optional_package(name)
    path = tmp_path_factory.mktemp("marian")
    make_folder(path)
    return path


@pytest.fixture
def folder(original, tmp_path):
    return copy_files(original, tmp_path)


def setting(file, name, value):
    return file, {name: value}, rf"{file}\.json: the setting {name} is "


REFUSALS = [
    *[
        setting("config", *item)
        for item in (
            *[("model_type", "bart"), ("normalize_before", True), ("normalize_embedding", True)],
            *[("add_final_layer_norm", True), ("encoder_layerdrop", 0.1), ("decoder_layerdrop", 0.1)],
            *[("force_bos_token_to_be_generated", True), ("quantization_config", {}), ("vocab_size", None)],
            *[("activation_function", "gelu_new"), ("d_model", "12"), ("dropout", -1), ("scale_embedding", 1)],
            *[("eos_token_id", [0, 1]), ("pad_token_id", -1), ("bad_words_ids", [[3, 4]])],
        )
    ],
    *[
        setting("generation_config", *item)
        for item in (
            *[("do_sample", True), ("num_beam_groups", 2), ("diversity_penalty", 0.5), ("early_stopping", True)],
            *[("early_stopping", "never"), ("min_length", -3), ("min_new_tokens", 3.5), ("no_repeat_ngram_size", 3)],
            *[("encoder_no_repeat_ngram_size", 3), ("repetition_penalty", 1.2), ("forced_bos_token_id", 4)],
            *[("forced_eos_token_id", 4), ("forced_decoder_ids", [[1, 2]]), ("begin_suppress_tokens", [4])],
            *[("sequence_bias", {}), ("renormalize_logits", 1), ("length_penalty", -1.0), ("num_beams", 1.5)],
            *[("exponential_decay_length_penalty", [5, 1.0]), ("guidance_scale", 2.0), ("stop_strings", ["."])],
        )
    ],
    ("generation_config", {"suppress_tokens": [0]}, r"decoding\.forbidden_ids"),
    ("generation_config", {"suppress_tokens": [10_000]}, r"decoding\.forbidden_ids"),
    ("config.json", b"{", r"config\.json: not JSON"),
    ("config.json", b"[]", r"config\.json: not a JSON object"),
    ("config.json", b"{}", r"has no model_type"),
    ("config.json", b"\xff", r"config\.json: cannot be read as UTF-8"),
    ("vocab.json", b"[]", r"vocab\.json: not a JSON object"),
    ("vocab.json", b"{}", r"vocab\.json has no '<unk>'"),
    ("vocab.json", b'{"<unk>": "1"}', r"source\.spm with vocab\.json: "),
    ("target.spm", b"abc", r"target\.spm with vocab\.json: not a SentencePiece model"),
    ("model.safetensors", b"", r"model\.safetensors"),
    ("model.safetensors", b"\xff" * 100, r"model\.safetensors"),
    ("tokenizer_config.json", b'{"sp_model_kwargs": {"alpha": 1}}', r"sp_model_kwargs is"),
    *[(name, None, name) for name in ("source.spm", "vocab.json", "config.json", "model.safetensors")],
]


@pytest.mark.parametrize(("file", "change", "message"), REFUSALS)
def test_unreadable_folder_is_rejected(folder, file, change, message):
    if isinstance(change, dict):
        if file == "config":  # generation_config.json would override it
            (folder / "generation_config.json").unlink()
        change_json(folder / f"{file}.json", **change)
    elif change is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(change)
    with pytest.raises(UserError, match=message):
        read_marian(folder)


def test_missing_folder_is_rejected(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        read_marian(tmp_path / "not-there")


def test_settings_without_effect_are_accepted(folder):
    settings = {"forced_eos_token_id": 0, "early_stopping": False, "repetition_penalty": 1.0, "temperature": 0.7}
    change_json(folder / "generation_config.json", **settings)
    change_json(folder / "config.json", add_bias_logits=False, num_hidden_layers=6, id2label={"0": "a"})
    read_marian(folder)


def test_every_truncation_of_the_weights(folder):
    content = (folder / "model.safetensors").read_bytes()
    for length in range(0, len(content), len(content) // 40):
        (folder / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"model\.safetensors"):
            read_marian(folder)


def change_weights(folder, change):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_all_wrong_weights_are_listed(folder):
    def change(tensors):
        tensors["model.encoder.layers.0.fc1.weight"] = np.zeros((3, 4), np.float32)
        tensors["model.decoder.layers.1.fc2.bias"] = np.full(12, np.nan, np.float32)
        tensors["model.decoder.layers.0.fc2.bias"] = np.zeros(12, np.int32)
        del tensors["model.decoder.layers.0.encoder_attn.q_proj.weight"]
        tensors["model.decoder.layers.7.fc1.bias"] = np.zeros(28, np.float32)
        tensors["lm_head.weight"] = np.zeros_like(tensors["model.shared.weight"])

    change_weights(folder, change)
    with pytest.raises(UserError, match="does not fit the model") as error:
        read_marian(folder)
    for problem in (
        "model.encoder.layers.0.fc1.weight has shape [3, 4], not [20, 12]",
        "model.decoder.layers.1.fc2.bias holds numbers that are not finite",
        "model.decoder.layers.0.fc2.bias holds int32",
        "model.decoder.layers.0.encoder_attn.q_proj.weight is missing",
        "model.decoder.layers.7.fc1.bias [28] is left over",
        "lm_head.weight differs",
    ):
        assert problem in str(error.value)


def test_other_position_tables_are_rejected(folder):
    def change(tensors):
        tensors["model.encoder.embed_positions.weight"] = np.zeros((64, 12), np.float32)

    change_weights(folder, change)
    with pytest.raises(UserError, match=r"encoder\.embed_positions\.weight is not the position table"):
        read_marian(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_not_executed(folder, zipped):
    import torch

    (folder / "model.safetensors").unlink()
    state = {"final_logits_bias": torch.zeros(3), "made": Malicious(folder / "made")}
    torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        read_marian(folder)
    assert not (folder / "made").exists()


BIG = """
import json, re, sys, time
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
from transformer_jax.config import ModelConfig
from transformer_jax.interop.marian_format import marian_tensors, read_marian
from transformer_jax.interop.tables import flatten
from transformer_jax.model.transformer import count_parameters
folder = Path(sys.argv[1])
jax.numpy.zeros(3).block_until_ready()

def peak():
    # getrusage would include the peak of the parent process.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

before, start = peak(), time.perf_counter()
imported = read_marian(folder)
seconds = time.perf_counter() - start
after = peak()
size = sum(leaf.nbytes for leaf in flatten(imported.params).values())
print(json.dumps({"seconds": seconds, "bytes": size, "grown": 1024 * (after - before)}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_large_import_is_fast_and_uses_little_memory(folder):
    from safetensors.numpy import save_file

    model = ModelConfig(
        vocab_size=60_000, norm_epsilon=1e-5, positions="halves", attention_bias=True, decoder_start="pad"
    )
    sizes = {"vocab_size": model.vocab_size, "decoder_vocab_size": model.vocab_size, "d_model": model.d_model}
    for stack in ("encoder", "decoder"):
        sizes |= {f"{stack}_layers": 6, f"{stack}_ffn_dim": model.d_ff, f"{stack}_attention_heads": model.num_heads}
    change_json(folder / "config.json", **sizes)
    # Views of one number, so that this process uses little memory.
    params = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0.1), leaf.shape), abstract_params(model))
    save_file(marian_tensors(params, model), folder / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", BIG, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] > 70e6 * 4
    assert found["seconds"] < 10, found
    assert found["grown"] < 2.3 * found["bytes"], found
