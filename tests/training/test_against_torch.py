"""Loss, schedule, optimizer, dropout and initial parameters against PyTorch, an independent implementation."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax.config import ModelConfig, TrainingConfig
from transformer_jax.model.attention import MultiHeadAttention
from transformer_jax.model.initializers import xavier_uniform
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.training.loss import LossSpec, cross_entropy
from transformer_jax.training.optimizer import make_optimizer, noam_schedule

V, PAD = 9, 2


@pytest.fixture(scope="module")
def torch(optional_package):
    module = optional_package("torch")
    module.manual_seed(0)
    return module


# --------------------------------------------------------------------------------------------------- label smoothing


def example():
    """Return logits `[n, v]` in float64 and targets `[n]`, some of which are padding."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, 40)
    targets[::5] = PAD
    return 3 * rng.normal(size=(40, V)), targets


def loss_and_gradient(smoothing, mass):
    """Return loss and gradient of `cross_entropy` in float64."""
    logits, targets = example()
    with jax.enable_x64(True):

        def loss_sum(logits):
            tokens = jnp.asarray(targets, jnp.int32)[None]
            return cross_entropy(logits[None], tokens, tokens != PAD, LossSpec(smoothing, mass, PAD)).loss_sum

        loss, gradient = jax.value_and_grad(loss_sum)(jnp.asarray(logits))
        return float(loss), np.asarray(gradient)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_label_smoothing_over_all_equals_torch_cross_entropy_loss(torch, smoothing):
    logits, targets = (torch.tensor(array) for array in example())
    logits.requires_grad_(True)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=PAD, reduction="sum")
    expected = criterion(logits, targets)
    expected.backward()
    loss, gradient = loss_and_gradient(smoothing, "all")
    np.testing.assert_allclose(loss, expected.item(), rtol=1e-12)
    np.testing.assert_allclose(gradient, logits.grad.numpy(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
@pytest.mark.parametrize("mass", ["non_target", "non_target_non_pad"])
def test_label_smoothing_equals_torch_kl_divergence(torch, mass, smoothing):
    """The cross-entropy is the Kullback-Leibler divergence plus the entropy of the smoothed distribution."""
    logits, targets = (torch.tensor(array) for array in example())
    logits.requires_grad_(True)
    q = torch.full((len(targets), V), smoothing / (V - 1 if mass == "non_target" else V - 2), dtype=torch.float64)
    if mass == "non_target_non_pad":
        q[:, PAD] = 0
    q.scatter_(1, targets[:, None], 1 - smoothing)
    counted = targets != PAD
    q = q[counted]
    np.testing.assert_allclose(q.sum(dim=1).numpy(), 1, rtol=1e-12)
    divergence = torch.nn.KLDivLoss(reduction="sum")(torch.log_softmax(logits[counted], dim=-1), q)
    divergence.backward()
    loss, gradient = loss_and_gradient(smoothing, mass)
    np.testing.assert_allclose(loss, divergence.item() - torch.special.xlogy(q, q).sum().item(), rtol=1e-12)
    np.testing.assert_allclose(gradient, logits.grad.numpy(), rtol=1e-10, atol=1e-14)


# -------------------------------------------------------------------------------------------- schedule and optimizer


def equation_3(d_model, warmup_steps):
    """Return equation 3 as a function of the number of completed updates, as torch expects it."""
    return lambda done: d_model**-0.5 * min((done + 1) ** -0.5, (done + 1) * warmup_steps**-1.5)


@pytest.mark.parametrize(("d_model", "warmup_steps"), [(512, 4000), (16, 7)])
def test_noam_equals_torch_lambda_lr(torch, d_model, warmup_steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, equation_3(d_model, warmup_steps))
    expected = []
    for _ in range(3 * warmup_steps):
        expected += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    rates = noam_schedule(d_model, warmup_steps)(np.arange(3 * warmup_steps))
    np.testing.assert_allclose(rates, expected, rtol=3e-6)


@pytest.mark.parametrize(
    ("training", "rtol"),
    [
        # A rate that float32 holds exactly, as rates are computed in float32.
        (TrainingConfig(schedule="constant", peak_learning_rate=2.0**-6, warmup_steps=1), 1e-12),
        (TrainingConfig(schedule="constant", peak_learning_rate=0.5, warmup_steps=1, adam_beta2=0.997), 1e-12),
        (TrainingConfig(schedule="constant", peak_learning_rate=0.5, warmup_steps=1, adam_epsilon=1e-2), 1e-12),
        (TrainingConfig(warmup_steps=6), 1e-6),
    ],
    ids=["paper", "beta2", "epsilon", "noam"],
)
def test_adam_equals_torch(torch, training, rtol):
    rng = np.random.default_rng(0)
    start = {"matrix": rng.normal(size=(4, 3)), "small": 1e-3 * rng.normal(size=5), "number": np.array(2.0)}
    gradients = [{name: rng.normal(size=value.shape) * 0.1 for name, value in start.items()} for _ in range(20)]
    for gradient in gradients:
        gradient["small"] *= 1e-9  # of the size of epsilon

    theirs = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    noam = training.schedule == "noam"
    adam = torch.optim.Adam(
        theirs.values(),
        lr=1.0 if noam else training.peak_learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
    )
    rate = equation_3(16, training.warmup_steps) if noam else lambda done: 1.0
    schedule = torch.optim.lr_scheduler.LambdaLR(adam, rate)
    with jax.enable_x64(True):
        optimizer = make_optimizer(training, d_model=16)
        ours = jax.tree.map(jnp.asarray, start)
        state = optimizer.init(ours)
        for gradient in gradients:
            for name, value in gradient.items():
                theirs[name].grad = torch.tensor(value)
            adam.step()
            schedule.step()
            updates, state = optimizer.update(jax.tree.map(jnp.asarray, gradient), state, ours)
            ours = optax.apply_updates(ours, updates)
            for name, value in ours.items():
                assert value.dtype == np.float64
                np.testing.assert_allclose(value, theirs[name].detach().numpy(), rtol, atol=rtol, err_msg=name)


# ---------------------------------------------------------------------------------------------------------- dropout


def check_dropout(x, y, rate):
    """Check within 5 standard deviations that elements are 0 with probability `rate`, else scaled by 1 / (1 - rate)."""
    there = x != 0  # ReLU and masks leave zeros
    x, y = x[there].astype(np.float64), y[there].astype(np.float64)
    assert x.size > 1000
    kept = y != 0
    np.testing.assert_allclose(y[kept], x[kept] / (1 - rate), rtol=1e-5)
    assert abs((~kept).sum() - rate * x.size) < 5 * math.sqrt(x.size * rate * (1 - rate))
    assert abs((y - x).sum()) < 5 * math.sqrt(rate / (1 - rate) * (x**2).sum())


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_dropout_keeps_the_mean_at_every_place(torch, rate):
    """Compare embedding sums, sub-layer outputs, attention weights and activations with torch.nn.Dropout."""
    fields = ("residual_dropout", "attention_dropout", "activation_dropout")
    config = ModelConfig(vocab_size=50, d_model=32, num_layers=1, num_heads=4, d_ff=64, **dict.fromkeys(fields, rate))
    rng = np.random.default_rng(1)
    src, tgt_in = (jnp.asarray(rng.integers(4, 50, (8, length)), jnp.int32) for length in (12, 10))
    model = Transformer(config)
    params = jax.tree.map(lambda leaf: 0.3 * rng.normal(size=leaf.shape).astype(np.float32), abstract_params(config))
    places = []

    @jax.jit
    def forward(params):
        seen = []

        def interceptor(next_function, args, kwargs, context):
            result = next_function(*args, **kwargs)
            if isinstance(context.module, nn.Dropout) and context.method_name == "__call__":
                places.append("/".join(context.module.path))
                seen.append((args[0], result))
            return result

        with nn.intercept_methods(interceptor):
            model.apply({"params": params}, src, tgt_in, deterministic=False, rngs={"dropout": jax.random.key(2)})
        return seen

    seen = jax.device_get(forward(params))
    assert places.count("dropout") == 2  # the sums of embeddings and positions of both sides
    assert sum(path.endswith("connection/dropout") for path in places) == 2 + 3
    assert sum(path.endswith("attention/dropout") for path in places) == 1 + 2
    assert sum(path.endswith("feed_forward/dropout") for path in places) == 2
    assert len(places) == 12
    for x, y in seen:
        check_dropout(x, y, rate)
        check_dropout(x, torch.nn.Dropout(rate)(torch.tensor(x)).numpy(), rate)


# ------------------------------------------------------------------------------------------------ initial parameters


def check_same_uniform(ours, theirs):
    """Check that two samples share a uniform distribution around 0, by bounds and variances (5 standard errors)."""
    ours, theirs = np.asarray(ours, np.float64).ravel(), theirs.detach().numpy().astype(np.float64).ravel()
    error = math.sqrt(0.8 / ours.size + 0.8 / theirs.size)  # the kurtosis of a uniform distribution is 1.8
    assert abs(ours.var() / theirs.var() - 1) < 5 * error
    assert abs(np.abs(ours).max() / np.abs(theirs).max() - 1) < 0.01


@pytest.mark.parametrize(("fan_in", "fan_out"), [(64, 64), (64, 192), (256, 64)])
def test_xavier_uniform_equals_torch(torch, fan_in, fan_out):
    ours = xavier_uniform(fan_in, fan_out)(jax.random.key(0), (fan_in, fan_out))
    check_same_uniform(ours, torch.nn.init.xavier_uniform_(torch.empty(fan_out, fan_in)))


@functools.cache
def initial_layers(initialization):
    config = ModelConfig(
        vocab_size=20,
        d_model=64,
        num_layers=1,
        num_heads=4,
        d_ff=160,
        attention_bias=True,
        initialization=initialization,
    )
    tokens = jnp.ones((1, 2), jnp.int32)
    params = jax.jit(Transformer(config).init)(jax.random.key(3), tokens, tokens)["params"]
    return params["encoder"]["layer_0"], params["decoder"]["layer_0"]


def test_torch_fused_equals_initial_torch_multihead_attention(torch):
    fused = torch.nn.MultiheadAttention(64, 4)
    encoder_layer, decoder_layer = initial_layers("torch_fused")
    separate, _ = initial_layers("tensor2tensor")
    for attention in (encoder_layer["self_attention"], decoder_layer["cross_attention"]):
        for name in ("query", "key", "value"):
            check_same_uniform(attention[name]["kernel"], fused.in_proj_weight)
            assert not np.any(attention[name]["bias"])
    assert not fused.in_proj_bias.any()
    for name in ("query", "key", "value"):
        check_same_uniform(separate["self_attention"][name]["kernel"], math.sqrt(2) * fused.in_proj_weight)


def test_torch_fused_equals_initial_torch_transformer(torch):
    model = torch.nn.Transformer(64, 4, 1, 1, dim_feedforward=160, batch_first=True)
    theirs, ours = model.encoder.layers[0], initial_layers("torch_fused")[0]
    check_same_uniform(ours["self_attention"]["query"]["kernel"], theirs.self_attn.in_proj_weight)
    check_same_uniform(ours["self_attention"]["output"]["kernel"], theirs.self_attn.out_proj.weight)
    check_same_uniform(ours["feed_forward"]["inner"]["kernel"], theirs.linear1.weight)
    check_same_uniform(ours["feed_forward"]["outer"]["kernel"], theirs.linear2.weight)


# -------------------------------------------------------------------------------------------------- the keys' biases


def test_key_bias_does_not_change_attention(torch):
    """A key bias adds one constant to all scores of a query, which leaves the softmax and all gradients unchanged."""
    rng = np.random.default_rng(4)
    x, memory = rng.normal(size=(2, 3, 8)), rng.normal(size=(2, 5, 8))
    with jax.enable_x64(True):
        module = MultiHeadAttention(8, 2, 4, 4, use_bias=True, dtype="float64", param_dtype="float64")
        inputs = jnp.asarray(x), jnp.asarray(memory)
        params = module.init(jax.random.key(0), *inputs)

        def loss(params):
            return jnp.sum(module.apply(params, *inputs) ** 2)

        gradient = jax.grad(loss)(params)["params"]
        moved = jax.tree.map(jnp.asarray, params)
        moved["params"]["key"]["bias"] += 3.0
        np.testing.assert_allclose(module.apply(moved, *inputs), module.apply(params, *inputs), rtol=1e-10)
    assert np.abs(gradient["key"]["bias"]).max() < 1e-12
    assert np.abs(gradient["query"]["bias"]).max() > 1e-3
    assert np.abs(gradient["value"]["bias"]).max() > 1e-3

    theirs = torch.nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    keys = torch.tensor(memory)
    theirs(torch.tensor(x), keys, keys)[0].square().sum().backward()
    query, key, value = theirs.in_proj_bias.grad.chunk(3)
    assert key.abs().max() < 1e-12
    assert min(query.abs().max(), value.abs().max()) > 1e-3
