"""The commands import and export: translations, safe replacement of folders, and rejection of unsafe files."""

import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from interop_cases import Malicious, assert_same_trees

from transformer_jax import cli
from transformer_jax import run as commands
from transformer_jax.checkpoint.checkpoint import checkpoint_steps, load_params
from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, DataConfig, DecodingConfig, ModelConfig, TokenizerConfig, TrainingConfig
from transformer_jax.decoding.translator import Translator
from transformer_jax.evaluation import evaluate as score_commands
from transformer_jax.interop.convert import export_run, import_run
from transformer_jax.model.transformer import abstract_params
from transformer_jax.types import UserError

TEXTS = ["twenty-one", "three hundred and four", "", "nine thousand"]


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return a run of two steps, with settings that every format can express."""
    path = tmp_path_factory.mktemp("interop") / "run"
    config = Config(
        model=ModelConfig(vocab_size=300, d_model=16, num_heads=2, num_layers=1, d_ff=24, norm_epsilon=1e-5),
        data=DataConfig(
            source="numbers",
            synthetic_train_size=60,
            synthetic_valid_size=4,
            synthetic_test_size=4,
            batch_tokens=512,
            max_shapes=1,
        ),
        tokenizer=TokenizerConfig(kind="bpe"),
        training=TrainingConfig(num_steps=2, schedule="constant", peak_learning_rate=0.05, warmup_steps=1),
        decoding=DecodingConfig(beam_size=2, length_penalty="power", alpha=1.0, max_length_offset=8),
    )
    commands.train(config, path)
    return path


def command(*args):
    return cli.main([*map(str, args), "--no-malloc-tuning"])


def params_of(run):
    folder = RunDir(run)
    return load_params(
        folder.checkpoints / str(checkpoint_steps(folder)[-1]), abstract_params(folder.load_config().model)
    )


@pytest.mark.parametrize("target", ["safetensors", "torch"])
def test_export_then_import_is_bit_identical(target, run, tmp_path, capsys, optional_package):
    optional_package("torch" if target == "torch" else "safetensors")
    assert command("export", run, "--to", target, "--output", tmp_path / "out") == 0
    assert command("import", "--from", target, tmp_path / "out", "--output", tmp_path / "back") == 0
    assert_same_trees(params_of(tmp_path / "back"), params_of(run))
    assert Translator.load(tmp_path / "back").translate(TEXTS) == Translator.load(run).translate(TEXTS)
    assert score_commands.evaluate(tmp_path / "back")["bleu"] == score_commands.evaluate(run)["bleu"]
    assert f"{tmp_path / 'out'}: config.json, exported.json, model." in capsys.readouterr().out


def test_an_imported_run_is_fine_tuned(run, tmp_path, capsys):
    import_run(export_run(run, "safetensors", tmp_path / "out"), "safetensors", tmp_path / "back")
    assert command("train", tmp_path / "back" / "config.json", "--workdir", tmp_path / "back") == 1
    assert "is an imported model and cannot be trained" in capsys.readouterr().err
    tuned = tmp_path / "tuned"
    start = ("--training.init-from", tmp_path / "back", "--training.num-steps", 1)
    assert command("train", tmp_path / "back" / "config.json", "--workdir", tuned, *start) == 0
    leaves = zip(jax.tree.leaves(params_of(tuned)), jax.tree.leaves(params_of(run)), strict=True)
    differences = [float(np.abs(np.asarray(one) - np.asarray(other)).max()) for one, other in leaves]
    assert 0 < max(differences) <= 0.051  # one Adam step of rate 0.05 from the imported parameters
    assert export_run(tuned, "safetensors", tmp_path / "again").is_dir()


def test_bare_state_dict_requires_configuration_and_tokenizer(run, tmp_path, capsys, optional_package):
    optional_package("torch")
    export_run(run, "torch", tmp_path / "out")
    bare = tmp_path / "bare.pt"
    shutil.copy(tmp_path / "out" / "model.pt", bare)
    start = ("import", "--from", "torch", bare, "--output", tmp_path / "new")
    assert command(*start) == 1
    assert "stores no tokenizer. Pass a run's folder or a tokenizer.json with --tokenizer" in capsys.readouterr().err
    assert command(*start, "--tokenizer", run) == 1
    error = capsys.readouterr().err
    assert "the tensors determine vocab_size=300, source_vocab_size=None, d_model=16, num_layers=1, d_ff=24" in error
    assert "but not num_heads, source_bos, norm_position, activation, scale_embeddings, positions" in error
    assert "Pass --num-heads (the number of attention heads); --source-bos (" in error
    assert not (tmp_path / "new").exists()
    assert command(*start, "--config", run / "config.json", "--tokenizer", run) == 0
    assert_same_trees(params_of(tmp_path / "new"), params_of(run))


def test_containers_of_training_scripts_are_opened(run, tmp_path, optional_package):
    torch = optional_package("torch")
    folder = export_run(run, "torch", tmp_path / "out")
    state = torch.load(folder / "model.pt", weights_only=True)
    torch.save({"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {}}, folder / "model.pt")
    import_run(folder, "torch", tmp_path / "new")
    assert_same_trees(params_of(tmp_path / "new"), params_of(run))


def test_output_is_replaced_only_if_it_is_an_earlier_one(run, tmp_path):
    out = export_run(run, "safetensors", tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"is not empty\. Choose another output, or replace it with --overwrite"):
        export_run(run, "safetensors", out)
    export_run(run, "safetensors", out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    (out / "thesis.tex").write_text("years of work")
    (out / "exported.json").unlink()
    with pytest.raises(UserError, match="exists and is not an exported model"):
        export_run(run, "safetensors", out, overwrite=True)
    assert (out / "thesis.tex").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="exists and is not an exported model"):
        export_run(run, "safetensors", tmp_path / "file", overwrite=True)
    with pytest.raises(UserError, match="below: cannot be written"):
        export_run(run, "safetensors", tmp_path / "file" / "below")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
    with pytest.raises(UserError, match="exists and is not an imported run"):
        import_run(out, "safetensors", run, overwrite=True)
    import_run(out, "safetensors", tmp_path / "back")
    with pytest.raises(UserError, match="is not empty"):
        import_run(out, "safetensors", tmp_path / "back")
    import_run(out, "safetensors", tmp_path / "back", overwrite=True)
    assert json.loads((tmp_path / "back" / "imported.json").read_text())["from"] == "safetensors"


def test_failed_replacement_keeps_the_old_output(run, tmp_path, monkeypatch):
    out = export_run(run, "safetensors", tmp_path / "out")
    before = (out / "model.safetensors").read_bytes()
    rename = Path.rename

    def fail(self, target):
        if self.name.endswith(".unfinished"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match=r"cannot be written: No space left"):
        export_run(run, "safetensors", out, overwrite=True)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_configuration_is_inferred_from_the_tensors(run, tmp_path, optional_package):
    optional_package("torch")
    export_run(run, "torch", tmp_path / "out")
    (tmp_path / "out" / "config.json").unlink()
    stated = ("--num-heads", 2, "--source-bos", "False", "--norm-position", "post", "--activation", "relu")
    stated += ("--scale-embeddings", "True", "--positions", "interleaved")
    assert command("import", "--from", "torch", tmp_path / "out", "--output", tmp_path / "new", *stated) == 0
    found, expected = (RunDir(path).load_config().model for path in (tmp_path / "new", run))
    # A torch export always has attention biases, here of zeros.
    assert found == dataclasses.replace(expected, attention_bias=False)
    assert_same_trees(params_of(tmp_path / "new"), params_of(run))


WRITE = """
import sys
from transformer_jax.interop import convert
from transformer_jax.types import UserError

