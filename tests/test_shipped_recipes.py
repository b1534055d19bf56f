"""The recipes of configs/ on stand-ins for their corpora: the same columns, splits and file names, a few sentences."""

import dataclasses
import json
from pathlib import Path

import datasets
import pytest

from transformer_jax import run as commands
from transformer_jax.checkpoint.checkpoint import checkpoint_steps
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.corpus import read_split
from transformer_jax.data.tokenizer_pair import train_tokenizers
from transformer_jax.decoding.translator import Translator
from transformer_jax.presets import load_recipe, preset
from transformer_jax.testing import ENGLISH, GERMAN, log_lines, one_device_mesh
from transformer_jax.types import UserError

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def recipe(name: str) -> Config:
    path, _, choice = name.partition(":")
    return load_recipe(f"{CONFIGS / path}.py{':' + choice if choice else ''}")


@pytest.fixture
def on_one_device(monkeypatch):
    """Train on one of the eight devices, which compiles and runs faster."""
    monkeypatch.setattr(commands, "make_mesh", lambda *_: one_device_mesh())


def sentences(words: list[str], count: int) -> list[str]:
    """Return sentences of three words. With equal lengths fewer shapes are compiled."""
    return [" ".join(words[(row + place) % len(words)] for place in range(3)) for row in range(count)]


# ------------------------------------------------------------------------------------------------------------- WMT14

# recipe: (language, preset, vocabulary, dropout, steps, those between two checkpoints, averaged)
WMT14 = {
    "wmt14_en_de_base": ("de", ModelConfig.base(37_000), 100_000, 1_500, 5),
    "wmt14_en_de_big": ("de", ModelConfig.big(37_000), 300_000, 600, 20),
    "wmt14_en_fr_base": ("fr", ModelConfig.base(32_000), 100_000, 1_500, 5),
    "wmt14_en_fr_big": ("fr", ModelConfig.big(32_000, residual_dropout=0.1), 300_000, 600, 20),
}


@pytest.mark.parametrize("library", ["huggingface", "tfds"])
@pytest.mark.parametrize("name", WMT14)
def test_wmt14_recipe_equals_the_paper(name, library):
    language, model, steps, between, averaged = WMT14[name]
    config = recipe(f"{name}:{library}")
    assert config.model == model
    expected = {
        "data.source": library,
        "data.name": "wmt14" if library == "huggingface" else f"wmt14_translate/{language}-en",
        "data.subset": f"{language}-en" if library == "huggingface" else "",
        "data.source_language": "en",
        "data.target_language": language,
        "data.valid": "validation",
        "data.test": "test",
        "data.batch_tokens": 25_000,
        "tokenizer.kind": "bpe",
        "tokenizer.joint": True,
        "training.num_steps": steps,
        "training.schedule": "noam",
        "training.warmup_steps": 4_000,
        "training.label_smoothing": 0.1,
        "training.checkpoint_every": between,
        "training.keep_checkpoints": averaged,
        "training.average_last": averaged,
        "decoding.checkpoint": "average",
        "decoding.beam_size": 4,
        "decoding.alpha": 0.6,
        "decoding.length_penalty": "gnmt",
        "decoding.max_length_offset": 50,
    }
    assert config.flat().items() >= expected.items()
    # A validation also writes a checkpoint, so it must coincide with a regular one.
    assert config.training.validate_every % config.training.checkpoint_every == 0
    # Ten minutes of the paper's 0.4 or 1.0 s a step.
    assert between * (0.4 if "base" in name else 1.0) == 600
    assert recipe(name) == recipe(f"{name}:huggingface")


