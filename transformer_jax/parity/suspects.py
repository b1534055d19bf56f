"""The search for a cause: where two models diverge, this side is changed until it agrees with the other."""

import dataclasses
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

# Values that are in use somewhere; the other side's own are tried besides.
VALUES: dict[str, tuple[Any, ...]] = {
    "norm_epsilon": (1e-5, 1e-6, 1e-12, 1e-3),
    "norm_variant": ("standard", "unbiased_std"),
    "norm_position": ("post", "pre"),
    "final_norm": (False, True),
    "activation": ("relu", "gelu", "swish"),
    "scale_embeddings": (False, True),
    "decoder_start": ("bos", "zeros"),
    "attention_bias": (False, True),
    "logits_bias": (False, True),
    "num_heads": (1, 2, 4, 8, 16),
    "decoder_num_heads": (1, 2, 4, 8, 16),
}
POSITIONS = ("positions", "position_exponent", "position_offset")
# Which fields can show first at a place. A convention that all layers share shows in the first layer of the encoder, so
# further on there are only those of the decoder.
FIELDS: dict[str, tuple[str, ...]] = {
    "encoder/embedding": ("scale_embeddings",),
    "encoder/layer_0/self_attention_norm": ("norm_epsilon", "norm_variant", "norm_position"),
    "encoder/layer_0/self_attention": ("norm_position", "num_heads", "attention_bias"),
    "encoder/layer_0/feed_forward": ("activation", "norm_position"),
    "encoder/final_norm": ("final_norm",),
    "decoder/embedding": ("decoder_start",),
    "decoder/layer_0/self_attention": ("decoder_num_heads",),
    "logits": ("logits_bias",),
}
# The same of masks, and what they are called.
MASKS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "encoder/layer_0/self_attention": (
        (("encoder_padding", "cross_padding"), "padding mask"),
        (("encoder_padding",), "padding mask of the encoder's self-attention"),
    ),
    "decoder/layer_0/self_attention": ((("causal",), "causal mask"),),
    "decoder/layer_0/cross_attention": (
        (("cross_padding",), "padding mask of the attention over the encoder's output"),
    ),
}
PROJECTIONS = ("query", "key", "value")


class Suspect(NamedTuple):
    """A change to this side that may be the cause, and the sentence that says so."""

    cause: str
    side: Side


def find_cause(side: Side, oracle: "Oracle", first: str, measure: Measure) -> str:
    """The sentence of the suspect that moves the first divergence furthest; the first that removes it wins.

    Args:
        side: this side, in float64.
        oracle: the other side, for its configuration and its weights.
        first: the name of the first divergence.
        measure: the name of a variant's first divergence, in the order of the forward pass; None: there is none.
    """
    donor = dict(flatten(oracle.astype("float64").params()))
    order = _order(oracle.config, side.config)
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
    """All suspects, the likelier ones first."""
    fields = FIELDS.get(first, ())
    yield from _masks(side, first)
    for field in fields:
        if not field.endswith("bias"):
            yield from _field(side, other, donor, field)
    yield from _weights(side, donor, first)
    for field in fields:
        if field.endswith("bias"):  # all biases; one alone is among the weights
            yield from _field(side, other, donor, field)
    if first == "encoder/embedding":
        yield from _positions(side, other, donor)
    both = {name: getattr(other, name) for name in (*VALUES, *POSITIONS)}
    yield from _changed(side, donor, {k: v for k, v in both.items() if v != getattr(side.config, k)})


def _field(side: Side, other: ModelConfig, donor: Leaves, field: str) -> Iterator[Suspect]:
    for value in dict.fromkeys((getattr(other, field), *VALUES[field])):
        if value != getattr(side.config, field):
            yield from _changed(side, donor, {field: value})


