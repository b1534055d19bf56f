"""Where dropout is applied, and when it is disabled."""

import dataclasses

import flax.linen as nn
import jax
import numpy as np
import pytest
import reference
from model_cases import (
    apply,
    as_float32,
    model_and_inputs,
    random_params,
    sentences,
    tiny,
)

from transformer_jax.model.transformer import Transformer


def dropouts(config, deterministic=False):
    """Return (module path, input, output) of each dropout in a forward pass."""
    calls = []

    def interceptor(next_function, args, kwargs, context):
        result = next_function(*args, **kwargs)
        if isinstance(context.module, nn.Dropout) and context.method_name == "__call__":
            calls.append(("/".join(context.module.path), np.asarray(args[0]), np.asarray(result)))
        return result

    params, (src, tgt_in) = as_float32(random_params(config)), sentences(config)
    with nn.intercept_methods(interceptor):
        rngs = {"dropout": jax.random.key(0)}
        apply(Transformer(config), params, src, tgt_in, deterministic=deterministic, rngs=rngs)
    return calls


PLACES = {
    "residual_dropout": {
        "dropout",
        *(f"encoder/layer_{i}/connection/dropout" for i in range(2)),
        *(f"decoder/layer_{i}/connection/dropout" for i in range(2)),
    },
    "attention_dropout": {
        *(f"encoder/layer_{i}/self_attention/dropout" for i in range(2)),
        *(f"decoder/layer_{i}/{name}_attention/dropout" for i in range(2) for name in ("self", "cross")),
    },
    "activation_dropout": {
        f"{stack}/layer_{i}/feed_forward/dropout" for stack in ("encoder", "decoder") for i in (0, 1)
    },
}
NO_DROPOUT = dict.fromkeys(PLACES, 0.0)


@pytest.mark.parametrize("field", PLACES)
def test_each_dropout_rate_applies_to_its_modules(field):
    config = tiny(**(NO_DROPOUT | {field: 0.5}))
    calls = dropouts(config)
    changed = {path for path, x, y in calls if not np.array_equal(x, y)}
    assert changed == PLACES[field]
    for path, x, y in calls:
        if path in PLACES[field]:
            np.testing.assert_array_equal(y[y != 0], 2 * x[y != 0])
    if field == "residual_dropout":  # two sums of embeddings and positions, two sub-layers and three, in two layers
        assert sum(path in PLACES[field] for path, _, _ in calls) == 2 + 2 * (2 + 3)
        (src, tgt_in), params = sentences(config), as_float32(random_params(config))
        sums = [x for path, x, _ in calls if path == "dropout"]
        for x, ids, side in zip(sums, (src, tgt_in), ("source", "target"), strict=True):
            np.testing.assert_allclose(x[0], reference.embed(params, config, ids[0], side), rtol=1e-5, atol=1e-5)
    elif field == "attention_dropout":
        assert {x.shape for path, x, _ in calls if path in PLACES[field]} == {(4, 2, 5, 5), (4, 2, 4, 4), (4, 2, 4, 5)}
    else:
        assert {x.shape[-1] for path, x, _ in calls if path in PLACES[field]} == {config.d_ff}


def test_deterministic_disables_dropout():
    rates = dict.fromkeys(PLACES, 0.5)
    assert all(np.array_equal(x, y) for _, x, y in dropouts(tiny(**rates), deterministic=True))
    _, model, params, src, tgt_in = model_and_inputs("paper")
    noisy = Transformer(dataclasses.replace(model.config, **rates))
    expected = apply(model, params, src, tgt_in)
    np.testing.assert_array_equal(apply(noisy, params, src, tgt_in), expected)


def test_dropout_needs_a_key_and_depends_on_it():
    _, model, params, src, tgt_in = model_and_inputs("paper")

    def logits(**rngs):
        return apply(model, params, src, tgt_in, deterministic=False, rngs=rngs)

    with pytest.raises(nn.module.errors.InvalidRngError, match="dropout"):
        logits()
    first, again, other = (logits(dropout=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, apply(model, params, src, tgt_in))
