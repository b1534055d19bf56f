"""Place arrays on many devices: a mesh and one table from parameter path to `PartitionSpec`."""

import re
from functools import lru_cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from transformer_jax.types import RowParts, UserError

AXES = ("data", "fsdp", "tensor")

Tree = TypeVar("Tree")

# The first pattern that matches a parameter's path decides. A parameter without a match is replicated.
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


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, topology: topologies.TopologyDescription | None = None
) -> Mesh:
    """Return all devices as a mesh, or raise UserError if the product of the sizes is not the number of devices.

    Args:
        data: Size of the axis that splits rows. -1 uses the devices that the other axes leave.
        fsdp: Size of the axis that splits rows and parameters.
        tensor: Size of the axis that splits heads, hidden units and vocabularies.
        topology: Absent devices to use instead, which programs can be compiled for.
    """
    count, processes = len(topology.devices) if topology else jax.device_count(), jax.process_count()
    sizes = (count // (fsdp * tensor) if data == -1 else data, fsdp, tensor)
    if sizes[0] * fsdp * tensor != count:
        here = f" ({processes} processes, {jax.local_device_count()} devices in this one)" if processes > 1 else ""
        raise UserError(
            f"training.mesh_data={data}, training.mesh_fsdp={fsdp} and training.mesh_tensor={tensor} do not multiply "
            f"to the {count} devices there are{here}. Choose sizes whose product is {count}; mesh_data -1 takes the "
            "devices that the other axes leave"
        )
    axis_types = (AxisType.Auto,) * len(AXES)
    if topology is not None:
        return Mesh(topologies.make_mesh(topology, sizes, AXES).devices, AXES, axis_types=axis_types)
    return jax.make_mesh(sizes, AXES, axis_types=axis_types)


def partition_spec(path: str) -> PartitionSpec:
    """Return the spec that PARAMETER_SPECS has for a path such as `encoder/layer_0/self_attention/query/kernel`."""
    return next((spec for pattern, spec in PARAMETER_SPECS if re.search(pattern, path)), PartitionSpec())


def tree_shardings(tree: PyTree, mesh: Mesh | AbstractMesh) -> Any:
    """Return a `NamedSharding` per leaf of parameters or of an optimizer state. Its paths end in parameter paths."""

    def leaf_sharding(path: jax.tree_util.KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = partition_spec(name)
        for axis, mesh_axis in enumerate(spec):
            if mesh_axis is not None and leaf.shape[axis] % mesh.shape[mesh_axis]:
                raise UserError(
                    f"training.mesh_{mesh_axis}={mesh.shape[mesh_axis]} does not divide axis {axis} of {name}, which "
                    f"has the shape {tuple(leaf.shape)}. Set it to a divisor of {leaf.shape[axis]}"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that every device holds in full."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows are split over the axes `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def gather_over_fsdp(params: Tree, mesh: Mesh) -> Tree:
    """Gather parameters along `fsdp` before the model uses them, under `jit`; the split along `tensor` remains.

    Without this constraint XLA propagates the split of the embedding table's columns to the activations: every device
    then computes all rows, and activations are communicated instead of parameters.
    """
    if mesh.shape["fsdp"] == 1:
        return params

    def without_fsdp(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(None if axis == "fsdp" else axis for axis in sharding.spec)))

    return jax.lax.with_sharding_constraint(params, jax.tree.map(without_fsdp, tree_shardings(params, mesh)))


def row_multiple(mesh: Mesh, accumulate: int = 1) -> int:
    """Return the number that must divide the rows of a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * accumulate


@lru_cache
def row_parts(mesh: Mesh) -> RowParts:
    """Return the rows of a batch that this process holds: all of them if only the axis `tensor` crosses processes."""
    devices = mesh.devices.reshape(-1, mesh.shape["tensor"])
    mine = [i for i, row in enumerate(devices) if any(d.process_index == jax.process_index() for d in row)]
    return RowParts(tuple(mine), len(devices))


def put_batch(batch: Tree, mesh: Mesh) -> Tree:
    """Turn the NumPy rows of a batch that this process holds (`row_parts`) into global arrays on the mesh."""
    sharding, parts = batch_sharding(mesh), row_parts(mesh)

    def put(rows: np.ndarray) -> jax.Array:
        num_rows = len(rows) // len(parts.mine) * parts.num_parts
        return jax.make_array_from_process_local_data(sharding, rows, (num_rows, *rows.shape[1:]))

    return jax.tree.map(put, batch)


def gather_params(params: Tree, mesh: Mesh) -> Tree:
    """Gather parameters on the first device of each process, if there are several, for work within a process."""
    if jax.process_count() == 1:
        return params
    full = jax.jit(lambda params: params, out_shardings=replicated(mesh))(params)
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), full)


def put_params(params: Tree, shardings: Tree) -> Tree:
    """Place parameters on devices according to their shardings. Every process must pass the complete parameters."""
    if jax.process_count() == 1:
        return jax.device_put(params, shardings, may_alias=False)

    def put(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:  # device_put would send every leaf for comparison
        host = np.array(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(put, params, shardings)
