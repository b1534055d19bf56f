"""`transformer-jax parsing`: trees, sentence pairs, a run, and F1."""

import dataclasses
import gzip
import json
import types
from pathlib import Path

import pytest
from command_line import plain

from transformer_jax import run as commands
from transformer_jax.config import Config
from transformer_jax.decoding.translator import Translator
from transformer_jax.experiments.parsing.bracketing import score_brackets
from transformer_jax.experiments.parsing.command import prepare, score
from transformer_jax.experiments.parsing.trees import read_trees
from transformer_jax.presets import load_recipe
from transformer_jax.testing import one_device_mesh
from transformer_jax.types import UserError

RECIPE = str(Path(__file__).resolve().parents[3] / "configs" / "parsing_wsj.py")

TREES = """
( (S (NP-SBJ (DT The) (NN dog)) (VP (VBZ runs) (ADVP-MNR (RB fast))) (. .)) )
((S (NP-SBJ (PRP It))
    (VP (VBZ barks) (SBAR (-NONE- 0) (S (-NONE- *T*-1)))) (. .)))
((NP (-NONE- *)))
"""


@pytest.fixture
def wsj(tmp_path):
    """Return a folder written by `prepare`, with two trees for training and two for validation."""
    (tmp_path / "a.mrg").write_text(TREES)
    (tmp_path / "b.mrg.gz").write_bytes(gzip.compress(TREES.encode()))
    prepare({"train": [tmp_path / "a.mrg"], "valid": [tmp_path / "b.mrg.gz"]}, tmp_path / "wsj", lambda line: None)
    return tmp_path / "wsj"


def config_of(folder: Path) -> Config:
    """Return the small recipe with a smaller model."""
    config = load_recipe(f"{RECIPE}:small")
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        data=dataclasses.replace(config.data, directory=str(folder), max_length=64, batch_tokens=128, max_shapes=1),
        training=dataclasses.replace(config.training, num_steps=2, num_samples=0, validate_every=2),
        decoding=dataclasses.replace(config.decoding, beam_size=2, max_length_offset=20),
    )


@pytest.fixture
def parses(monkeypatch, wsj):
    """Return `parses(line, ...)`, which makes every run parse the validation split into these lines."""

    def put(*lines):
        config = config_of(wsj)
        fake = types.SimpleNamespace(config=config, translate=lambda texts: list(lines[: len(texts)]))
        monkeypatch.setattr(Translator, "load", lambda run, **decoding: fake)

    return put


def test_prepare_writes_sentence_pairs(cli, tmp_path):
    (tmp_path / "a.mrg").write_text(TREES)
    done = cli("parsing", "prepare", "--train", tmp_path / "a.mrg", tmp_path / "a.mrg", "--output", tmp_path / "wsj")
    assert done.status == 0, done.err
    assert done.out.startswith(f"{tmp_path}/wsj/train.words and .tree: 4 trees, 2 without words left out; ")
    assert "at most 5 words and 13 tokens of a tree, 14 different ones" in done.out
    assert (tmp_path / "wsj" / "train.words").read_text() == "The dog runs fast .\nIt barks .\n" * 2
    assert (tmp_path / "wsj" / "train.tree").read_text().splitlines()[:2] == [
        "(S (NP DT NN )NP (VP VBZ (ADVP RB )ADVP )VP . )S",
        "(S (NP PRP )NP (VP VBZ )VP . )S",
    ]
    assert len(list((tmp_path / "wsj").iterdir())) == 2, "no split that was not named"