def test_wmt14_changes_only_data_and_checkpoint_fields_of_the_preset():
    ours, paper = recipe("wmt14_en_de_big").flat(), preset("paper_big", 37_000).flat()
    assert {field for field in ours if ours[field] != paper[field]} == {
        *("data.source", "data.name", "data.subset", "data.valid"),
        *("training.checkpoint_every", "training.checkpoint_seconds", "training.validate_every"),
    }
    with pytest.raises(UserError, match="no recipe 'torch'; legal: huggingface, tfds"):
        recipe("wmt14_en_fr_base:torch")


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Return `library("wmt14", "de-en", {"train": rows, ...})`, which makes `datasets` load that data set offline."""
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    load = datasets.load_dataset

    def put(name, subset, splits):
        files = {}
        for split, rows in splits.items():
            files[split] = str(tmp_path / f"{split}.json")
            Path(files[split]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

        def load_dataset(asked_name, asked_subset, split):
            assert (asked_name, asked_subset) == (name, subset)
            return load("json", data_files=files, split=split)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)

    return put


@pytest.mark.filterwarnings("ignore:.*have an empty translation")  # after so few steps
def test_wmt14_trains_from_hugging_face_columns_to_the_score_of_the_average(tmp_path, library, on_one_device):
    """Only the sizes differ from the recipe."""
    splits = {}
    for split, count in (("train", 60), ("validation", 8), ("test", 8)):
        rows = zip(sentences(ENGLISH, count), sentences(GERMAN, count), strict=True)
        splits[split] = [{"translation": {"de": german, "en": english}} for english, german in rows]
    library("wmt14", "de-en", splits)
    config = recipe("wmt14_en_de_base")
    config = dataclasses.replace(
        config,
        # The vocabulary fits every word, so that sentences also have equal lengths in tokens.
        model=dataclasses.replace(config.model, vocab_size=400, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        data=dataclasses.replace(config.data, batch_tokens=300, max_shapes=1),
        training=dataclasses.replace(
            config.training, num_steps=7, checkpoint_every=1, validate_every=4, warmup_steps=4, valid_sentences=8
        ),
        decoding=dataclasses.replace(config.decoding, max_length_offset=2),
    )
    with log_lines() as lines:
        commands.train(config, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    assert lines[0].startswith("wmt14/de-en (train): 60 pairs: 60 kept")
    # The best checkpoint, by the loss on newstest2013's stand-in, is kept in addition to the last five.
    assert set(checkpoint_steps(run)) >= {3, 4, 5, 6, 7}
    result = json.loads(run.result.read_text())
    assert (result["checkpoint"], result["num_sentences"]) == ("average", 8)
    validated = [json.loads(line) for line in run.metrics.read_text().splitlines() if "valid_bleu" in line]
    assert [row["step"] for row in validated] == [4, 7]


@pytest.mark.parametrize("name", ["wmt14_en_fr_base", "wmt14_en_fr_big"])
def test_wmt14_reads_french(library, name):
    splits = {
        split: [{"translation": {"en": f"the {split}", "fr": f"le {split}"}}]
        for split in ("train", "validation", "test")
    }
    library("wmt14", "fr-en", splits)
    data = recipe(name).data
    for ours, theirs in (("train", "train"), ("valid", "validation"), ("test", "test")):
        pairs = read_split(data, ours)
        assert (list(pairs.source), list(pairs.target)) == ([f"the {theirs}"], [f"le {theirs}"])


# ------------------------------------------------------------------------------------------------------ other corpora


def test_opus_books_is_split_into_train_validation_and_test(library):
    rows = [
        {"id": str(row), "translation": {"en": english, "it": italian}}
        for row, (english, italian) in enumerate(zip(sentences(ENGLISH, 40), sentences(GERMAN, 40), strict=True))
    ]
    library("Helsinki-NLP/opus_books", "en-it", {"train": rows})
    config = recipe("opus_books_en_it")
    splits = {split: read_split(config.data, split) for split in ("train", "valid", "test")}
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 36, "valid": 2, "test": 2}
    joined = [pair for pairs in splits.values() for pair in zip(pairs.source, pairs.target, strict=True)]
    assert joined == [(row["translation"]["en"], row["translation"]["it"]) for row in rows]
    tokenizers = train_tokenizers(config, splits["train"])
    tokenizers.check_fits(config.model)
    assert not tokenizers.joint


@pytest.mark.parametrize(
    ("name", "stems"),
    [
        ("iwslt14_de_en", ("train", "valid", "test")),
        ("multi30k_en_fr:raw", ("train", "val", "test_2016_flickr")),
        ("multi30k_en_fr:bpe10k", ("train", "valid", "test.2016")),
        ("en_fr_small", ("train", "dev", "test")),
        ("own_text", ("train", "valid", "test")),
        ("parsing_wsj:paper", ("train", "valid", None)),
    ],
)
def test_recipes_read_the_files_named_in_their_docstring(tmp_path, monkeypatch, name, stems):
    config = recipe(name)
    monkeypatch.chdir(tmp_path)
    folder = Path(config.data.directory)
    folder.mkdir(parents=True)
    source, target = config.data.source_language, config.data.target_language
    for size, stem in enumerate(filter(None, stems), 10):
        for language, words in ((source, ENGLISH), (target, GERMAN)):
            (folder / f"{stem}.{language}").write_text("".join(f"{line}\n" for line in sentences(words, size)))
    document = (CONFIGS / f"{name.partition(':')[0]}.py").read_text().partition("get_config")[0]
    assert str(folder) in " ".join(document.split())
    if "parsing" not in name:
        assert f"as *.{source} and *.{target}" in " ".join(document.split())
    train = read_split(config.data, "train")
    assert len(train) == 10
    for size, split in ((11, "valid"), (12, "test")):
        pairs = read_split(config.data, split)
        assert (pairs is None) if getattr(config.data, split) == "" else (len(pairs) == size)
    train_tokenizers(config, train).check_fits(config.model)


def test_english_french_captions_use_the_english_german_settings():
    for form in ("raw", "bpe10k"):
        german, french = recipe(f"multi30k_en_de:{form}").flat(), recipe(f"multi30k_en_fr:{form}").flat()
        differing = {field for field in french if french[field] != german[field]}
        assert differing <= {"model.vocab_size", "data.directory", "data.target_language"}
    with pytest.raises(UserError, match="no recipe 'tok'; legal: raw, bpe10k"):
        recipe("multi30k_en_fr:tok")


def test_tiny_corpus_is_memorized(tmp_path, on_one_device):
    config = recipe("toy_pairs")
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, num_steps=50))  # half of them
    outcome = commands.train(config, tmp_path / "run")
    assert outcome.test["exact_match"] == 100
    pairs = read_split(config.data, "train")
    assert len(pairs) == 6
    assert Translator.load(tmp_path / "run").translate(list(pairs.source)) == list(pairs.target)


@pytest.mark.parametrize("name", ["copy_task", "parsing_wsj"])
def test_unknown_size_is_rejected_with_the_valid_ones(name):
    with pytest.raises(UserError, match="no recipe 'huge'; legal: "):
        recipe(f"{name}:huge")
