"""Generate invalid and unusual input: of bounded size, and the same on every machine."""

import random
from typing import Any

from hypothesis import strategies as st

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "\0", "\ud800", "\u2028", "nan", "../../etc", "9" * 30, "none", "all", "best"]),
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)

# Text that programs often mishandle: other line ends, combining marks, right-to-left scripts, control characters.
PIECES = (
    *("a", "dog", "ß", "木", "🎉", "👩‍👩‍👧", "e\u0301\u0323\u0302", "שלום", "مرحبا", "\u202eabc", "\ufeff"),
    *("\u2028", "\u2029", "\x85", "\v", "\f", "\r", "\t", "\x1c", "\x1d", "\x1e", "\0", "\x1b[31m", "\xa0", "\u200b"),
    *(" ", "  ", "</s>", "<pad>", "<unk>", "@@ ", ">>fra<<", "▁", "%s", "'; --", "\\n", "\uffff", "\U0010ffff"),
)
texts = st.lists(
    st.sampled_from(PIECES) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=8
).map("".join)


@st.composite
def mutated_json(draw: Any, tree: Any) -> Any:
    """Return a copy of the JSON tree with one to three values replaced, dropped or added."""
    tree = _copy(tree)
    for _ in range(draw(st.integers(1, 3))):
        place = tree
        while isinstance(place, dict | list) and place:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or not place[key] or draw(st.integers(0, 3)) == 0:
                action = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add"]))
                if action == "drop":
                    del place[key]
                elif action == "add" and isinstance(place, dict):
                    place[draw(st.text(max_size=4))] = draw(json_values)
                else:
                    place[key] = draw(json_values)
                break
            place = place[key]
    return tree


@st.composite
def mutated_bytes(draw: Any, data: bytes) -> bytes:
    """Return the bytes truncated, or with a few of them replaced, dropped or inserted."""
    if draw(st.booleans()):
        return data[: draw(st.integers(0, len(data)))]
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 4)))
        data = data[:start] + draw(st.binary(max_size=4)) + data[end:]
    return data


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _copy(value) for name, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def lines(count: int, seed: int = 0, longest: int = 12) -> list[bytes]:
    """Return lines of random PIECES without line ends. Some are not UTF-8, some are empty, some are only spaces."""
    rng = random.Random(seed)
    broken = [
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xf0\x9f\x8e",
        b"\xc0\xaf",
    ]  # truncated, half a surrogate pair, overlong
    found = []
    for _ in range(count):
        pieces = [rng.choice(PIECES).encode("utf-8") for _ in range(rng.randrange(longest))]
        if rng.random() < 0.1:
            pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(broken))
        if rng.random() < 0.05:
            pieces = [rng.choice([b" ", b"\t", b"\xe2\x80\xa8", b"\v"])] * rng.randrange(4)
        found.append(b"".join(pieces))
    return found