def _positions(side: Side, other: ModelConfig, donor: Leaves) -> Iterator[Suspect]:
    """One field changed, then two, then all three."""
    offsets = dict.fromkeys((other.position_offset, 0, 1, 2, side.config.pad_id + 1, 3))
    layouts = ("interleaved", "halves") if side.config.positions != "learned" else ("learned",)
    combinations = [
        {"positions": layout, "position_exponent": exponent, "position_offset": offset}
        for layout in layouts
        for exponent in ("paper", "tensor2tensor")
        for offset in offsets
    ]
    changes = [{k: v for k, v in c.items() if v != getattr(side.config, k)} for c in combinations]
    for change in sorted(changes, key=len):
        yield from _changed(side, donor, change)


def _changed(side: Side, donor: Leaves, change: Mapping[str, Any]) -> Iterator[Suspect]:
    """This side with other values of some fields, if there is such a model."""
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
    """Parameters for another configuration: those there are, others from the other side, else what does nothing."""
    have, leaves = flatten(params), {}
    for path, wanted in flatten(abstract_params(config)).items():
        if path in have and np.size(have[path]) == wanted.size:
            leaves[path] = np.reshape(have[path], wanted.shape)
        elif path in donor and donor[path].size == wanted.size:
            leaves[path] = donor[path].reshape(wanted.shape)
        elif path.endswith(("scale", "bias")):
            leaves[path] = np.full(wanted.shape, float(path.endswith("scale")), np.float64)
        else:
            raise ValueError(path)
    return unflatten(leaves)


def _masks(side: Side, first: str) -> Iterator[Suspect]:
    for names, what in MASKS.get(first, ()):
        on = {getattr(side.masks, name) for name in names}
        if len(on) == 1:
            masks = side.masks._replace(**dict.fromkeys(names, not min(on)))
            has = ("one", "none") if min(on) else ("none", "one")
            cause = f"{what}: this side has {has[0]}, the other {has[1]}"
            yield Suspect(cause, dataclasses.replace(side, masks=masks))


def _weights(side: Side, donor: Leaves, first: str) -> Iterator[Suspect]:
    """Changes to the parameters of one sub-layer."""
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
    """Query, key and value in another order; heads cut from the columns in another way."""
    kinds = [kind for kind in ("kernel", "bias") if f"{first}/query/{kind}" in leaves]
    for order in (("key", "query", "value"), ("value", "key", "query"), ("query", "value", "key")):
        moved = [(here, there) for here, there in zip(PROJECTIONS, order, strict=True) if here != there]
        change = {f"{first}/{a}/{kind}": leaves[f"{first}/{b}/{kind}"] for a, b in moved for kind in kinds}
        if all(leaves[path].shape == leaf.shape for path, leaf in change.items()):
            yield changed(f"{first}: {moved[0][0]} and {moved[1][0]} are swapped", change)

    def stride(leaf: np.ndarray, axis: int) -> np.ndarray:
        heads, width = leaf.shape[axis : axis + 2]
        cut = leaf.reshape(*leaf.shape[:axis], width, heads, *leaf.shape[axis + 2 :])
        return np.swapaxes(cut, axis, axis + 1)

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
    """The leaf with its foreign matrix transposed, if that is square."""
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


def _order(other: ModelConfig, this: ModelConfig) -> Callable[[str], tuple[int, ...]]:
    """A key that sorts names of sub-layers as the forward pass has them.

    Both norm positions give an order of their own; between two sub-layers of a layer that of the other side counts.
    """
    sublayers = ["self_attention", "cross_attention", "feed_forward"]
    layers = max(config.num_layers for config in (*(c.encoder for c in (other, this)), other.decoder, this.decoder))

    def key(name: str) -> tuple[int, ...]:
        if name == "logits":
            return (2, 0, 0, 0)
        stack, _, rest = name.partition("/")
        if rest in ("embedding", "final_norm"):
            return (stack == "decoder", -1 if rest == "embedding" else layers, 0, 0)
        layer, _, sublayer = rest.partition("/")
        is_norm = sublayer.endswith("_norm")
        after = is_norm == (other.norm_position == "post")
        place = sublayers.index(sublayer.removesuffix("_norm"))
        return (stack == "decoder", int(layer.removeprefix("layer_")), place, int(after))

    return key
