"""What a compiled program does is counted from its text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformer_jax.accelerators.program import read_program
from transformer_jax.training.sharding import make_mesh

LOOP = """
HloModule step, is_scheduled=true

%sliced (p0: f32[100,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,8}
}

%body (state: (s32[], f32[100,8], f32[8,16])) -> (s32[], f32[100,8], f32[8,16]) {
  %state = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = f32[100,8]{1,0} get-tuple-element(%state), index=1
  %w = f32[8,16]{1,0} get-tuple-element(%state), index=2
  %row = f32[1,8]{1,0} fusion(%rows, %i), kind=kLoop, calls=%sliced
  %dot = f32[1,16]{1,0} dot(%row, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) tuple(%i, %rows, %w)
}

%condition (state.1: (s32[], f32[100,8], f32[8,16])) -> pred[] {
  %state.1 = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (a: f32[100,8], b: f32[8,16]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  %start = s32[] constant(0)
  %init = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) tuple(%start, %a, %b)
  %while = (s32[], f32[100,8]{1,0}, f32[8,16]{1,0}) while(%init), condition=%condition, body=%body, TRIPS
  %copy = f32[100,8]{1,0} copy(%a)
  %fast = f32[100,8]{1,0:T(8,128)S(1)} negate(%a)
  %sum = f32[100,8]{1,0} all-reduce(%copy), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  ROOT %out = f32[100,8]{1,0} all-gather(%sum), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"100"}}')


def test_kernels_of_loops_slices_and_collectives_are_counted():
    program = read_program(LOOP, {"data": 4, "fsdp": 1, "tensor": 2})
    kinds = {kernel.kind: kernel for kernel in program.kernels}
    assert {kind: kernel.times for kind, kernel in kinds.items()} == {
        "fusion": 100,
        "matrix product": 100,
        "copy": 1,
        "negate": 1,
    }
    assert program.launches == 202
    assert kinds["matrix product"].operations == 2 * 8 * 16
    assert kinds["matrix product"].bytes == 4 * (8 + 8 * 16 + 16)
    assert kinds["fusion"].bytes == 32 + 4 + 32  # a slice of the rows, its number, and the result
    assert kinds["negate"].bytes == 3200  # the result stays on the chip
    assert [(one.kind, one.bytes, one.axes) for one in program.collectives] == [
        ("all-reduce", 3200, ("data",)),
        ("all-gather", 3200, ("tensor",)),
    ]


@pytest.mark.parametrize(("m", "k", "n", "batch"), [(64, 32, 16, ()), (24, 40, 56, (3,))])
def test_operations_of_a_compiled_product_are_2mkn(m, k, n, batch):
    a, b = (jax.ShapeDtypeStruct((*batch, *shape), jnp.float32) for shape in ((m, k), (k, n)))
    program = read_program(jax.jit(jnp.matmul).lower(a, b).compile().as_text(), {"data": 1})
    assert sum(kernel.operations * kernel.times for kernel in program.kernels) == 2 * m * k * n * max(1, *batch, 1)


@pytest.mark.parametrize(("spec", "axes"), [("data", ("data",)), ("tensor", ("tensor",))])
def test_axes_of_a_compiled_all_reduce_are_named(spec, axes):
    mesh = make_mesh(4, 1, 2)
    x = jax.ShapeDtypeStruct((64, 8), np.float32, sharding=NamedSharding(mesh, PartitionSpec(spec)))
    text = jax.jit(lambda x: jnp.sum(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec())).lower(x).compile()
    collectives = read_program(text.as_text(), dict(mesh.shape)).collectives
    assert [(one.kind, one.bytes, one.axes) for one in collectives] == [("all-reduce", 32, axes)]