def test_f1_by_hand(parses, cli, tmp_path):
    # In the first parse, VP is not closed and the adverb is missing. The second parse is not a tree.
    parses("(S (NP DT NN )NP (VP VBZ", "PRP VBZ <unk>")
    result = score(tmp_path / "run", output=tmp_path / "parses.mrg")
    # Missing words are attached to S: (VP (VBZ runs)) lacks one, so only S and NP are correct.
    expected = {"num_gold": 4 + 3, "num_predicted": 3, "num_matched": 2, "whole": 0, "repaired": 1, "failed": 1}
    assert result.items() >= expected.items()
    assert result["f1"] == pytest.approx(100 * 2 * 2 / (7 + 3))
    parsed = read_trees(tmp_path / "parses.mrg")
    assert str(parsed[0]) == "(TOP (S (NP (DT The) (NN dog)) (VP (VBZ runs)) (RB fast) (. .)))"
    assert score_brackets(zip(parsed, parsed, strict=True)).f1 == 100
    done = cli("parsing", "score", tmp_path / "run")
    assert done.out.splitlines()[-1] == "F1 40.00"
    assert "2 parses: 0 whole trees, 1 repaired, 1 failed; 0.00 % equal the gold tree" in done.out
    assert json.loads(cli("parsing", "score", tmp_path / "run", "--json").out) == score(tmp_path / "run")


def test_gold_trees_score_100(parses, wsj, tmp_path):
    parses(*(wsj / "valid.tree").read_text().splitlines())
    result = score(tmp_path / "run")
    assert (result["f1"], result["complete_match"], result["whole"]) == (100, 100, 2)


def test_invalid_files_are_rejected(parses, wsj, tmp_path):
    parses("", "")
    (wsj / "other.words").write_text("a b\n")
    (wsj / "other.tree").write_text("(S NN )S\n")
    with pytest.raises(UserError, match=r"other\.tree, line 1: not a tree over the words of its sentence"):
        score(tmp_path / "run", "other")
    with pytest.raises(UserError, match=r"no file .*test\.words"):
        score(tmp_path / "run", "test")
    (tmp_path / "empty.mrg").write_text("((NP (-NONE- *)))")
    with pytest.raises(UserError, match=r"empty\.mrg: no tree with a word in it"):
        prepare({"train": [tmp_path / "empty.mrg"]}, tmp_path / "new")
    with pytest.raises(UserError, match=r"a\.mrg.*: cannot be written"):
        prepare({"train": [tmp_path / "a.mrg"]}, tmp_path / "a.mrg")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Expected one of {prepare, score}"),
        (["train"], "Available subcommands: prepare, score"),
        (["prepare", "--output", "x"], "--train"),
        (["prepare", "--output", "x", "--train"], "--train names no file"),
        (["score"], "Missing from transformer-jax parsing score: RUN"),
    ],
)
def test_invalid_usage_is_reported(cli, args, message):
    done = cli("parsing", *args)
    assert (done.status, done.out) == (2, "")
    assert message in plain(done.err)
    assert cli("parsing", "--help").status == cli("parsing", "score", "--help").status == 0


@pytest.mark.filterwarnings("ignore:.*have an empty translation")  # after so few steps
def test_sample_trains_and_scores_f1(cli, data_folder, tmp_path, monkeypatch):
    """Every part works on twelve short real trees. Two steps teach the model nothing."""
    lines = [str(tree) for tree in read_trees(data_folder / "ptb-wsj-sample" / "wsj_0160-0179.dev.mrg.xz")]
    for name, count in (("train", 12), ("valid", 4)):
        (tmp_path / f"{name}.mrg").write_text("\n".join(sorted(lines, key=len)[:count]))
    prepare({name: [tmp_path / f"{name}.mrg"] for name in ("train", "valid")}, tmp_path / "wsj", lambda line: None)
    monkeypatch.setattr(commands, "make_mesh", lambda *_: one_device_mesh())  # compiles faster than eight
    commands.train(config_of(tmp_path / "wsj"), tmp_path / "run")
    done = cli("parsing", "score", tmp_path / "run", "--beam-size", "1", "--json")
    assert done.status == 0, done.err
    result = json.loads(done.out)
    assert result["num_sentences"] == 4 == result["whole"] + result["repaired"] + result["failed"]
    assert 0 <= result["f1"] <= 100
