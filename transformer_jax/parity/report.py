"""The parity report: differences, tolerances, and the report as text and JSON."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.parity.this_side import Arrays, Trained
from transformer_jax.runtime.files import to_json
from transformer_jax.types import Batch


class Tolerance(NamedTuple):
    """Largest errors that rounding explains."""

    forward: float  # of sub-layers and of the loss, relative to max(1, the largest value)
    own_gradient: float  # relative to the gradient's own largest value; one within `any_gradient` is fine too
    any_gradient: float  # relative to the largest value of all gradients
    losses: float  # of the losses of training, relative
    params: float  # of the parameters after training, absolute (see `compare.DRIFT`)


TOLERANCES = {
    "float32": Tolerance(forward=1e-5, own_gradient=1e-4, any_gradient=1e-5, losses=1e-4, params=math.inf),
    "float64": Tolerance(forward=1e-10, own_gradient=1e-9, any_gradient=1e-10, losses=1e-9, params=1e-9),
}


@dataclass(frozen=True)
class Difference:
    """Distance of a tensor from the reference's tensor. It is infinite if only one model has the tensor."""

    name: str
    max_abs: float
    max_rel: float  # relative to the largest value of the reference's tensor
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
    """Losses of training with equal batches and optimizers, and the parameters at its end."""

    this: tuple[float, ...]
    other: tuple[float, ...]
    max_rel: float
    parameters_max_abs: float  # without key biases (see `compare.KEY_BIASES`)
    ok: bool


@dataclass(frozen=True)
class ParityReport:
    """Result of `compare`."""

    ok: bool
    against: str
    dtype: str
    layers: tuple[Difference, ...]  # every sub-layer, in the order of the forward pass
    first_divergence: str | None  # first sub-layer or check that is not within tolerance
    cause: str | None  # sentence that names the likely cause of the first divergence
    loss: Loss
    gradients: tuple[Difference, ...]
    trajectory: Trajectory
    greedy_equal: bool
    beam_equal: bool  # or other tokens with scores that differ by at most `compare.SCORE`
    notes: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return one JSON object on one line, with null for numbers that are not finite."""
        fields = dataclasses.asdict(self)
        for name in ("against", "notes"):
            del fields[name]
        for name in ("layers", "gradients"):
            fields[name] = [{key: item[key] for key in ("name", "max_abs", "max_rel")} for item in fields[name]]
        return to_json(fields)


def difference(
    name: str, ours: Arrays, theirs: Arrays, tolerance: float = 0, where: np.ndarray | EllipsisType = ...
) -> Difference:
    """Return the difference of two arrays of one name, ok if at most the tolerance times max(1, the largest value)."""
    error, largest = math.inf, 0.0
    if name in ours and name in theirs and ours[name].shape == theirs[name].shape:
        with np.errstate(invalid="ignore"):
            error = float(np.abs(ours[name] - theirs[name])[where].max(initial=0))
        largest = float(np.abs(theirs[name])[where].max(initial=0))
    if not math.isfinite(error):
        return Difference(name, math.inf, math.inf, False)
    relative = error / largest if largest else (math.inf if error else 0.0)
    return Difference(name, error, relative, error <= tolerance * max(1, largest))


def layer_differences(
    ours: Arrays, theirs: Arrays, batch: Batch, config: ModelConfig, dtype: str
) -> tuple[Difference, ...]:
    """Return the differences in the order of the reference's forward pass, without padded positions."""
    is_target = batch.tgt_in != config.pad_id
    is_target[:, 0] = True  # the start token may have the padding's id
    is_real = {"encoder": batch.src != config.pad_id, "decoder": is_target, "logits": is_target}
    names = list(theirs)
    for name in ours.keys() - theirs.keys():  # a final norm that only our model has goes at the end of its stack
        stack = name.partition("/")[0]
        names.insert(max(i for i, other in enumerate(names) if other.startswith(stack)) + 1, name)
    tolerance = TOLERANCES[dtype].forward
    return tuple(difference(name, ours, theirs, tolerance, is_real[name.partition("/")[0]]) for name in names)


def training_differences(ours: Trained, theirs: Trained, dtype: str) -> tuple[Loss, tuple[Difference, ...], Trajectory]:
    """Return the differences of the first loss, of its gradients, and of several updates."""
    limit = TOLERANCES[dtype]
    largest = max(float(np.abs(gradient).max(initial=0)) for gradient in theirs.gradients.values())
    gradients = []
    for name in {**theirs.gradients, **ours.gradients}:
        item = difference(name, ours.gradients, theirs.gradients)
        ok = item.max_rel <= limit.own_gradient or item.max_abs <= limit.any_gradient * largest
        gradients.append(dataclasses.replace(item, ok=ok))
    errors = [
        difference("loss", {"loss": np.array(one)}, {"loss": np.array(other)}).max_rel
        for one, other in zip(ours.losses, theirs.losses, strict=True)
    ]
    names = [name for name in {**theirs.params, **ours.params} if not name.endswith("key/bias")]
    parameters = max(difference(name, ours.params, theirs.params).max_abs for name in names)
    ok = max(errors) <= limit.losses and parameters <= limit.params
    return (
        Loss(ours.losses[0], theirs.losses[0], errors[0], errors[0] <= limit.forward),
        tuple(gradients),
        Trajectory(tuple(ours.losses), tuple(theirs.losses), max(errors), parameters, ok),
    )


def first_divergence(layers: Sequence[Difference]) -> str | None:
    """Return the name of the first difference that is not within tolerance."""
    return next((item.name for item in layers if not item.ok), None)


def render(report: ParityReport) -> str:
    """Return the report as a table."""

    def mark(ok: bool) -> str:
        return "" if ok else "  <- differs"

    def rows(title: str, items: Sequence[Difference]) -> list[str]:
        width = max(len(item.name) for item in items)
        lines = [f"{item.name:<{width}}  {item.max_abs:9.2e}  {item.max_rel:9.2e}{mark(item.ok)}" for item in items]
        return [f"{title:<{width}}  {'max abs':>9}  {'max rel':>9}", *lines, ""]

    trajectory, loss = report.trajectory, report.loss
    first, last = (f"{trajectory.this[i]:.6f} here, {trajectory.other[i]:.6f} there" for i in (0, -1))
    conclusion = f"DIVERGES first at {report.first_divergence}\nlikely cause: {report.cause}"
    return "\n".join(
        [
            f"against {report.against}, {report.dtype}",
            "",
            *rows("sub-layer, in the order of the forward pass", report.layers),
            *rows("gradient", report.gradients),
            f"loss          {loss.this:.8f} here, {loss.other:.8f} there, relative {loss.max_rel:.2e}{mark(loss.ok)}",
            f"{len(trajectory.this)} updates    first loss {first}; last {last}",
            f"              losses differ by {trajectory.max_rel:.2e} relative, parameters at the end by "
            f"{trajectory.parameters_max_abs:.2e}{mark(trajectory.ok)}",
            f"greedy search {'equal' if report.greedy_equal else 'differs'}, token by token",
            f"beam search   {'equal' if report.beam_equal else 'differs'}",
            *(f"note: {note}" for note in report.notes),
            "",
            "within tolerance" if report.ok else conclusion,
        ]
    )
