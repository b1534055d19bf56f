"""The parity report: two models with the same weights, compared layer by layer, in training and in search."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from transformer_jax.config import DecodingConfig, ModelConfig, TrainingConfig
from transformer_jax.interop.tables import flatten, unflatten
from transformer_jax.model.transformer import abstract_params
from transformer_jax.parity import this_side
from transformer_jax.parity.suspects import find_cause
from transformer_jax.parity.this_side import ALL_MASKS, Masks, Side
from transformer_jax.runtime.files import to_json
from transformer_jax.types import Batch, Params

if TYPE_CHECKING:  # it imports torch
    from transformer_jax.parity.oracles import Oracle

# Of sub-layers and the loss: the largest error, relative to max(1, the largest value).
FORWARD = {"float32": 1e-5, "float64": 1e-10}
# Of gradients: relative to the tensor's own largest, or else to the largest of all.
OWN_GRADIENT = {"float32": 1e-4, "float64": 1e-9}
ANY_GRADIENT = {"float32": 1e-5, "float64": 1e-10}
# Of a trajectory's losses, relative, and of the parameters after it, which in float32 decide nothing: see `DRIFT`.
LOSSES = {"float32": 1e-4, "float64": 1e-9}
PARAMETERS = {"float32": math.inf, "float64": 1e-9}
SCORE = 1e-4
STEPS = 20
KEY_BIASES = (
    "biases of keys are not compared after training: a key's bias never changes the softmax, so its gradient is "
    "rounding noise, which Adam turns into full steps"
)
DRIFT = (
    "in float32 the other parameters decide nothing, only losses do: where a gradient is nearly zero it is noise too"
)


@dataclass(frozen=True)
class Difference:
    """How far a tensor of one side is from that of the other; infinitely if only one side has it."""

    name: str
    max_abs: float
    max_rel: float
    """Relative to the largest value of the other side."""
    ok: bool


@dataclass(frozen=True)
class Loss:
    """The mean loss of a batch."""

    this: float
    other: float
    max_rel: float
    ok: bool


@dataclass(frozen=True)
class Trajectory:
    """Losses of training with the same batches and optimizer, and the parameters at its end."""

    this: tuple[float, ...]
    other: tuple[float, ...]
    max_rel: float
    parameters_max_abs: float
    """Biases of keys left out: see `KEY_BIASES`."""
    ok: bool


@dataclass(frozen=True)
class ParityReport:
    """What `compare` found."""

    ok: bool
    against: str
    dtype: str
    layers: tuple[Difference, ...]
    first_divergence: str | None
    cause: str | None
    loss: Loss
    gradients: tuple[Difference, ...]
    trajectory: Trajectory
    greedy_equal: bool
    beam_equal: bool
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """One JSON object on one line; numbers that are not finite are null."""
        fields = dataclasses.asdict(self)
        for name in ("against", "notes"):
            del fields[name]
        for name in ("layers", "gradients"):
            fields[name] = [{key: item[key] for key in ("name", "max_abs", "max_rel")} for item in fields[name]]
        return to_json(fields)


def compare_models(
    config: ModelConfig,
    params: Params,
    oracle: "Oracle",
    *,
    dtype: str = "float32",
    masks: Masks = ALL_MASKS,
    training: TrainingConfig | None = None,
    decoding: DecodingConfig | None = None,
    seed: int = 0,
) -> ParityReport:
    """Compares the model here with an oracle on random sentences of different lengths, dropout off.

    Sub-layers are compared in float64 too, whatever the dtype: a wrong epsilon hides in float32's rounding.

    Args:
        config: the model's configuration.
        params: its parameters.
        oracle: the other side.
        dtype: of both sides, float32 or float64.
        masks: masks to leave out on this side.
        training: label smoothing and Adam's constants; learning rates are a fixed warm-up to 1e-3.
        decoding: beam size, length penalty and alpha, where the oracle has them.
        seed: of the sentences.
    """
    training = dataclasses.replace(
        training or TrainingConfig(), schedule="inverse_sqrt", peak_learning_rate=1e-3, warmup_steps=10, clip_norm=None
    )
    decoding = oracle.decoding(decoding or DecodingConfig())
    batches = random_batches(config, STEPS, seed)
    side = Side(config, params, masks)
    layers, first, cause = compare_layers(side, oracle, batches[0], dtype)
    oracle = oracle.astype(dtype)
    # float64 exists only in this mode; GPUs and TPUs multiply float32 in fewer bits unless told.
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        side = side.astype(dtype)
        loss, gradients, trajectory = _compare_training(side, oracle, batches, training, dtype)
        greedy_equal, beam_equal, notes = _compare_search(side, oracle, batches[0].src, decoding)
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
        cause = f"all sub-layers agree; {first} {', '.join(worst)} differs".replace("  ", " ")
    notes += (KEY_BIASES + (f"; {DRIFT}" if dtype == "float32" else ""),)
    return ParityReport(
        ok=first is None,
        against=oracle.name,
        dtype=dtype,
        layers=layers,
        first_divergence=first,
        cause=cause,
        loss=loss,
        gradients=gradients,
        trajectory=trajectory,
        greedy_equal=greedy_equal,
        beam_equal=beam_equal,
        notes=notes,
    )


def compare_layers(
    side: Side, oracle: "Oracle", batch: Batch, dtype: str = "float64"
) -> tuple[tuple[Difference, ...], str | None, str | None]:
    """The differences of all sub-layers in a dtype, the name of the first that diverges, and the likely cause."""
    src, tgt_in = batch.src, batch.tgt_in
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        exact, theirs = side.astype("float64"), oracle.astype("float64").sublayers(src, tgt_in)

        def measure(variant: Side) -> tuple[Difference, ...]:
            return layer_differences(this_side.sublayers(variant, src, tgt_in), theirs, batch, side.config, "float64")

        layers = measure(exact)
        first = first_divergence(layers)
        cause = find_cause(exact, oracle, first, lambda variant: first_divergence(measure(variant))) if first else None
    if dtype == "float32":
        with jax.enable_x64(False), jax.default_matmul_precision("highest"):
            ours = this_side.sublayers(side.astype(dtype), src, tgt_in)
            theirs = oracle.astype(dtype).sublayers(src, tgt_in)
            layers = layer_differences(ours, theirs, batch, side.config, dtype)
        if first is None and (first := first_divergence(layers)):
            cause = "rounding: in float64 both sides agree in every sub-layer"
    return layers, first, cause


def first_divergence(layers: Sequence[Difference]) -> str | None:
    """The name of the first that is not ok."""
    return next((item.name for item in layers if not item.ok), None)


def layer_differences(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray], batch: Batch, config: ModelConfig, dtype: str
) -> tuple[Difference, ...]:
    """The differences in the order of the other side's forward pass; padded positions are left out."""
    src_counts, tgt_counts = batch.src != config.pad_id, batch.tgt_in != config.pad_id
    tgt_counts[:, 0] = True  # the start token may have the padding's id
    names = list(theirs)
    for name in ours.keys() - theirs.keys():  # a final norm that only this side has stands at the stack's end
        stack = name.partition("/")[0]
        names.insert(max(i for i, other in enumerate(names) if other.startswith(stack)) + 1, name)

    def differ(name: str) -> Difference:
        counts = src_counts if name.startswith("encoder/") else tgt_counts
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            return Difference(name, math.inf, math.inf, False)
        return difference(name, ours[name][counts], theirs[name][counts], FORWARD[dtype])

    return tuple(map(differ, names))


