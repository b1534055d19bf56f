"""Packed rows: each pair is computed as in a separate row, and pairs do not attend to each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from model_cases import CONFIGS, apply, as_float32, random_params, tiny

from transformer_jax.model.positional import LearnedPositions, segment_positions
from transformer_jax.model.transformer import Transformer

# Lengths of source and target of each pair of each row. The rows are of 9 and 8 positions; the third is empty, and one
# source is: its target attends to no source at all.
ROWS = (((3, 2), (4, 4), (1, 2)), ((5, 1), (0, 6)), ())


def packed_rows(config, seed=0):
    """Return `src`, `tgt_in` and their segments."""
    rng = np.random.default_rng(seed)
    words = sorted(set(range(3, config.source_rows)) - {config.pad_id, config.eos_id})
    src, tgt_in = np.full((3, 9), config.pad_id, np.int32), np.full((3, 8), config.pad_id, np.int32)
    segments = np.zeros_like(src), np.zeros_like(tgt_in)
    for row, pairs in enumerate(ROWS):
        at = [0, 0]
        for number, lengths in enumerate(pairs, start=1):
            spans = [slice(start, start + length) for start, length in zip(at, lengths, strict=True)]
            for side, side_segments, span in zip((src, tgt_in), segments, spans, strict=True):
                side[row, span] = rng.choice(words, span.stop - span.start)
                side_segments[row, span] = number
            tgt_in[row, spans[1].start] = config.start_id
            at = [span.stop for span in spans]
    return src, tgt_in, *segments


NAMES = ["paper", "everything else", "tensor2tensor", "learned, offset", "halves, tensor2tensor, offset", "marian"]


@pytest.mark.parametrize("name", NAMES)
def test_packed_pair_equals_the_pair_alone(name):
    """Compare in float64 with the reference, which has no segments."""
    config = dataclasses.replace(CONFIGS[name], dtype="float64", param_dtype="float64")
    params = random_params(CONFIGS[name])
    src, tgt_in, src_segments, tgt_segments = packed_rows(config)
    with jax.enable_x64(True):
        logits = apply(Transformer(config), params, src, tgt_in, src_segments=src_segments, tgt_segments=tgt_segments)
        logits = np.asarray(logits)
    assert np.isfinite(logits).all()
    for row, pairs in enumerate(ROWS):
        for number, lengths in enumerate(pairs, start=1):
            source, target = src[row][src_segments[row] == number], tgt_in[row][tgt_segments[row] == number]
            assert (len(source), len(target)) == lengths
            if not len(source):
                source = np.array([config.pad_id])
            expected = reference.transformer(params, config, source[None], target[None])[0]
            np.testing.assert_allclose(logits[row][tgt_segments[row] == number], expected, rtol=1e-11, atol=1e-11)


def test_encode_and_decode_accept_segments():
    config = tiny()
    model, params = Transformer(config), as_float32(random_params(config))
    src, tgt_in, src_segments, tgt_segments = packed_rows(config)
    logits = apply(model, params, src, tgt_in, src_segments=src_segments, tgt_segments=tgt_segments)
    memory = apply(model, params, src, segments=src_segments, method="encode")
    mask = (tgt_segments[:, :, None] == src_segments[:, None, :]) & (src_segments != 0)[:, None, :]
    again = apply(model, params, tgt_in, memory, mask[:, None], segments=tgt_segments, method="decode")
    np.testing.assert_array_equal(again, logits)
    with pytest.raises(ValueError, match="masks and segments"):
        apply(
            model,
            params,
            src,
            tgt_in,
            src_mask=mask[:, None, :1],
            src_segments=src_segments,
            tgt_segments=tgt_segments,
        )
    with pytest.raises(ValueError, match="segments are given for one side only"):
        apply(model, params, src, tgt_in, src_segments=src_segments)


@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_gradients_between_packed_pairs_are_zero(norm_position):
    """Every position has a distinct token, so the gradient of a table row is the gradient of its position."""
    config = tiny(vocab_size=12, tie_embeddings="none", norm_position=norm_position, attention_bias=True)
    model, params = Transformer(config), as_float32(random_params(config))
    src, src_segments = np.array([[4, 5, 6, 7, 8, 0]]), np.array([[1, 1, 2, 2, 2, 0]])
    tgt_in, tgt_segments = np.array([[1, 2, 3, 9, 10, 0]]), np.array([[1, 1, 1, 2, 2, 0]])
    weights = np.random.default_rng(1).normal(size=12).astype(np.float32)

    def outputs(source_table, target_table):
        changed = params | {"source_embedding": {"table": source_table}, "target_embedding": {"table": target_table}}
        return apply(model, changed, src, tgt_in, src_segments=src_segments, tgt_segments=tgt_segments)[0] @ weights

    tables = params["source_embedding"]["table"], params["target_embedding"]["table"]
    by_source, by_target = jax.jit(jax.jacrev(outputs, argnums=(0, 1)))(*tables)
    assert np.isfinite(by_source).all()
    assert np.isfinite(by_target).all()
    may_source, may_target = np.zeros((2, 6, 12), bool)
    for query in range(6):
        segment = tgt_segments[0, query]
        may_source[query, src[0][(src_segments[0] == segment) & (segment != 0)]] = True
        may_target[query, [tgt_in[0, key] for key in range(query + 1) if tgt_segments[0, key] == segment]] = True
    np.testing.assert_array_equal((by_source != 0).any(-1), may_source)
    np.testing.assert_array_equal((by_target != 0).any(-1), may_target)


def test_positions_restart_in_each_segment():
    segments = jnp.array([[1, 1, 2, 3, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0] * 8, [1, 0, 0, 0, 0, 0, 0, 0]])
    expected = [[0, 1, 0, 0, 1, 2, 0, 0], list(range(8)), [0] * 8, [0] * 8]
    assert segment_positions(segments).tolist() == expected


def test_learned_position_beyond_the_table_is_nan():
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = apply(LearnedPositions(3, 2, offset=1), {"table": table}, np.array([[0, 1, 2]]), method="at")
    np.testing.assert_array_equal(found[0, :2], table[1:])
    assert np.isnan(found[0, 2]).all()
