"""The command line: flags, streams, exit statuses and error messages."""

import ast
import json
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from command_line import plain
from processes import xla_flags

from transformer_jax import run as commands
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.cli.parsing import RENAMED_FLAGS
from transformer_jax.decoding.translator import Hypothesis, Translator
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.training.loop import Outcome

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def loads(monkeypatch):
    """Record the calls of `Translator.load`, whose translator reverses each line."""
    seen = []

    def load(run, ensemble=(), **decoding):
        seen.append((Path(run), decoding))
        return types.SimpleNamespace(
            translate_n_best=lambda texts, n, **_: [[Hypothesis(text[::-1], 0.0, 0.0, 1)] for text in texts]
        )

    monkeypatch.setattr(Translator, "load", load)
    return seen


@pytest.fixture
def trains(monkeypatch):
    """Record the calls of `commands.train`."""
    seen = []
    monkeypatch.setattr(commands, "train", lambda *given, **flags: seen.append((*given, flags)) or Outcome(0))
    return seen


# ------------------------------------------------------------------------------------------------------------- train


def test_train_takes_a_recipe_and_its_default_folder(cli, trains, tiny, monkeypatch):
    monkeypatch.chdir(tiny.folder)
    assert cli("train", "tiny.py").status == 0
    assert cli("train", "tiny.py:wide", "--workdir", "elsewhere").status == 0
    assert cli("train", "tiny.py:wide").status == 0
    assert cli("train", "--profile", "--strict").status == 0
    configs, workdirs, flags = zip(*trains, strict=True)
    assert [str(path) for path in workdirs] == ["runs/tiny", "elsewhere", "runs/tiny-wide", "runs/numbers"]
    assert flags == (*[{"profile": False, "strict": False}] * 3, {"profile": True, "strict": True})
    assert [config.model.d_ff for config in configs[:3]] == [32, 48, 48]
    assert configs[3].data.source == "numbers"


@pytest.mark.parametrize(
    "args",
    [
        ["--strict", "tiny.py:wide"],
        ["--deterministic", "tiny.py:wide", "--strict"],
        ["--training.num-steps", "4", "--strict", "tiny.py:wide"],
        ["--training.mesh-data", "-1", "tiny.py:wide", "--strict"],
        ["--training.num_steps=4", "--no_compilation_cache", "--strict", "tiny.py:wide"],
        ["--decoding.forbidden-ids", "5", "6", "--strict", "tiny.py:wide"],
        ["--strict", "--", "tiny.py:wide"],
    ],
    ids=" ".join,
)
def test_train_finds_the_recipe_after_flags(cli, trains, tiny, monkeypatch, args):
    monkeypatch.chdir(tiny.folder)
    done = cli("train", *args)
    assert (done.status, done.err) == (0, "")
    ((config, workdir, flags),) = trains
    assert (config.model.d_ff, str(workdir), flags["strict"]) == (48, "runs/tiny-wide", True)


def test_every_section_has_its_flags(cli, trains, tiny):
    flags = {
        "--model.d-ff": "64",
        "--model.final-norm": "True",  # a value, as for every other field
        "--model.scale-embeddings": "False",
        "--data.valid": "",
        "--tokenizer.min-frequency": "2",
        "--training.num-steps": "7",
        "--training.clip-norm": "1",
        "--decoding.beam-size": "3",
    }
    done = cli("train", tiny.folder / "tiny.py", *(word for pair in flags.items() for word in pair))
    assert done.status == 0, done.err
    config = trains[0][0]
    assert (config.model.d_ff, config.model.final_norm, config.model.scale_embeddings) == (64, True, False)
    assert (config.data.valid, config.tokenizer.min_frequency, config.decoding.beam_size) == ("", 2, 3)
    assert (config.training.num_steps, config.training.clip_norm) == (7, 1.0)
    assert config.model.d_model == 16, "the recipe's"


