"""Training on every mesh of eight simulated devices gives equal results, and each array has its sharding."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from tiny_training import MODEL, changed, losses, make_config, train

from transformer_jax.config import ModelConfig
from transformer_jax.model.transformer import abstract_params
from transformer_jax.testing import assert_trees_close, random_batch
from transformer_jax.training.sharding import make_mesh, partition_spec, put_batch, row_multiple, tree_shardings
from transformer_jax.types import UserError

SPECS = {
    "embedding/table": P("tensor", "fsdp"),
    **{f"ATTENTION/{name}/kernel": P("fsdp", "tensor", None) for name in ("query", "key", "value")},
    "ATTENTION/output/kernel": P("tensor", None, "fsdp"),
    "STACK/LAYER/feed_forward/inner/kernel": P("fsdp", "tensor"),
    "STACK/LAYER/feed_forward/inner/bias": P("tensor"),
    "STACK/LAYER/feed_forward/outer/kernel": P("tensor", "fsdp"),
    **dict.fromkeys(("STACK/LAYER/feed_forward/outer/bias", "NORM/scale", "NORM/bias"), P()),
}
VARIANT_SPECS = {
    **{name: spec for name, spec in SPECS.items() if name != "embedding/table"},
    **{f"source_{name}/table": P("tensor", "fsdp") for name in ("embedding", "positions")},
    **{f"target_{name}/table": P("tensor", "fsdp") for name in ("embedding", "positions")},
    "output_projection/kernel": P("fsdp", "tensor"),
    "logits_bias": P("tensor"),
    **{f"ATTENTION/{name}/bias": P("tensor", None) for name in ("query", "key", "value")},
    "ATTENTION/output/bias": P(),
}
VARIANT = ModelConfig.base(
    64, attention_bias=True, logits_bias=True, positions="learned", tie_embeddings="none", final_norm=True
)


def short(path):
    """Return a path without the parts that the sharding rules do not distinguish."""
    path = re.sub(r"^(encoder|decoder)/(layer_\d+/)?\w+_norm/", "NORM/", path)
    path = re.sub(r"^(encoder|decoder)/layer_\d+/(self|cross)_attention/", "ATTENTION/", path)
    return re.sub(r"^(encoder|decoder)/layer_\d+/", "STACK/LAYER/", path)


@pytest.mark.parametrize(
    ("config", "specs"),
    [
        (ModelConfig.base(64), SPECS),
        (VARIANT, VARIANT_SPECS),
    ],
    ids=["base", "variant"],
)
def test_every_parameter_has_the_expected_partition_spec(config, specs):
    leaves = flatten_dict(abstract_params(config), sep="/")
    assert {short(path): partition_spec(path) for path in leaves} == specs
    for path, leaf in leaves.items():
        assert len(partition_spec(path)) in (0, len(leaf.shape)), path


def test_optimizer_state_is_sharded_as_its_parameter():
    assert partition_spec("opt_state/0/mu/embedding/table") == P("tensor", "fsdp")
    assert partition_spec("opt_state/0/count") == P()
    assert partition_spec("step") == P()


def batches(position):
    """Yield the same batches for every mesh: rows for eight devices in two parts."""
    return (random_batch(position + i, rows=16) for i in range(100))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the losses and the state of four steps on one device."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    outcome = train(folder, make_config(), batches=batches)
    return losses(folder), jax.tree.map(np.array, outcome.state)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 8, 1), (1, 1, 8), (4, 2, 1)])
def test_eight_devices_train_like_one_device(sizes, alone, tmp_path):
    assert MODEL.residual_dropout > 0  # the random bits are the same on any mesh
    mesh = make_mesh(*sizes)
    outcome = train(tmp_path / "run", make_config(), mesh=mesh, batches=batches)
    assert len(alone[0]) == 4
    np.testing.assert_allclose(losses(tmp_path / "run"), alone[0], rtol=1e-5)
    assert_trees_close(outcome.state.opt_state, alone[1].opt_state, rtol=1e-3, atol=1e-5)
    # Parameters and both moments of Adam are sharded according to the rules.
    wanted = flatten_dict(tree_shardings(outcome.state.params, mesh))
    adam = outcome.state.opt_state[0]
    for tree in (outcome.state.params, adam.mu, adam.nu):
        for path, leaf in flatten_dict(tree).items():
            assert leaf.sharding.is_equivalent_to(wanted[path], leaf.ndim), path
    table = outcome.state.params["embedding"]["table"]
    assert table.addressable_shards[0].data.shape == (16 // sizes[2], 16 // sizes[1])
    assert adam.count.sharding.is_fully_replicated


def test_accumulation_on_many_devices_gives_the_same_update(tmp_path):
    """Dropout is disabled, because its bits depend on how a batch is split into microbatches."""
    quiet = changed(make_config(num_steps=1), model={"residual_dropout": 0.0})
    parts = changed(quiet, training={"accumulate": 2})
    train(tmp_path / "at_once", quiet, batches=batches)
    train(tmp_path / "parts", parts, mesh=make_mesh(2, 2, 2), batches=batches)
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "at_once"), rtol=1e-5)


def test_data_axis_takes_the_remaining_devices():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(fsdp=2, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert row_multiple(make_mesh(2, 2, 2)) == 4
    assert row_multiple(make_mesh(1, 1, 8), accumulate=3) == 3


@pytest.mark.parametrize("sizes", [(3, 1, 1), (8, 2, 1), (-1, 3, 1), (-1, 16, 1), (1, 1, 1)])
def test_mesh_of_another_number_of_devices_is_rejected(sizes):
    values = "training.mesh_data={}, training.mesh_fsdp={} and training.mesh_tensor={}".format(*sizes)
    message = f"{values} do not multiply to the 8 devices"
    with pytest.raises(UserError, match=message):
        make_mesh(*sizes)


def test_axis_that_does_not_divide_is_rejected():
    tree = {"embedding": {"table": jax.ShapeDtypeStruct((37, 16), jnp.float32)}}
    message = r"training.mesh_tensor=8 does not divide axis 0 of embedding/table, which has the shape \(37, 16\)"
    with pytest.raises(UserError, match=message):
        tree_shardings(tree, make_mesh(1, 1, 8))
    assert tree_shardings(tree, make_mesh(1, 8, 1))["embedding"]["table"].spec == P("tensor", "fsdp")


def test_rows_of_a_batch_are_split_over_data_and_fsdp():
    batch = random_batch(0)
    put = put_batch(batch, make_mesh(2, 2, 2))
    for rows, array in zip(jax.tree.leaves(batch), jax.tree.leaves(put), strict=True):
        np.testing.assert_array_equal(array, rows)
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, rows.shape[1])}