def difference(name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float) -> Difference:
    """The largest error; ok if it is within the tolerance times max(1, the largest value)."""
    with np.errstate(invalid="ignore"):
        error, largest = np.abs(ours - theirs).max(initial=0), np.abs(theirs).max(initial=0)
    if not np.isfinite(error):
        return Difference(name, math.inf, math.inf, False)
    relative = error / largest if largest else (math.inf if error else 0.0)
    return Difference(name, float(error), float(relative), bool(error <= tolerance * max(1, largest)))


def random_batches(config: ModelConfig, count: int, seed: int = 0) -> list[Batch]:
    """Batches of one shape: sentences of random ordinary ids and of different lengths, padded."""
    generator = np.random.default_rng(seed)
    special = {config.pad_id, config.bos_id, config.eos_id, config.unk_id}
    end = [config.eos_id] if config.source_eos else []
    sources, targets = (sorted(set(range(rows)) - special) for rows in (config.source_rows, config.vocab_size))

    def sentence(ids: list[int], length: int) -> list[int]:
        return generator.choice(ids or [config.eos_id], length).tolist()

    def padded(rows: list[list[int]]) -> np.ndarray:
        width = max(map(len, rows))
        return np.array([row + [config.pad_id] * (width - len(row)) for row in rows], np.int32)

    batches = []
    for _ in range(count):
        src = [sentence(sources, length) + end for length in generator.permutation([8, 6, 3, 1])]
        tgt = [sentence(targets, length) for length in generator.permutation([7, 5, 4, 2])]
        batches.append(
            Batch(
                padded(src),
                padded([[config.start_id, *row] for row in tgt]),
                padded([[*row, config.eos_id] for row in tgt]),
            )
        )
    return batches


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Parameters as of a model that has trained a little: biases are not zero, nor are scales 1."""
    generator = np.random.default_rng(seed)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        noise = generator.normal(size=shape)
        if path.endswith("kernel"):
            inputs = shape[:-1] if path.endswith("output/kernel") else shape[:1]
            return noise / math.sqrt(math.prod(inputs))
        return noise / math.sqrt(shape[1]) if path.endswith("table") else path.endswith("scale") + 0.1 * noise

    leaves = flatten(abstract_params(config))
    return unflatten({path: draw(path, leaf.shape).astype(np.float32) for path, leaf in leaves.items()})


def _compare_training(
    side: Side, oracle: "Oracle", batches: Sequence[Batch], training: TrainingConfig, dtype: str
) -> tuple[Loss, tuple[Difference, ...], Trajectory]:
    ours = this_side.train(side, batches, training)
    rates = this_side.learning_rates(training, side.config.d_model, len(batches))
    loss, their_gradients = oracle.loss_and_gradients(batches[0], training)
    losses, their_params = oracle.trajectory(batches, rates, training)

    largest = max(float(np.abs(gradient).max(initial=0)) for gradient in their_gradients.values())
    gradients = []
    for name in {**their_gradients, **ours.gradients}:
        item = _pair(name, ours.gradients, their_gradients)
        ok = item.max_rel <= OWN_GRADIENT[dtype] or item.max_abs <= ANY_GRADIENT[dtype] * largest
        gradients.append(dataclasses.replace(item, ok=ok))

    relative = _relative(ours.losses[0], loss)
    worst = max(map(_relative, ours.losses, losses))
    names = [name for name in {**their_params, **ours.params} if not name.endswith("key/bias")]
    parameters = max(_pair(name, ours.params, their_params).max_abs for name in names)
    ok = worst <= LOSSES[dtype] and parameters <= PARAMETERS[dtype]
    return (
        Loss(ours.losses[0], loss, relative, relative <= FORWARD[dtype]),
        tuple(gradients),
        Trajectory(tuple(ours.losses), tuple(losses), worst, parameters, ok),
    )


def _compare_search(
    side: Side, oracle: "Oracle", src: np.ndarray, decoding: DecodingConfig
) -> tuple[bool, bool, tuple[str, ...]]:
    limits = ((src != side.config.pad_id).sum(axis=1) + min(decoding.max_length_offset, 6)).tolist()
    decoding = dataclasses.replace(decoding, beam_size=max(decoding.beam_size, 2))
    greedy, beam = (
        [this_side.lines(side, src, limits, setting), oracle.search(src, limits, setting)]
        for setting in (dataclasses.replace(decoding, beam_size=1), decoding)
    )
    greedy_equal = [tokens for tokens, _ in greedy[0]] == [tokens for tokens, _ in greedy[1]]
    beam_equal, notes = True, []
    for number, ((ours, our_score), (theirs, their_score)) in enumerate(zip(*beam, strict=True), 1):
        if ours == theirs:
            continue
        is_tie = abs(our_score - their_score) <= SCORE
        beam_equal &= is_tie
        notes.append(
            f"beam search, sentence {number}: {ours} ({our_score:.6f}) here, {theirs} ({their_score:.6f}) there"
            + (": a tie" if is_tie else "")
        )
    return greedy_equal, beam_equal, tuple(notes)


def _pair(name: str, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> Difference:
    if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
        return Difference(name, math.inf, math.inf, False)
    return difference(name, ours[name], theirs[name], 0)


def _relative(one: float, other: float) -> float:
    error = abs(one - other) / max(abs(other), 1e-30)
    return error if math.isfinite(error) else math.inf


def render(report: ParityReport) -> str:
    """The report as a table."""

    def rows(title: str, items: Sequence[Difference]) -> list[str]:
        width = max(len(item.name) for item in items)
        head = f"{title:<{width}}  {'max abs':>9}  {'max rel':>9}"
        lines = [
            f"{item.name:<{width}}  {item.max_abs:9.2e}  {item.max_rel:9.2e}{'' if item.ok else '  <- differs'}"
            for item in items
        ]
        return [head, *lines, ""]

    trajectory, loss = report.trajectory, report.loss
    first, last = (f"{trajectory.this[i]:.6f} here, {trajectory.other[i]:.6f} there" for i in (0, -1))
    return "\n".join(
        [
            f"against {report.against}, {report.dtype}",
            "",
            *rows("sub-layer, in the order of the forward pass", report.layers),
            *rows("gradient", report.gradients),
            f"loss          {loss.this:.8f} here, {loss.other:.8f} there, relative {loss.max_rel:.2e}{_mark(loss.ok)}",
            f"{len(trajectory.this)} updates    first loss {first}; last {last}",
            f"              losses differ by {trajectory.max_rel:.2e} relative, parameters at the end by "
            f"{trajectory.parameters_max_abs:.2e}{_mark(trajectory.ok)}",
            f"greedy search {'equal' if report.greedy_equal else 'differs'}, token by token",
            f"beam search   {'equal' if report.beam_equal else 'differs'}",
            *(f"note: {note}" for note in report.notes),
            "",
            "within tolerance"
            if report.ok
            else f"DIVERGES first at {report.first_divergence}\nlikely cause: {report.cause}",
        ]
    )


def _mark(ok: bool) -> str:
    return "" if ok else "  <- differs"
