"""`compare`: a parity report of two models with equal weights, layer by layer, in training and in search."""

import dataclasses
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from transformer_jax.checkpoint.run_dir import RunDir
from transformer_jax.config import Config, DecodingConfig, ModelConfig
from transformer_jax.decoding.decode import run_params
from transformer_jax.interop.convert import stated_config
from transformer_jax.interop.exchange import propose_config
from transformer_jax.interop.fairseq_format import read_fairseq
from transformer_jax.interop.marian_format import in_halves, read_marian
from transformer_jax.interop.tables import flatten, from_foreign, unflatten
from transformer_jax.interop.tensor_files import import_torch, read_tensors
from transformer_jax.interop.torch_format import state_dict_format
from transformer_jax.model.transformer import abstract_params
from transformer_jax.parity.report import (
    TOLERANCES,
    Difference,
    ParityReport,
    first_divergence,
    layer_differences,
    training_differences,
)
from transformer_jax.parity.suspects import find_cause
from transformer_jax.parity.this_side import Arrays, Side, convert_source, padded
from transformer_jax.presets import load_recipe
from transformer_jax.runtime.fields import require
from transformer_jax.types import Batch, Params

if TYPE_CHECKING:  # it imports torch
    from transformer_jax.parity.oracles import Oracle

AGAINST = ("torch", "annotated", "fairseq", "marian")
STEPS = 20
SCORE = 1e-4
KEY_BIASES = (
    "key biases are not compared after training: a key's bias never changes the softmax, so its gradient is "
    "rounding noise, which Adam turns into full steps"
)
DRIFT = (
    "in float32 the other parameters are shown but not judged, only losses are: a gradient that is nearly zero is "
    "rounding noise too"
)
SOURCE = (
    "the source is compared as ids, with model.source_bos={}: if translations still differ from those of the program "
    "that trained the weights, check whether its batches start the source with BOS (<s> source </s>)"
)


def compare(
    against: str,
    path: str | Path | None = None,
    config: str | Path | Config | None = None,
    dtype: str = "float32",
    **model_fields: object,
) -> ParityReport:
    """Compare this package's model with another implementation, both with equal weights.

    Args:
        against: Reference implementation: torch, annotated, fairseq or marian.
        path: A run, a state dict (torch, annotated), a checkpoint (fairseq) or a folder (marian). None: random weights.
        config: A recipe or a config.json for a state dict or random weights. None proposes a configuration from the
            tensors of the state dict, or takes a small model with the conventions of the reference.
        dtype: Dtype of both models, float32 or float64.
        **model_fields: Fields of `ModelConfig` that a state dict does not determine. They override `config`.

    Raises:
        UserError: torch or transformers is not installed, a file does not fit, or the reference cannot compute the
            model. The message names the fields.
    """
    for name, value, legal in (("against", against, AGAINST), ("dtype", dtype, tuple(TOLERANCES))):
        require(value in legal, f"{name} is {value!r}; legal: {', '.join(legal)}")
    import_torch(f"to compare with {against}")
    is_installed = against not in ("fairseq", "marian") or importlib.util.find_spec("transformers")
    require(is_installed, f"transformers is needed to compare with {against}: python -m pip install transformers")
    from transformer_jax.parity.peers import PEERS, make_oracle

    if config is not None and not isinstance(config, Config):
        config = load_recipe(str(config))
    folder, notes = None, list[str]()
    if path is None:
        config = (config or Config(model=PEERS[against].default)).with_changes(model=model_fields)
        params = random_params(config.model)
    else:
        path = Path(path)
        is_run = RunDir(path).checkpoints.is_dir()
        config, params = _load(against, path, is_run, config, model_fields)
        folder = path if against == "marian" and not is_run else None
    model = config.model
    if against == "marian" and model.positions == "interleaved":
        # Halves have equal columns in another order, for which the weights are reordered.
        model, params = dataclasses.replace(model, positions="halves"), in_halves(params, model.d_model)
        notes = ["Marian has model.positions='halves': the d_model axis was reordered from 'interleaved' to compare"]
    oracle = make_oracle(against, model, params, folder)
    if against in ("torch", "annotated"):
        notes += [SOURCE.format(model.source_bos)]
    report = compare_models(dataclasses.replace(config, model=model), params, oracle, dtype)
    return dataclasses.replace(report, notes=(*notes, *report.notes))


