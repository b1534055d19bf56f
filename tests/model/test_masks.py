"""Masks equal the diagrams in their docstrings (1 = may attend, row = query, column = key)."""

import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.model import masks
from transformer_jax.model.masks import causal_mask, padding_mask, segment_mask, target_mask

PAD, BOS = 0, 1


def drawn(text):
    return np.array([[cell == "1" for cell in line.split()] for line in text.strip().splitlines()])


def in_docstring(function, text):
    """Return whether the docstring contains the diagram."""
    lines = [" ".join(line.split()) for line in text.strip().splitlines()]
    documented = [" ".join(line.split("  (")[0].split()) for line in function.__doc__.splitlines()]
    starts = [i for i, line in enumerate(documented) if line.endswith(" is " + lines[0])]
    return any(documented[i + 1 : i + len(lines)] == lines[1:] for i in starts)


CAUSAL = """
    1 0 0
    1 1 0
    1 1 1
"""
TARGET = """
    1 0 0
    1 1 0
    1 1 0
"""
SEGMENTS = """
    1 1 0 0
    0 0 1 0
    0 0 1 0
    0 0 0 0
"""
PADDING = """
    1 1 0
"""


def test_causal_mask():
    assert causal_mask(3).shape == (1, 1, 3, 3)
    np.testing.assert_array_equal(causal_mask(3)[0, 0], drawn(CAUSAL))
    assert in_docstring(causal_mask, CAUSAL)


def test_padding_mask():
    mask = padding_mask(jnp.array([[5, 6, PAD]]), PAD)
    assert mask.shape == (1, 1, 1, 3)
    np.testing.assert_array_equal(mask[0, 0], drawn(PADDING))
    assert in_docstring(padding_mask, PADDING)


def test_target_mask():
    mask = target_mask(jnp.array([[BOS, 5, PAD]]), PAD)
    assert mask.shape == (1, 1, 3, 3)
    np.testing.assert_array_equal(mask[0, 0], drawn(TARGET))
    assert in_docstring(target_mask, TARGET)


def test_segment_mask():
    queries, keys = jnp.array([[1, 2, 2, 0]]), jnp.array([[1, 1, 2, 0]])
    mask = segment_mask(queries, keys)
    assert mask.shape == (1, 1, 4, 4)
    np.testing.assert_array_equal(mask[0, 0], drawn(SEGMENTS))
    assert in_docstring(segment_mask, SEGMENTS)
    rows = segment_mask(jnp.concatenate([queries, keys]), jnp.concatenate([keys, queries]))
    np.testing.assert_array_equal(rows[1, 0], drawn(SEGMENTS).T)


def test_target_mask_where_padding_starts_the_sentence():
    """
    1 0 0        the first token is the start token, even if its id is that of padding
    1 1 0
    1 1 0
    """
    np.testing.assert_array_equal(target_mask(jnp.array([[PAD, 5, PAD]]), PAD)[0, 0], drawn(TARGET))


def test_masks_of_a_batch_are_per_row():
    tokens = jnp.array([[5, 6, 7], [5, 9, 9], [9, 9, 9]])
    np.testing.assert_array_equal(padding_mask(tokens, 9)[:, 0, 0], drawn("1 1 1\n1 0 0\n0 0 0"))
    mask = target_mask(tokens, 9)
    assert mask.shape == (3, 1, 3, 3)
    np.testing.assert_array_equal(mask[0, 0], drawn(CAUSAL))
    for row in (1, 2):
        np.testing.assert_array_equal(mask[row, 0], drawn("1 0 0\n1 0 0\n1 0 0"))


@pytest.mark.parametrize(
    "mask", [causal_mask(2), padding_mask(jnp.ones((1, 2), int), 0), segment_mask(*jnp.ones((2, 1, 2), int))]
)
def test_masks_are_boolean(mask):
    assert mask.dtype == bool


def test_every_mask_function_has_a_diagram():
    described = {masks.PaddedMask, masks.right_padded_masks}  # which add a description to those below
    own = [value for value in vars(masks).values() if getattr(value, "__module__", "") == masks.__name__]
    functions = [value for value in own if value not in described]
    assert {function.__name__ for function in functions} == {
        "causal_mask",
        "padding_mask",
        "segment_mask",
        "target_mask",
    }