def test_rerunning_a_finished_run_prints_its_exact_match(cli, tiny, monkeypatch):
    monkeypatch.chdir(tiny.folder)
    config = tiny.config.data.directory
    done = cli("train", "tiny.py", "--data.directory", config)
    assert done.status == 0
    assert re.fullmatch(r"exact match \d+\.\d\d %", done.out.splitlines()[-1])
    assert done.err == "runs/tiny is finished: step 4 of 4\n"


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--model.num-head", "4"], 2, "Perhaps you meant: --model.decoder-num-heads {None}|INT"),
        (["--model.num-head", "4"], 2, "--model.num-heads INT"),
        (["--model.activation", "tanh"], 2, "Expected one of ('relu', 'gelu', 'swish')"),
        (["--model.d-ff", "many"], 2, "many"),
        (
            ["--model.num-heads", "3"],
            2,
            "model.num_heads=3 does not divide model.d_model=16. Change one of them, or set --model.d-k",
        ),
        (["--model.vocab-size", "0"], 2, "model.vocab_size is 0; it must be at least 1"),
        (
            ["--tokenizer.joint", "False"],
            2,
            "model.tie_embeddings='all' needs a joint vocabulary, not tokenizer.joint=False",
        ),
        (["--model.d-ff", "64"], 1, "holds a run with another configuration: model.d_ff 32 -> 64"),
        (["--workdir", "tiny.py"], 1, "error: tiny.py exists and is not a run"),
        (["--workdir", "tiny.py/below"], 1, "error: cannot make the run folder tiny.py/below: Not a directory"),
        (["--workdir", "corpus"], 1, "error: corpus exists and is not a run"),
        (["--workdir", "new", "--training.init-from", "none"], 1, "error: none is not a run"),
    ],
)
def test_user_errors_are_reported_without_a_traceback(cli, tiny, monkeypatch, args, status, message):
    monkeypatch.chdir(tiny.folder)
    done = cli("train", "tiny.py", *args)
    assert done.status == status
    assert message in plain(done.err)
    assert "Traceback" not in done.err
    assert done.out == ""
    if status == 1:
        assert len(done.err.splitlines()) == 1


def test_missing_recipe_is_reported_with_the_fix(cli):
    assert cli("train", "nowhere.py")[:2] == (1, "")
    assert "nowhere.py: no such recipe" in cli("train", "nowhere.py").err


def test_traceback_is_shown_for_defects_and_on_request(cli, monkeypatch):
    done = cli("translate", "nowhere", "--traceback")
    assert done.status == 1
    assert "Traceback (most recent call last)" in done.err
    assert done.err.splitlines()[-1].startswith("error: nowhere is not a run")

    def fails(*_, **__):
        raise RuntimeError("the sky fell\nand more")

    monkeypatch.setattr(score_commands, "average", fails)
    done = cli("average", "nowhere")
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith("Traceback (most recent call last)"), "of a defect"
    assert done.err.splitlines()[-1] == "error: RuntimeError: the sky fell"


def test_commands_and_help(cli):
    assert cli("--help").status == 0
    for name in ("train", "translate", "evaluate", "average"):
        assert name in cli("-h").out
        done = cli(name, "--help")
        assert done.status == 0
        assert done.err == ""
    unknown = cli("trian")
    assert unknown.status == 2
    assert "Available subcommands: train, translate, evaluate, score, average" in plain(unknown.err)
    assert cli("translate").status == cli("evaluate").status == cli("average").status == 2