print("ready", flush=True)
sys.stdin.readline()
original = getattr(convert.TokenizerPair, "save")

def slow(self, folder):
    original(self, folder)
    print("writing", flush=True)
    sys.stdin.readline()

convert.TokenizerPair.save = slow
try:
    function = convert.import_run if sys.argv[1] == "import" else convert.export_run
    function(sys.argv[2], "safetensors", sys.argv[3])
    print("done", flush=True)
except UserError as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("direction", ["export", "import"])
def test_of_two_commands_with_one_output_exactly_one_succeeds(direction, run, tmp_path):
    origin = run if direction == "export" else export_run(run, "safetensors", tmp_path / "exported")
    output = tmp_path / "out"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITE, direction, str(origin), str(output)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    first, second = processes
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2

    def proceed(process):
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    assert proceed(first) == "writing"
    assert proceed(second) == f"{output}: another process is writing it; choose another output"
    assert proceed(first) == "done"
    for process in processes:
        process.communicate(timeout=60)
    if direction == "export":
        export_run(run, "safetensors", tmp_path / "other")
        assert (output / "model.safetensors").read_bytes() == (tmp_path / "other" / "model.safetensors").read_bytes()
    else:
        assert_same_trees(params_of(output), params_of(run))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


DAMAGE = {
    "truncated": lambda file, **_: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "noise": lambda file, **_: file.write_bytes(bytes(range(256)) * 20),
    "empty": lambda file, **_: file.write_bytes(b""),
    "pickle": lambda file, malicious, **_: file.write_bytes(pickle.dumps({"a": malicious})),
    "torch pickle": lambda file, malicious, torch: torch.save({"a": malicious}, file),
    "a list": lambda file, torch, **_: torch.save([1, 2], file),
    "no tensors": lambda file, torch, **_: torch.save({"lr": 0.1, "name": "x"}, file),
}


@pytest.mark.parametrize("target", ["torch", "safetensors"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_or_malicious_file_is_rejected(kind, target, run, tmp_path, optional_package, capsys):
    torch = optional_package("torch")
    folder = export_run(run, target, tmp_path / "out")
    (file,) = folder.glob("model.*")
    DAMAGE[kind](file, malicious=Malicious(tmp_path / "made"), torch=torch)
    assert command("import", "--from", target, folder, "--output", tmp_path / "new") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}")
    assert error.count("\n") == 1
    assert not (tmp_path / "made").exists()
    assert not (tmp_path / "new").exists()


def test_wrong_shapes_are_all_listed(run, tmp_path, capsys):
    folder = export_run(run, "safetensors", tmp_path / "out")
    config = Config.load(folder / "config.json").with_changes(model={"d_ff": 25})
    (folder / "config.json").write_text(config.to_json())
    assert command("import", "--from", "safetensors", folder, "--output", tmp_path / "new") == 1
    error = capsys.readouterr().err
    assert error.count("has shape") == 6  # kernel of both products and bias of one, in two layers
    assert "decoder/layer_0/feed_forward/outer/kernel has shape [24, 16], not [25, 16]" in error


def test_tokenizer_of_another_size_is_rejected(run, tmp_path, capsys):
    folder = export_run(run, "safetensors", tmp_path / "out")
    (folder / "tokenizer" / "joint.json").write_text(json.dumps({"kind": "word", "vocabulary": ["w"] * 400}))
    assert command("import", "--from", "safetensors", folder, "--output", tmp_path / "new") == 1
    assert "the source tokenizer has 400 entries and the model's table 300 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("import --from marian nowhere --output x", "nowhere: no such file or folder"),
        ("import --from fairseq . --output x --mapping m", "the format fairseq has no use for mapping"),
        ("export nowhere --to torch --output x", "nowhere is not a run"),
    ],
)
def test_wrong_arguments_are_rejected(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(*args.split()) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
