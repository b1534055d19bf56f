"""Masks of attention (paper section 3.2.3). True = may attend; masks broadcast to `b h t s`."""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int


@struct.dataclass
class PaddedMask:
    """A mask of rows whose padding comes last, which a fused attention kernel computes from a number per row.

    Kernels that use the description do not read `mask`. They let a padding query attend to padding, and a row of
    nothing but padding to its first key.
    """

    mask: Bool[Array, " b #h #t s"]
    key_lengths: Int[Array, " b"] | None = None
    """Number of keys of each row before its padding. None: a query may attend to keys that are padding."""
    is_causal: bool = struct.field(pytree_node=False, default=False)
    """Whether a query may attend only to itself and to earlier positions."""


def padding_mask(tokens: Int[Array, "b s"], pad_id: int) -> Bool[Array, "b 1 1 s"]:
    """Let every query attend to every key that is not padding.

    padding_mask([[5, 6, PAD]], PAD)[0, 0] is  1 1 0

    Args:
        tokens: Token ids of the keys.
        pad_id: Token id of padding.
    """
    return (tokens != pad_id)[:, None, None, :]


def causal_mask(length: int) -> Bool[Array, "1 1 t t"]:
    """Let each position attend to itself and to earlier positions (row = query, column = key).

    causal_mask(3)[0, 0] is  1 0 0
                             1 1 0
                             1 1 1
    """
    return jnp.tril(jnp.ones((length, length), dtype=bool))[None, None]


def target_mask(tgt_in: Int[Array, "b t"], pad_id: int) -> Bool[Array, "b 1 t t"]:
    """Let each position attend to itself and to earlier positions that are not padding.

    The first key is the start token and may always be attended to, even if its id is that of the padding.

    target_mask([[BOS, 5, PAD]], PAD)[0, 0] is  1 0 0
                                                1 1 0
                                                1 1 0

    Args:
        tgt_in: Token ids that the decoder reads.
        pad_id: Padding.
    """
    length = tgt_in.shape[1]
    is_start = (jnp.arange(length) == 0)[None, None, None, :]
    return causal_mask(length) & (padding_mask(tgt_in, pad_id) | is_start)


def segment_mask(queries: Int[Array, "b t"], keys: Int[Array, "b s"]) -> Bool[Array, "b 1 t s"]:
    """Let each sentence of a packed row attend only to its own sentence; padding, segment 0, attends to nothing.

    segment_mask([[1, 2, 2, 0]], [[1, 1, 2, 0]])[0, 0] is  1 1 0 0
                                                           0 0 1 0
                                                           0 0 1 0
                                                           0 0 0 0

    Args:
        queries: Segment of each query, from 1; 0 for padding.
        keys: Segment of each key, from 1; 0 for padding.
    """
    return ((queries[:, :, None] == keys[:, None, :]) & (keys != 0)[:, None, :])[:, None]


def right_padded_masks(src: Int[Array, "b s"], tgt_in: Int[Array, "b t"], pad_id: int) -> tuple[PaddedMask, PaddedMask]:
    """Return the masks of source and target for rows whose padding comes last, such as those of `make_batch`."""
    src_mask = padding_mask(src, pad_id)
    src_lengths = jnp.maximum(1, jnp.sum(src_mask[:, 0, 0], axis=1, dtype=jnp.int32))
    return PaddedMask(src_mask, src_lengths), PaddedMask(target_mask(tgt_in, pad_id), is_causal=True)