def _load(
    against: str, path: Path, is_run: bool, config: Config | None, model_fields: Mapping[str, object]
) -> tuple[Config, Params]:
    require(path.exists(), f"{path}: no such file or folder")
    if is_run or against in ("fairseq", "marian"):
        useless = ["--config"] if config is not None else []
        useless += [f"--{name.replace('_', '-')}" for name in model_fields]
        require(not useless, f"{path} stores the configuration of its model. Leave out {', '.join(useless)}")
        if not is_run:
            imported = (read_fairseq if against == "fairseq" else read_marian)(path)
            return imported.config, imported.params
        config = RunDir(path).load_config()
        return config, run_params(RunDir(path), config)
    config = stated_config(path, config, model_fields)
    tensors = read_tensors(path)
    table = state_dict_format(against, tensors)
    config = config or propose_config(tensors, table, None, model_fields, str(path))
    return config, from_foreign(tensors, table, config.model, str(path))


def compare_models(config: Config, params: Params, oracle: "Oracle", dtype: str = "float32") -> ParityReport:
    """Compare this package's model with an oracle on random sentences of different lengths, without dropout."""
    training = dataclasses.replace(  # the label smoothing and Adam's constants remain
        config.training, schedule="inverse_sqrt", peak_learning_rate=1e-3, warmup_steps=10, clip_norm=None
    )
    batches = random_batches(oracle.config, STEPS)
    side, oracle = Side(config.model, params), oracle.astype(dtype)
    layers, first, cause = compare_layers(side, oracle, batches[0], dtype)
    # float64 exists only in this mode; GPUs and TPUs multiply float32 in fewer bits unless told.
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        side = side.astype(dtype)
        ours = [batch._replace(src=convert_source(batch.src, oracle.config, config.model)) for batch in batches]
        trained = side.train(ours, training), oracle.train(batches, training)
        loss, gradients, trajectory = training_differences(*trained, dtype)
        greedy_equal, beam_equal, notes = _compare_search(side, oracle, batches[0].src, config.decoding)
    checks = {
        "loss": loss.ok,
        "gradients": all(item.ok for item in gradients),
        "trajectory": trajectory.ok,
        "greedy search": greedy_equal,
        "beam search": beam_equal,
    }
    if first is None and not all(checks.values()):
        first = next(name for name, ok in checks.items() if not ok)
        worst = [item.name for item in gradients if not item.ok] if first == "gradients" else []
        cause = f"all sub-layers agree; {' '.join([first, ', '.join(worst)]).strip()} differs"
    return ParityReport(
        ok=first is None,
        against=oracle.peer.name,
        dtype=dtype,
        layers=layers,
        first_divergence=first,
        cause=cause,
        loss=loss,
        gradients=gradients,
        trajectory=trajectory,
        greedy_equal=greedy_equal,
        beam_equal=beam_equal,
        notes=(*notes, KEY_BIASES + (f"; {DRIFT}" if dtype == "float32" else "")),
    )


