"""The commands import, fine-tune and export a Marian model, and export the shipped recipes to both formats."""

from pathlib import Path

import jax
import numpy as np
import pytest
from interop_cases import random_params
from marian_cases import LINES, OTHER, compare_outputs, make_folder

from transformer_jax import cli
from transformer_jax.checkpoint.checkpoint import load_params
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.data.tokenizer import WordTokenizer
from transformer_jax.data.tokenizer_pair import TokenizerPair
from transformer_jax.decoding.translator import Translator
from transformer_jax.interop.convert import export_run
from transformer_jax.interop.ctranslate2_format import write_ctranslate2
from transformer_jax.interop.marian_format import marian_tensors
from transformer_jax.model.transformer import abstract_params
from transformer_jax.presets import load_recipe


def command(*args):
    return cli.main([*map(str, args), "--no-malloc-tuning"])


def test_marian_is_imported_fine_tuned_and_exported(optional_package, tmp_path):
    transformers = optional_package("transformers")
    optional_package("sentencepiece")
    for name in ("theirs", "text"):
        (tmp_path / name).mkdir()
    make_folder(tmp_path / "theirs")
    (tmp_path / "text" / "train.en").write_text("\n".join(LINES[:2] * 4) + "\n")
    (tmp_path / "text" / "train.de").write_text("\n".join(OTHER * 4) + "\n")
    imported, tuned = tmp_path / "imported", tmp_path / "tuned"
    assert command("import", "--from", "marian", tmp_path / "theirs", "--output", imported) == 0
    assert command(
        *("train", imported / "config.json", "--workdir", tuned, "--training.init-from", imported),
        *("--data.source", "text", "--data.directory", tmp_path / "text", "--data.valid", "", "--data.test", ""),
        *("--data.batch-tokens", 256, "--data.max-shapes", 1, "--training.num-steps", 3),
        *("--training.schedule", "constant", "--training.peak-learning-rate", 0.01, "--training.warmup-steps", 1),
    ) == 0  # fmt: skip
    model = RunDir(tuned).load_config().model
    before = load_params(imported / "checkpoints" / "0", abstract_params(model))
    after = load_params(tuned / "checkpoints" / "3", abstract_params(model))
    changes = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert 0.001 < max(changes) < 0.1

    out = export_run(tuned, "marian", tmp_path / "out")
    theirs = transformers.MarianMTModel.from_pretrained(out).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    translator = Translator.load(tuned, max_length_offset=6)
    assert compare_outputs(translator, theirs, tokenizer, LINES, num_beams=4)[0] == []
    assert command("import", "--from", "marian", out, "--output", tmp_path / "again") == 0
    assert Translator.load(tmp_path / "again", max_length_offset=6).translate(LINES) == translator.translate(LINES)


@pytest.mark.parametrize("recipe", ["numbers.py", "multi30k_en_de.py:bpe10k", "multi30k_en_de.py:raw"])
def test_shipped_recipes_export_to_both_formats(recipe, tmp_path):
    config = load_recipe(str(Path(__file__).parents[2] / "configs" / recipe))
    params = random_params(config.model)
    assert len(marian_tensors(params, config.model)) > 50
    words = WordTokenizer("word", [f"w{i}" for i in range(config.model.vocab_size)])
    write_ctranslate2(tmp_path, config, params, TokenizerPair(words, words), warn=lambda message: None)
    assert (tmp_path / "model.bin").stat().st_size > 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
