"""Count what each device of a mesh stores and sends in a training step, from the configuration alone."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from transformer_jax.config import Config
from transformer_jax.model.transformer import Transformer
from transformer_jax.training.accumulation import sum_dtype
from transformer_jax.training.optimizer import make_optimizer
from transformer_jax.training.sharding import AXES, tree_shardings
from transformer_jax.training.step import TrainState, init_rng, init_state


class DeviceBytes(NamedTuple):
    """Bytes that one device stores, independent of the batch.

    Activations are not counted; `memory_analysis()` of a compiled step reports them.
    """

    parameters: int
    gradients: int
    """From the backward pass to the update."""
    optimizer: int
    """Adam's two moments and the counts of steps."""


class Traffic(NamedTuple):
    """Bytes of the arrays that a device exchanges in a step, as XLA compiles it.

    Scalars and the sums of softmax and LayerNorm are not counted; they are below one percent.
    """

    data_all_reduce: int
    """Gradients, of the device's part of the parameters. Those of a table that serves in several places are added up
    after they are reduced, so they count once for each."""
    fsdp_all_gather: int
    """Parameters, once: what the forward pass gathers the backward pass uses again."""
    fsdp_reduce_scatter: int
    """The gradients of those (on CPUs an all-reduce and a cut); of what is not split, an all-reduce."""
    tensor_all_reduce: int
    """Activations: after each attention and feed-forward network; backward, after the three or four matrices that a
    sublayer starts with; after the embeddings, and before the logits, backward."""

    def sent(self, data: int = 1, fsdp: int = 1, tensor: int = 1) -> dict[str, float]:
        """Return the bytes that a device sends along each axis with ring algorithms.

        A ring of n devices sends (n - 1) / n of the bytes, and an all-reduce twice that.
        """
        share = {"data": (data - 1) / data, "fsdp": (fsdp - 1) / fsdp, "tensor": (tensor - 1) / tensor}
        return {
            "data": 2 * share["data"] * self.data_all_reduce,
            "fsdp": share["fsdp"] * (self.fsdp_all_gather + self.fsdp_reduce_scatter),
            "tensor": 2 * share["tensor"] * self.tensor_all_reduce,
        }


def bytes_per_device(config: Config, data: int = 1, fsdp: int = 1, tensor: int = 1) -> DeviceBytes:
    """Return what a device stores on a mesh of these sizes.

    Raises:
        UserError: a mesh axis does not divide an axis of an array.
    """
    state, shardings = _state(config, data, fsdp, tensor)
    params, opt_state = (
        sum(jax.tree.leaves(jax.tree.map(_shard_bytes, one, sharding)))
        for one, sharding in ((state.params, shardings.params), (state.opt_state, shardings.opt_state))
    )
    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, sum_dtype(leaf)), state.params)
    gradient_bytes = sum(jax.tree.leaves(jax.tree.map(_shard_bytes, gradients, shardings.params)))
    return DeviceBytes(params, gradient_bytes, opt_state)


def traffic_per_step(
    config: Config, rows: int, src_length: int, tgt_length: int, data: int = 1, fsdp: int = 1, tensor: int = 1
) -> Traffic:
    """Return what a device exchanges in a step of `rows` rows over all devices.

    Raises:
        UserError: a mesh axis does not divide an axis of an array.
    """
    state, shardings = _state(config, data, fsdp, tensor)
    model, gradients, split, whole = config.model, 0, 0, 0
    for (path, leaf), sharding in zip(
        jax.tree_util.tree_leaves_with_path(state.params), jax.tree.leaves(shardings.params), strict=True
    ):
        held = _shard_bytes(leaf, sharding) * _uses(path, model.tie_embeddings)
        gradients += held
        if "fsdp" in sharding.spec:
            split += _shard_bytes(leaf, sharding) * fsdp
        whole += held * (fsdp if "fsdp" in sharding.spec else 1)
    encoder, decoder = model.encoder.num_layers, model.decoder.num_layers
    # Encoder: 2 forward, 3 + 1 backward a layer. Decoder: 3 forward, 3 + 1 + 1 backward, and keys and values to memory.
    positions = (6 * encoder + 2 * decoder + 1) * src_length + (8 * decoder + 2) * tgt_length
    activations = rows // (data * fsdp) * positions * model.d_model * jnp.dtype(model.dtype).itemsize
    return Traffic(
        data_all_reduce=gradients if data > 1 else 0,
        fsdp_all_gather=split if fsdp > 1 else 0,
        fsdp_reduce_scatter=whole if fsdp > 1 else 0,
        tensor_all_reduce=activations if tensor > 1 else 0,
    )


def _uses(path: Any, tie_embeddings: str) -> int:
    """Return the number of places where a parameter is used."""
    name = str(path[0].key)
    if name == "embedding":
        return 3
    return 2 if name == "target_embedding" and tie_embeddings == "target" else 1


def _state(config: Config, data: int, fsdp: int, tensor: int) -> tuple[TrainState, Any]:
    """Return the shapes of the state, and the shardings of its arrays."""
    optimizer = make_optimizer(config.training, config.model.d_model)
    state = jax.eval_shape(lambda: init_state(Transformer(config.model), optimizer, init_rng(0)))
    return state, tree_shardings(state, AbstractMesh((data, fsdp, tensor), AXES))


def _shard_bytes(leaf: Any, sharding: Any) -> int:
    return math.prod(sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
