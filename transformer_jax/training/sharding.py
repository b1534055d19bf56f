"""Where arrays live on many devices: a mesh and one table from parameter path to `PartitionSpec`."""

import re
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.types import RowParts, UserError

AXES = ("data", "fsdp", "tensor")

BATCH_SPEC = PartitionSpec(("data", "fsdp"))  # rows of a batch are split over both

# The first pattern found in a parameter's path decides; what none names is kept whole on every device.
PARAMETER_SPECS = (
    (r"(embedding|positions)/table$", PartitionSpec("tensor", "fsdp")),
    (r"output_projection/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"logits_bias$", PartitionSpec("tensor")),
    (r"(query|key|value)/kernel$", PartitionSpec("fsdp", "tensor", None)),
    (r"(query|key|value)/bias$", PartitionSpec("tensor", None)),
    (r"attention/output/kernel$", PartitionSpec("tensor", None, "fsdp")),
    (r"feed_forward/inner/kernel$", PartitionSpec("fsdp", "tensor")),
    (r"feed_forward/inner/bias$", PartitionSpec("tensor")),
    (r"feed_forward/outer/kernel$", PartitionSpec("tensor", "fsdp")),
)


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """All devices as a mesh with the axes `data`, `fsdp`, `tensor`; data -1 takes what the others leave.

    Raises:
        UserError: the axes do not multiply to the number of devices.
    """
    count = jax.device_count()
    sizes = (count // (fsdp * tensor) if data == -1 else data, fsdp, tensor)
    if sizes[0] * fsdp * tensor != count:
        raise UserError(
            f"training.mesh_data {data}, mesh_fsdp {fsdp} and mesh_tensor {tensor} do not multiply to the "
            f"{count} devices there are{_in_processes()}"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _in_processes() -> str:
    count = jax.process_count()
    return f" ({count} processes, {jax.local_device_count()} devices in this one)" if count > 1 else ""


def partition_spec(path: str) -> PartitionSpec:
    """What the table says of a path such as `encoder/layer_0/self_attention/query/kernel`, or one that ends so."""
    return next((spec for pattern, spec in PARAMETER_SPECS if re.search(pattern, path)), PartitionSpec())


def tree_shardings(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A `NamedSharding` for each leaf of a tree of parameters, or of an optimizer state, whose paths end alike.

    Raises:
        UserError: a mesh axis does not divide the array's axis it splits; both are named.
    """

    def leaf_sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
        spec = partition_spec(name)
        for axis, mesh_axis in enumerate(spec):
            if mesh_axis is not None and leaf.shape[axis] % mesh.shape[mesh_axis]:
                raise UserError(
                    f"training.mesh_{mesh_axis} {mesh.shape[mesh_axis]} does not divide axis {axis} of {name}, "
                    f"which has the shape {tuple(leaf.shape)}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over the axes `data` and `fsdp`."""
    return NamedSharding(mesh, BATCH_SPEC)


def gather_over_fsdp(params: Any, mesh: Mesh) -> Any:
    """Parameters as the model is to use them, under `jit`: whole along `fsdp`, split along `tensor` alone.

    Left alone, XLA spreads the split of the embedding table's columns to the activations, so that every device computes
    all rows, and activations travel in place of parameters.
    """

    def gather(leaf: Any, sharding: NamedSharding) -> Any:
        spec = PartitionSpec(*(None if axis == "fsdp" else axis for axis in sharding.spec))
        return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(gather, params, tree_shardings(params, mesh)) if mesh.shape["fsdp"] > 1 else params


def row_multiple(mesh: Mesh, accumulate: int = 1) -> int:
    """The rows of a batch must be a multiple of this."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * accumulate


@lru_cache
def row_parts(mesh: Mesh) -> RowParts:
    """The rows of a batch that the devices of this process hold; all of them where only `tensor` crosses processes."""
    devices = mesh.devices.reshape(-1, mesh.shape["tensor"])
    mine = [i for i, row in enumerate(devices) if any(d.process_index == jax.process_index() for d in row)]
    return RowParts(tuple(mine), len(devices))


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """A tree of this process's rows (NumPy), those of `row_parts`, as global arrays on the mesh."""
    sharding, parts = batch_sharding(mesh), row_parts(mesh)

    def put(rows: Any) -> jax.Array:
        rows = np.asarray(rows)
        num_rows = len(rows) // len(parts.mine) * parts.num_parts
        return jax.make_array_from_process_local_data(sharding, rows, (num_rows, *rows.shape[1:]))

    return jax.tree.map(put, batch)


def gather_params(params: Any, mesh: Mesh) -> Any:
    """Parameters for work that each process does by itself: whole on its first device where there are several."""
    if jax.process_count() == 1:
        return params
    whole = jax.jit(lambda params: params, out_shardings=replicated(mesh))(params)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), whole)


def put_params(params: Any, shardings: Any) -> Any:
    """Parameters that every process has whole, copied to where the shardings say."""
    if jax.process_count() == 1:
        return jax.device_put(params, shardings, may_alias=False)

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        host = np.array(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, params, shardings)
