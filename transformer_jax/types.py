"""The words of the code: axes, batches, special tokens.

Axes in array annotations:

| axis                        | meaning                                         |
|-----------------------------|-------------------------------------------------|
| `b`                         | batch: rows of one sentence pair, or of several |
| `s`                         | source length, or length of the attended keys   |
| `t`                         | target length, or length of the queries         |
| `h d_model d_ff d_k d_v`    | as in the paper                                 |
| `v`                         | vocabulary                                      |
| `k`                         | beam                                            |
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

# A pytree of arrays: {"encoder": {"layer_0": {"self_attention": {"query": {"kernel": ...}}}}, ...}.
Params = Any

# Where a saved training state holds the parameters that a run is evaluated with: the first of these paths it has.
EVAL_PARAMS = ("opt_state", "ema"), ("params",)

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # SPECIAL_TOKENS[PAD_ID] is "<pad>", and so on


class Batch(NamedTuple):
    """Sentence pairs as token ids, int32, padded with `pad_id` on the right.

    A row holds one pair or, in a packed batch, several, one after the other; the segments say which position belongs to
    which. A row that holds nothing but padding is an empty row: it has weight 0 in every sum.
    """

    src: np.ndarray
    """`b s`: the source, with EOS last (before the padding) if the model's source ends with EOS."""
    tgt_in: np.ndarray
    """`b t`: what the decoder reads: the start token first, then the target."""
    tgt_out: np.ndarray
    """`b t`: what the decoder is to predict: the target, then EOS."""
    src_segments: np.ndarray | None = None
    """`b s`: 1, 2, ... for the positions of a row's first, second, ... pair, 0 for padding. None: a pair a row."""
    tgt_segments: np.ndarray | None = None
    """`b t`: the segment numbers of `tgt_in` and `tgt_out`. None if `src_segments` is None."""


class RowParts(NamedTuple):
    """Rows of a global batch that a process needs, as ascending indices of equal, contiguous parts.

    >>> RowParts((1,), 4).rows(8)
    array([2, 3])
    """

    mine: tuple[int, ...] = (0,)
    num_parts: int = 1

    def rows(self, num_rows: int) -> np.ndarray:
        """Return the indices of this process's rows in a batch. `num_rows` must be a multiple of `num_parts`."""
        return np.arange(num_rows).reshape(self.num_parts, -1)[list(self.mine)].ravel()


ALL_ROWS = RowParts()


class UserError(ValueError):
    """A failure with a cure. The message names the file, line or field, the value found and what would be legal."""


def first_line(error: BaseException) -> str:
    r"""Return the type and the first line of the message of another library's exception.

    >>> first_line(OSError("no such split\nand more"))
    'OSError: no such split'
    """
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300] if text else 'no message'}"


@contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raise errors of another library, which have a dozen types, as a UserError that starts with `message`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{message}: {first_line(error)}") from error


# C0 and C1 controls, line separators, marks that reorder the text after them, and lone surrogates.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Escape the control characters of `text`, so that showing it on a terminal cannot move the cursor or set colors.

    >>> print(printable("a \x1b[31mred\x1b[0m dog\n"))
    a \x1b[31mred\x1b[0m dog\n
    """
    return _CONTROL.sub(lambda match: match.group().encode("unicode_escape").decode("ascii"), text)