def compare_layers(
    side: Side, oracle: "Oracle", batch: Batch, dtype: str = "float64"
) -> tuple[tuple[Difference, ...], str | None, str | None]:
    """Return the differences of all sub-layers, the name of the first divergence, and the likely cause.

    The first divergence is looked for in float64, because float32's rounding hides a wrong epsilon.
    """

    def differences(variant: Side, theirs: Arrays, dtype: str) -> tuple[Difference, ...]:
        ours = variant.sublayers(convert_source(batch.src, oracle.config, variant.config), batch.tgt_in)
        return layer_differences(ours, theirs, batch, side.config, dtype)

    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        exact, other = side.astype("float64"), oracle.astype("float64")
        theirs = other.sublayers(batch.src, batch.tgt_in)
        layers = differences(exact, theirs, "float64")
        first = first_divergence(layers)
        cause = find_cause(exact, other, layers, lambda variant: differences(variant, theirs, "float64"))
    if dtype == "float32":
        with jax.enable_x64(False), jax.default_matmul_precision("highest"):
            theirs = oracle.astype(dtype).sublayers(batch.src, batch.tgt_in)
            layers = differences(side.astype(dtype), theirs, dtype)
        if first is None and (first := first_divergence(layers)):
            cause = "rounding: in float64 both sides agree in every sub-layer"
    return layers, first, cause


def random_batches(config: ModelConfig, count: int) -> list[Batch]:
    """Return batches of one shape: padded sentences of random ordinary ids with different lengths."""
    generator = np.random.default_rng(0)
    special = {config.pad_id, config.bos_id, config.eos_id, config.unk_id}
    start, end = [config.bos_id] * config.source_bos, [config.eos_id] * config.source_eos
    sources, targets = (sorted(set(range(rows)) - special) for rows in (config.source_rows, config.vocab_size))

    def sentences(ids: list[int], lengths: list[int]) -> list[list[int]]:
        return [generator.choice(ids or [config.eos_id], length).tolist() for length in generator.permutation(lengths)]

    batches = []
    for _ in range(count):
        src, tgt = sentences(sources, [8, 6, 3, 1]), sentences(targets, [7, 5, 4, 2])
        rows = (
            [[*start, *row, *end] for row in src],
            [[config.start_id, *row] for row in tgt],
            [[*row, config.eos_id] for row in tgt],
        )
        batches.append(Batch(*(padded(side, config.pad_id) for side in rows)))
    return batches


def random_params(config: ModelConfig) -> Params:
    """Return random parameters with biases other than zero and scales other than one, as after some training."""
    generator = np.random.default_rng(0)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = generator.normal(size=shape)
        if path.endswith("kernel"):
            inputs = shape[:-1] if path.endswith("output/kernel") else shape[:1]
            return noise / math.sqrt(math.prod(inputs))
        return noise / math.sqrt(shape[1]) if path.endswith("table") else path.endswith("scale") + 0.1 * noise

    leaves = flatten(abstract_params(config))
    return unflatten({path: draw(path, leaf.shape).astype(np.float32) for path, leaf in leaves.items()})


def _compare_search(
    side: Side, oracle: "Oracle", src: np.ndarray, decoding: DecodingConfig
) -> tuple[bool, bool, list[str]]:
    """Return whether greedy search agrees, whether beam search agrees, and each difference of beam search."""
    limits = ((src != oracle.config.pad_id).sum(axis=1) + min(decoding.max_length_offset, 6)).tolist()
    our_src = convert_source(src, oracle.config, side.config)
    beam = dataclasses.replace(oracle.decoding(decoding), beam_size=max(decoding.beam_size, 2))
    greedy_equal, beam_equal, notes = True, True, list[str]()
    for setting in (dataclasses.replace(beam, beam_size=1), beam):
        found = side.search(our_src, limits, setting), oracle.search(src, limits, setting)
        for number, ((ours, our_score), (theirs, their_score)) in enumerate(zip(*found, strict=True), 1):
            if ours == theirs:
                continue
            if setting.beam_size == 1:
                greedy_equal = False
                continue
            is_tie = abs(our_score - their_score) <= SCORE
            beam_equal &= is_tie
            texts = f"{ours} ({our_score:.6f}) here, {theirs} ({their_score:.6f}) there"
            notes.append(f"beam search, sentence {number}: {texts}{': a tie' if is_tie else ''}")
    return greedy_equal, beam_equal, notes
