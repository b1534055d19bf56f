"""Where arrays live on many devices: a mesh and one table from parameter path to `PartitionSpec`."""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import UserError

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
            f"{count} devices there are"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(path: str) -> PartitionSpec:
    """What the table says of a path such as `encoder/layer_0/self_attention/query/kernel`, or one that ends so."""
    return next((spec for pattern, spec in PARAMETER_SPECS if re.search(pattern, path)), PartitionSpec())


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """A `NamedSharding` for each leaf of a tree of parameters, or of an optimiser state, whose paths end alike.

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


def row_multiple(mesh: Mesh, accumulate: int = 1) -> int:
    """The rows of a batch must be a multiple of this."""
    return mesh.shape["data"] * mesh.shape["fsdp"] * accumulate


def put_batch(batch: Any, mesh: Mesh) -> Any:
    """A tree of this process's rows (NumPy) as global arrays on the mesh."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), batch)
