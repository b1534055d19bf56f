"""Find out by trial why this side, the package's model, diverges from the other side, a reference implementation."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.interop.tables import flatten, unflatten
from transformer_jax.model.transformer import abstract_params
from transformer_jax.parity.report import Difference, first_divergence
from transformer_jax.parity.this_side import Arrays, Side
from transformer_jax.types import Params, UserError

if TYPE_CHECKING:  # it imports torch
    from transformer_jax.parity.oracles import Oracle

Change = Mapping[str, object]
"""Values of fields of `ModelConfig`."""
Suspect = tuple[str, Side]
"""A sentence that names a cause, and this side changed as if the sentence were true."""

_HEADS = (1, 2, 4, 8, 16)
_NORM_POSITIONS = ("post", "pre")
CONVENTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "encoder/embedding": {
        "scale_embeddings": (False, True),
        "source_bos": (False, True),
        "source_eos": (False, True),
    },
    "encoder/layer_0/self_attention_norm": {
        "norm_epsilon": (1e-5, 1e-6, 1e-12, 1e-3),
        "norm_variant": ("standard", "unbiased_std"),
        "norm_position": _NORM_POSITIONS,
    },
    "encoder/layer_0/self_attention": {"norm_position": _NORM_POSITIONS, "num_heads": _HEADS},
    "encoder/layer_0/feed_forward": {"activation": ("relu", "gelu", "swish"), "norm_position": _NORM_POSITIONS},
    "encoder/final_norm": {"final_norm": (False, True)},
    "decoder/embedding": {"decoder_start": ("bos", "zeros")},
    "decoder/layer_0/self_attention": {"decoder_num_heads": _HEADS},
}
"""For each place in the forward pass, the fields whose effect can first appear there, and the values to try.

The other side's value is tried first. The effect of a field of all layers appears in the encoder's first layer, so
later places have only decoder fields.
"""
BIASES = {"encoder/layer_0/self_attention": "attention_bias", "logits": "logits_bias"}
"""For each place, the field that adds its biases. Weights are tried first, because a single bias may be the cause."""
POSITIONS: dict[str, tuple[object, ...]] = {
    "positions": ("interleaved", "halves"),
    "position_exponent": ("paper", "tensor2tensor"),
    "position_offset": (0, 1, 2, 3),
}
"""The fields of the positions, which are tried in all combinations."""
MASKS: dict[str, dict[str, tuple[str, ...]]] = {
    "encoder/layer_0/self_attention": {
        "padding mask": ("encoder_padding", "cross_padding"),
        "padding mask of the encoder's self-attention": ("encoder_padding",),
    },
    "decoder/layer_0/self_attention": {"causal mask": ("causal",)},
    "decoder/layer_0/cross_attention": {"padding mask of the attention over the encoder's output": ("cross_padding",)},
}
"""For each place, the masks whose effect can first appear there: the name in reports, and the fields of `Masks`."""
PROJECTIONS = ("query", "key", "value")
_FIELDS = tuple(dict.fromkeys((*itertools.chain(*CONVENTIONS.values()), *BIASES.values(), *POSITIONS)))


def find_cause(
    side: Side, oracle: "Oracle", layers: Sequence[Difference], measure: Callable[[Side], Sequence[Difference]]
) -> str | None:
    """Return a sentence that names the most probable cause of the first divergence, or None if nothing diverges.

    Each suspect is a change to this side. The first suspect that removes every divergence is the cause. If none does,
    the cause is the suspect after which the first divergence occurs latest in the forward pass.
    """
    first = first_divergence(layers)
    if first is None:
        return None
    order = [item.name for item in layers]
    best, reached, tried = None, order.index(first), dict[str, None]()
    for cause, changed in suspects(side, oracle.config, oracle.params(), first):
        tried[cause.partition(":")[0]] = None
        place = first_divergence(measure(changed))
        if place is None:
            return cause
        if place in order[reached + 1 :]:
            best, reached = f"{cause}; after that the sides diverge at {place}", order.index(place)
    return best or f"none found; tried without success: {', '.join(tried)}"


def suspects(side: Side, other: ModelConfig, donor: Arrays, first: str) -> Iterator[Suspect]:
    """Yield suspects for a divergence at `first`, most probable first. `donor` has the other side's parameters."""
    yield from _masks(side, first)
    fields = CONVENTIONS.get(first, {})
    yield from _conventions(side, donor, _values(fields, other))
    leaves = {path: np.asarray(leaf) for path, leaf in flatten(side.params).items()}
    for cause, change in _weights(leaves, donor, first):
        yield cause, dataclasses.replace(side, params=unflatten(leaves | change))
    changes = _values({BIASES[first]: (False, True)}, other) if first in BIASES else []
    if first == "encoder/embedding":
        offsets = (other.position_offset, *POSITIONS["position_offset"], side.config.pad_id + 1)
        values = POSITIONS | {"position_offset": offsets}
        if side.config.positions == "learned":
            values["positions"] = ("learned",)
        changes += [dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())]
        changes.sort(key=lambda change: len(_effective(side, change)))  # one changed field, then two, then all three
    changes.append({name: getattr(other, name) for name in _FIELDS})
    yield from _conventions(side, donor, changes)


def _values(fields: Mapping[str, tuple[object, ...]], other: ModelConfig) -> list[Change]:
    return [{name: value} for name, values in fields.items() for value in (getattr(other, name), *values)]


def _effective(side: Side, change: Change) -> Change:
    return {name: value for name, value in change.items() if value != getattr(side.config, name)}


