"""The search for a cause: where two models diverge, this side is changed until it agrees with the other side."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.interop.tables import flatten, unflatten
from transformer_jax.model.transformer import abstract_params
from transformer_jax.parity.this_side import Side
from transformer_jax.types import Params, UserError

if TYPE_CHECKING:  # it imports torch
    from transformer_jax.parity.oracles import Oracle

Leaves = dict[str, np.ndarray]
Measure = Callable[[Side], str | None]

_HEADS = (1, 2, 4, 8, 16)
CONVENTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "encoder/embedding": {
        "scale_embeddings": (False, True),
        "source_bos": (False, True),
        "source_eos": (False, True),
    },
    "encoder/layer_0/self_attention_norm": {
        "norm_epsilon": (1e-5, 1e-6, 1e-12, 1e-3),
        "norm_variant": ("standard", "unbiased_std"),
        "norm_position": ("post", "pre"),
    },
    "encoder/layer_0/self_attention": {
        "norm_position": ("post", "pre"),
        "num_heads": _HEADS,
        "attention_bias": (False, True),
    },
    "encoder/layer_0/feed_forward": {"activation": ("relu", "gelu", "swish"), "norm_position": ("post", "pre")},
    "encoder/final_norm": {"final_norm": (False, True)},
    "decoder/embedding": {"decoder_start": ("bos", "zeros")},
    "decoder/layer_0/self_attention": {"decoder_num_heads": _HEADS},
    "logits": {"logits_bias": (False, True)},
}
"""The values to try of each field that can show first at a place. The other side's own value is tried before them.