def test_help_of_a_recipe_documents_every_field_in_five_seconds(tmp_path):
    """The help works in a folder without data, and contains the docstring of each field in config.py."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, str(ROOT / "train.py"), str(ROOT / "configs" / "multi30k_en_de.py"), "--help"]
    start, before = time.monotonic(), os.times()
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    after = os.times()
    # CPU time excludes other processes on the machine.
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert min(used, time.monotonic() - start) < 5
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())
    text = plain(done.stdout)
    sections = {"ModelConfig": "model", "DataConfig": "data", "TokenizerConfig": "tokenizer"}
    sections |= {"TrainingConfig": "training", "DecodingConfig": "decoding"}
    fields = 0
    for node in ast.parse((ROOT / "transformer_jax" / "config.py").read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in sections:
            for field, doc in zip(node.body, node.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign):
                    assert isinstance(doc, ast.Expr), f"{field.target.id} has no docstring"
                    flag = f"--{sections[node.name]}.{field.target.id.replace('_', '-')}"
                    assert f"{flag} " in text
                    assert " ".join(doc.value.value.split()) in text, f"{flag} does not say what it is"
                    fields += 1
    assert fields > 90
    assert "--workdir" in text


# --------------------------------------------------------------------------------------------------------- translate


def test_translate_writes_one_line_per_input_line(cli, tiny):
    lines = [b"the dog", b"", b"   ", b"red\r", b"a\xc2\x85b \xe2\x80\xa8 c\x0b\x0c\x1c d", b"x\x00y", b"last"]
    done = cli("translate", tiny.run, "--max-length-offset", "1", stdin=b"\n".join(lines))
    assert (done.status, done.err) == (0, "")
    translations = done.out.split("\n")
    assert translations.pop() == "", "the last line is ended too"
    assert len(translations) == 7
    assert translations[1] == translations[2] == ""
    assert translations == Translator.load(tiny.run, max_length_offset=1).translate(
        ["the dog", "", "", "red", "a\x85b \u2028 c\x0b\x0c\x1c d", "x\x00y", "last"]
    )


def test_only_a_newline_ends_a_line(cli, loads, tmp_path):
    done = cli("translate", tmp_path, stdin="\ufeffab\r\n\u2028c\x85\r\r\n\ncd".encode())
    assert done.out == "ba\n\r\x85c\u2028\n\ndc\n"
    assert cli("translate", tmp_path, stdin=b"a\n\n").out == "a\n\n"


@pytest.mark.filterwarnings("default")
def test_invalid_utf8_becomes_u_fffd_with_a_warning(cli, loads, tmp_path):
    done = cli("translate", tmp_path, stdin=b"ab\nc\xffd\n\xc3\n\xf0\x9f\x98\n")
    assert done.status == 0
    assert done.out == "ba\nd\ufffdc\n\ufffd\n\ufffd\n"
    assert done.err.splitlines() == [
        "warning: line 2 is not UTF-8 at byte 2: read as U+FFFD",
        "warning: line 3 is not UTF-8 at byte 1: read as U+FFFD",
        "warning: line 4 is not UTF-8 at byte 1: read as U+FFFD",
    ]


def test_empty_input_gives_empty_output(cli, tiny):
    assert cli("translate", tiny.run) == (0, "", "")


FLAGS = {
    "--beam-size": ("2", "beam_size", 2),
    "--alpha": ("1.5", "alpha", 1.5),
    "--length-penalty": ("power", "length_penalty", "power"),
    "--stopping": ("ctranslate2", "stopping", "ctranslate2"),
    "--max-length-offset": ("7", "max_length_offset", 7),
    "--checkpoint": ("best", "checkpoint", "best"),
    "--batch-tokens": ("99", "batch_tokens", 99),
}


def test_translate_flags_in_any_order_change_only_their_fields(cli, loads, tiny):
    for flag, (text, field, value) in FLAGS.items():
        assert cli("translate", tiny.run, flag, text).status == 0
        assert cli("translate", flag, text, tiny.run).status == 0
        assert cli("translate", f"{flag}={text}", tiny.run).status == 0
        assert loads[-3:] == [(tiny.run, {field: value})] * 3
    every = [word for flag, (text, _, _) in FLAGS.items() for word in (flag, text)]
    assert cli("translate", *every[:6], tiny.run, *every[6:]).status == 0
    assert loads[-1] == (tiny.run, {field: value for _, field, value in FLAGS.values()})
    assert cli("translate", tiny.run).status == 0
    assert loads[-1] == (tiny.run, {})


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--beam-size", "0"], 2, "decoding.beam_size is 0; it must be at least 1"),
        (["--alpha", "-1"], 2, "decoding.alpha is -1.0; it must be at least 0"),
        (["--length-penalty", "x"], 2, "invalid choice 'x' for argument '--length-penalty'. Expected one of ("),
        (["--stopping", "x"], 2, "invalid choice 'x' for argument '--stopping'. Expected one of ("),
        (["--max-length-offset", "-1"], 2, "decoding.max_length_offset is -1; it must be at least 0"),
        (["--batch-tokens", "0"], 2, "decoding.batch_tokens is 0; it must be at least 1"),
        (["--checkpoint", "newest"], 2, "must be last, best, average or the number of a step"),
        (["--checkpoint", "3"], 1, "no checkpoint '3'; there are last, best, average and the steps 2, 4"),
        (["--checkpoint", "average"], 1, "has no averaged checkpoint: make one with `average"),
        (["--beam-siz", "2"], 2, "Perhaps you meant: --beam-size {None}|INT"),
    ],
)
def test_invalid_flags_of_translate_are_rejected(cli, tiny, args, status, message):
    done = cli("translate", tiny.run, *args, stdin=b"the dog\n")
    assert (done.status, done.out) == (status, "")
    assert message in plain(done.err)


def test_help_of_translate_states_that_defaults_come_from_the_run(cli, tiny):
    text = plain(cli("translate", tiny.run, "--help").out)
    assert re.search(r"--max-length-offset \{None\}\|INT .*?\(default: the run's own\)", text)


@pytest.mark.parametrize(
    ("flags", "value"), [([], True), (["--renormalize-logits"], True), (["--no-renormalize-logits"], False)]
)
def test_flag_can_disable_a_setting_of_the_run(cli, tiny, tmp_path, flags, value, monkeypatch):
    run = tiny.copy(tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["decoding"]["renormalize_logits"] = True
    RunDir(run).write("config.json", json.dumps(config))
    seen, load = [], Translator.load
    monkeypatch.setattr(Translator, "load", lambda *args, **options: seen.append(load(*args, **options)) or seen[-1])
    stdin = b"the dog\nthe red house\n"
    done = cli("translate", run, "--max-length-offset", "1", "--format", "jsonl", *flags, stdin=stdin)
    assert (done.status, done.err) == (0, "")
    assert seen[0].config.decoding.renormalize_logits is value
    expected = load(run, max_length_offset=1, renormalize_logits=value).translate_n_best(
        ["the dog", "the red house"], 1
    )
    scores = [json.loads(line)["translations"][0]["score"] for line in done.out.splitlines()]
    assert scores == pytest.approx([found[0].score for found in expected], rel=1e-5)


@pytest.mark.parametrize("flag", RENAMED_FLAGS)
def test_old_flags_are_rejected_with_the_new_name(cli, tiny, flag):
    new = RENAMED_FLAGS[flag]
    command = ["train", "tiny.py"] if "." in flag else ["translate", str(tiny.run)]
    done = cli(*command[:1], *([tiny.folder / "tiny.py"] if "." in flag else [tiny.run]), flag, "3")
    assert (done.status, done.out) == (2, "")
    assert done.err.splitlines()[-1] == f"{flag} is now {new}"
    helped = plain(cli(command[0], "--help").out)
    assert f"{new} " in helped, "the new name is a flag"


def test_global_options_are_accepted_anywhere_except_as_values(cli, loads, tmp_path):
    assert cli("--traceback", "translate", tmp_path).status == 0
    assert cli("translate", "--traceback", tmp_path).status == 0
    assert cli("translate", tmp_path, "--prefix=--traceback").status == 0
    assert cli("translate", tmp_path, "--prefix", "--traceback").status == 2, "the value is missing"


def test_global_option_ends_the_values_of_another_option(cli, monkeypatch):
    seen = []
    monkeypatch.setattr(score_commands, "evaluate_runs", lambda runs, *_, **options: seen.append((runs, options)) or [])
    assert cli("evaluate", "--ensemble", "one", "--no-compilation-cache", "run").status == 0
    ((runs, options),) = seen
    assert (runs, options["ensemble"]) == ((Path("run"),), (Path("one"),))


@pytest.mark.parametrize("flag", ["--deterministic=True", "--no-malloc-tuning=1", "--no_compilation_cache=False"])
def test_global_option_with_a_value_is_rejected(cli, loads, tmp_path, flag):
    done = cli("translate", tmp_path, flag)
    assert done.status == 2
    assert f"{flag.partition('=')[0]} takes no value" in done.err


def in_a_process(*args, **options):
    """Run the command in a separate process with one device, in which warnings are not errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": xla_flags(1)}
    code = "import sys; from transformer_jax.cli import main; sys.exit(main())"
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], env=environment, timeout=300, **options)


@pytest.mark.filterwarnings("ignore")
def test_translate_process_writes_only_translations_to_stdout(tiny):
    done = in_a_process(
        "translate", tiny.run, "--max-length-offset", "1", input=b"the dog\n\n\xff\n", capture_output=True
    )
    assert done.returncode == 0
    expected = Translator.load(tiny.run, max_length_offset=1).translate(["the dog", "", "\ufffd"])
    assert done.stdout.decode().split("\n") == [*expected, ""]
    assert done.stderr.decode().splitlines() == ["warning: line 3 is not UTF-8 at byte 1: read as U+FFFD"]


def test_full_disk_is_reported_in_one_line(tiny):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "wb") as full:
        done = in_a_process("average", tiny.run, "--help", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr.decode()
    assert done.stderr.decode().splitlines()[0].startswith("error: No space left on device")