def _conventions(side: Side, donor: Arrays, changes: Iterable[Change]) -> Iterator[Suspect]:
    """Yield this side after each change, except changes that are invalid or that no parameters fit."""
    seen: list[Change] = [{}]
    for change in changes:
        change = _effective(side, change)
        if change in seen:
            continue
        seen.append(change)
        try:
            config = dataclasses.replace(side.config, **change)  # type: ignore[arg-type]  # values of mixed types
            params = _fitted(side.params, config, donor)
        except (UserError, ValueError):
            continue
        cause = "; ".join(
            f"model.{name}: the other side has {value!r}, this one {getattr(side.config, name)!r}"
            for name, value in change.items()
        )
        yield cause, dataclasses.replace(side, config=config, params=params)


def _fitted(params: Params, config: ModelConfig, donor: Arrays) -> Params:
    """Return parameters that fit `config`: this side's, else those of `donor`, else scales of 1 and biases of 0."""
    own, leaves = flatten(params), Arrays()
    for path, wanted in flatten(abstract_params(config)).items():
        found = next((tree[path] for tree in (own, donor) if path in tree and np.size(tree[path]) == wanted.size), None)
        if found is None and not path.endswith(("scale", "bias")):
            raise ValueError(path)
        leaves[path] = np.reshape(
            path.endswith("scale") * np.ones(wanted.size) if found is None else found, wanted.shape
        )
    return unflatten(leaves)


def _masks(side: Side, first: str) -> Iterator[Suspect]:
    for what, names in MASKS.get(first, {}).items():
        on = {getattr(side.masks, name) for name in names}
        if len(on) == 1:
            masks = side.masks._replace(**dict.fromkeys(names, not min(on)))
            ours, theirs = ("one", "none") if min(on) else ("none", "one")
            cause = f"{what}: this side has {ours}, the other {theirs}"
            yield cause, dataclasses.replace(side, masks=masks)


def _weights(leaves: Arrays, donor: Arrays, first: str) -> Iterator[tuple[str, Arrays]]:
    """Yield changes to the parameters of one sub-layer, each with a sentence that names the cause."""
    own = [path for path in leaves if path.startswith(f"{first}/")]
    if first in ("encoder/embedding", "decoder/embedding", "logits"):
        own = [path for path in leaves if path.endswith("/table") or path.startswith(("logits_bias", "output_proj"))]
    differing = [p for p in own if p in donor and donor[p].shape == leaves[p].shape and (donor[p] != leaves[p]).any()]
    for path in differing:
        yield _describe(path, leaves[path], donor[path]), {path: donor[path]}
    if len(differing) > 1:
        names = ", ".join(differing)
        yield f"the weights of {first}: {names} differ", {path: donor[path] for path in differing}
    for path in own:
        if (transposed := _transposed(path, leaves[path])) is not None:
            yield f"{path} is transposed on one side", {path: transposed}
    for path in own:
        if path.endswith("bias") and leaves[path].any():
            yield f"{path}: the other side leaves it out", {path: np.zeros_like(leaves[path])}
    if first.endswith("attention"):
        yield from _attention(first, {path: leaves[path] for path in own})


def _attention(first: str, leaves: Arrays) -> Iterator[tuple[str, Arrays]]:
    """Yield query, key and value in another order, and heads formed from the columns in another way."""
    kinds = [kind for kind in ("kernel", "bias") if f"{first}/query/{kind}" in leaves]
    for one, other in itertools.combinations(PROJECTIONS, 2):
        swapped = {
            f"{first}/{name}/{kind}": leaves[f"{first}/{source}/{kind}"]
            for name, source in ((one, other), (other, one))
            for kind in kinds
        }
        if all(leaves[path].shape == leaf.shape for path, leaf in swapped.items()):
            yield f"{first}: {one} and {other} are swapped", swapped

    def stride(path: str) -> np.ndarray:
        leaf = leaves[path]
        axis = 1 if path.endswith("kernel") and "/output/" not in path else 0  # of the heads
        heads, width = leaf.shape[axis : axis + 2]
        return leaf.reshape(*leaf.shape[:axis], width, heads, *leaf.shape[axis + 2 :]).swapaxes(axis, axis + 1)

    output = f"{first}/output/kernel"
    inputs = {path: stride(path) for path in (f"{first}/{name}/{kind}" for name in PROJECTIONS for kind in kinds)}
    cause = f"{first}: a head is every h-th column on one side, a block of columns on the other"
    yield cause, inputs | {output: stride(output)}
    yield f"{cause} (query, key and value; not the output)", inputs


def _transposed(path: str, leaf: np.ndarray) -> np.ndarray | None:
    """Return a kernel with its foreign matrix transposed, or None if that is not square."""
    inputs = 2 if path.endswith("attention/output/kernel") else 1
    rows = int(np.prod(leaf.shape[:inputs]))
    is_square = path.endswith("kernel") and rows * rows == leaf.size
    return leaf.reshape(rows, rows).T.reshape(leaf.shape) if is_square else None


def _describe(path: str, ours: np.ndarray, theirs: np.ndarray) -> str:
    transposed = _transposed(path, ours)
    if transposed is not None and np.array_equal(transposed, theirs):
        return f"{path} is transposed on one side"
    for is_zero, who in ((not theirs.any(), "the other side"), (not ours.any(), "this side")):
        if is_zero:
            return f"{path}: {who} leaves it out (all zeros)"
    return f"{path}: its values differ by up to {np.abs(ours - theirs).max():.2g}"