A convention that all layers share shows in the first layer of the encoder, so later places have only the decoder's.
"""
POSITIONS: dict[str, tuple[Any, ...]] = {
    "positions": ("interleaved", "halves"),
    "position_exponent": ("paper", "tensor2tensor"),
    "position_offset": (0, 1, 2, 3),
}
MASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "encoder/layer_0/self_attention": {
        "padding mask": ("encoder_padding", "cross_padding"),
        "padding mask of the encoder's self-attention": ("encoder_padding",),
    },
    "decoder/layer_0/self_attention": {"causal mask": ("causal",)},
    "decoder/layer_0/cross_attention": {"padding mask of the attention over the encoder's output": ("cross_padding",)},
}
"""The masks that can show first at a place: the name of each in a report, and the fields of `Masks` it stands for."""
PROJECTIONS = ("query", "key", "value")
_FIELDS = tuple(dict.fromkeys((*itertools.chain(*CONVENTIONS.values()), *POSITIONS)))


class Suspect(NamedTuple):
    """A change to this side that may be the cause of a divergence."""

    cause: str
    """Sentence that names the cause."""
    side: Side
    """This side with the change."""


def find_cause(side: Side, oracle: "Oracle", first: str, measure: Measure) -> str:
    """Return a sentence that names the most probable cause of the first divergence.

    Each suspect is a change to this side. The first suspect that removes every divergence is the cause. If none does,
    the cause is the suspect after which the first divergence occurs latest in the forward pass.

    Args:
        side: This side, in float64.
        oracle: The reference implementation, with its configuration and its weights.
        first: Name of the output at which the two sides diverge first.
        measure: Function that returns the name of the first diverging output of a changed side, or None if no output
            diverges.
    """
    donor = dict(flatten(oracle.astype("float64").params()))
    order = _forward_order(oracle.config, side.config)
    best, reached, tried = None, order(first), []
    for suspect in suspects(side, oracle.config, donor, first):
        tried.append(suspect.cause.partition(":")[0])
        place = measure(suspect.side)
        if place is None:
            return suspect.cause
        if order(place) > reached:
            best, reached = f"{suspect.cause}; after that the sides diverge at {place}", order(place)
    return best or f"none found; tried without success: {', '.join(dict.fromkeys(tried))}"


def suspects(side: Side, other: ModelConfig, donor: Leaves, first: str) -> Iterator[Suspect]:
    """Yield all suspects for a divergence at the place `first`, the more probable ones first."""
    fields = CONVENTIONS.get(first, {})
    yield from _masks(side, first)
    for field in fields:
        if not field.endswith("bias"):
            yield from _field(side, other, donor, field, fields[field])
    yield from _weights(side, donor, first)
    for field in fields:
        if field.endswith("bias"):  # all biases together; a single one is among the weights
            yield from _field(side, other, donor, field, fields[field])
    if first == "encoder/embedding":
        yield from _positions(side, other, donor)
    theirs = {name: getattr(other, name) for name in _FIELDS}
    yield from _changed(side, donor, {k: v for k, v in theirs.items() if v != getattr(side.config, k)})


def _field(side: Side, other: ModelConfig, donor: Leaves, field: str, values: tuple[Any, ...]) -> Iterator[Suspect]:
    for value in dict.fromkeys((getattr(other, field), *values)):
        if value != getattr(side.config, field):
            yield from _changed(side, donor, {field: value})


def _positions(side: Side, other: ModelConfig, donor: Leaves) -> Iterator[Suspect]:
    """Yield one changed field of the positions, then two, then all three."""
    values = POSITIONS | {
        "position_offset": tuple(
            dict.fromkeys((other.position_offset, 0, 1, 2, side.config.pad_id + 1, *POSITIONS["position_offset"]))
        )
    }
    if side.config.positions == "learned":
        values["positions"] = ("learned",)
    combinations = [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]
    changes = [{k: v for k, v in c.items() if v != getattr(side.config, k)} for c in combinations]
    for change in sorted(changes, key=len):
        yield from _changed(side, donor, change)


def _changed(side: Side, donor: Leaves, change: Mapping[str, Any]) -> Iterator[Suspect]:
    """Yield this side with other values of some fields, if such a model exists."""
    if not change:
        return
    try:
        config = dataclasses.replace(side.config, **change)
        params = _fitted(side.params, config, donor)
    except (UserError, ValueError):
        return
    cause = "; ".join(
        f"model.{name}: the other side has {value!r}, this one {getattr(side.config, name)!r}"
        for name, value in change.items()
    )
    yield Suspect(cause, dataclasses.replace(side, config=config, params=params))


def _fitted(params: Params, config: ModelConfig, donor: Leaves) -> Params:
    """Return parameters for another configuration: this side's, else the other side's, else ones without effect."""
    own, leaves = flatten(params), {}
    for path, wanted in flatten(abstract_params(config)).items():
        if path in own and np.size(own[path]) == wanted.size:
            leaves[path] = np.reshape(own[path], wanted.shape)
        elif path in donor and donor[path].size == wanted.size:
            leaves[path] = donor[path].reshape(wanted.shape)
        elif path.endswith(("scale", "bias")):
            leaves[path] = np.full(wanted.shape, float(path.endswith("scale")), np.float64)
        else:
            raise ValueError(path)
    return unflatten(leaves)


def _masks(side: Side, first: str) -> Iterator[Suspect]:
    for what, names in MASKS.get(first, {}).items():
        on = {getattr(side.masks, name) for name in names}
        if len(on) == 1:
            masks = side.masks._replace(**dict.fromkeys(names, not min(on)))
            ours, theirs = ("one", "none") if min(on) else ("none", "one")
            cause = f"{what}: this side has {ours}, the other {theirs}"
            yield Suspect(cause, dataclasses.replace(side, masks=masks))


def _weights(side: Side, donor: Leaves, first: str) -> Iterator[Suspect]:
    """Yield changes to the parameters of one sub-layer."""
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(side.params).items()}
    own = [path for path in leaves if path.startswith(f"{first}/")]
    if first in ("encoder/embedding", "decoder/embedding", "logits"):
        own = [path for path in leaves if path.endswith("/table") or path.startswith(("logits_bias", "output_proj"))]

    def changed(cause: str, change: Leaves) -> Suspect:
        return Suspect(cause, dataclasses.replace(side, params=unflatten({**leaves, **change})))

    differing = [p for p in own if p in donor and donor[p].shape == leaves[p].shape and (donor[p] != leaves[p]).any()]
    for path in differing:
        yield changed(_describe(path, leaves[path], donor[path]), {path: donor[path]})
    if len(differing) > 1:
        yield changed(
            f"the weights of {first}: {', '.join(differing)} differ", {path: donor[path] for path in differing}
        )
    for path in own:
        if path.endswith("kernel") and (transposed := _transposed(path, leaves[path])) is not None:
            yield changed(f"{path} is transposed on one side", {path: transposed})
    for path in own:
        if path.endswith("bias") and leaves[path].any():
            yield changed(f"{path}: the other side leaves it out", {path: np.zeros_like(leaves[path])})
    if first.endswith("attention"):
        yield from _attention(first, leaves, changed)


def _attention(first: str, leaves: Leaves, changed: Callable[[str, Leaves], Suspect]) -> Iterator[Suspect]:
    """Yield query, key and value in another order, and heads formed from the columns in another way."""
    kinds = [kind for kind in ("kernel", "bias") if f"{first}/query/{kind}" in leaves]
    for order in (("key", "query", "value"), ("value", "key", "query"), ("query", "value", "key")):
        moved = [(name, source) for name, source in zip(PROJECTIONS, order, strict=True) if name != source]
        change = {f"{first}/{a}/{kind}": leaves[f"{first}/{b}/{kind}"] for a, b in moved for kind in kinds}
        if all(leaves[path].shape == leaf.shape for path, leaf in change.items()):
            yield changed(f"{first}: {moved[0][0]} and {moved[1][0]} are swapped", change)

    def stride(leaf: np.ndarray, axis: int) -> np.ndarray:
        heads, width = leaf.shape[axis : axis + 2]
        reshaped = leaf.reshape(*leaf.shape[:axis], width, heads, *leaf.shape[axis + 2 :])
        return np.swapaxes(reshaped, axis, axis + 1)

    inputs = {
        f"{first}/{name}/{kind}": stride(leaves[f"{first}/{name}/{kind}"], 1 if kind == "kernel" else 0)
        for name in PROJECTIONS
        for kind in kinds
    }
    output = f"{first}/output/kernel"
    cause = f"{first}: a head is every h-th column on one side, a block of columns on the other"
    yield changed(cause, inputs | {output: stride(leaves[output], 0)})
    yield changed(f"{cause} (query, key and value; not the output)", inputs)


def _transposed(path: str, leaf: np.ndarray) -> np.ndarray | None:
    """Return the leaf with its foreign matrix transposed, if that is square."""
    inputs = 2 if path.endswith("attention/output/kernel") else 1
    rows = int(np.prod(leaf.shape[:inputs]))
    return leaf.reshape(rows, rows).T.reshape(leaf.shape) if rows * rows == leaf.size else None


def _describe(path: str, ours: np.ndarray, theirs: np.ndarray) -> str:
    transposed = _transposed(path, ours) if path.endswith("kernel") else None
    if transposed is not None and np.array_equal(transposed, theirs):
        return f"{path} is transposed on one side"
    if not theirs.any():
        return f"{path}: the other side leaves it out (all zeros)"
    if not ours.any():
        return f"{path}: this side leaves it out (all zeros)"
    return f"{path}: its values differ by up to {np.abs(ours - theirs).max():.2g}"


def _forward_order(other: ModelConfig, this: ModelConfig) -> Callable[[str], tuple[int, ...]]:
    """Return a sort key that puts names of sub-layers in the order of the other side's forward pass."""
    sublayers = ["self_attention", "cross_attention", "feed_forward"]
    layers = max(config.num_layers for config in (other.encoder, this.encoder, other.decoder, this.decoder))

    def key(name: str) -> tuple[int, ...]:
        if name == "logits":
            return (2, 0, 0, 0)
        stack, _, rest = name.partition("/")
        if rest in ("embedding", "final_norm"):
            return (stack == "decoder", -1 if rest == "embedding" else layers, 0, 0)
        layer, _, sublayer = rest.partition("/")
        # A norm comes after its sub-layer with norm_position post, and before it with pre.
        follows = sublayer.endswith("_norm") == (other.norm_position == "post")
        index = sublayers.index(sublayer.removesuffix("_norm"))
        return (stack == "decoder", int(layer.removeprefix("layer_")), index, int(follows))

    return key
