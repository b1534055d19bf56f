"""Compile a recipe's programs for accelerators that are not here, and report whether they fit and how fast they are."""

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.stages import Lowered
from jax.typing import DTypeLike

from transformer_jax.accelerators.cost import training_flops
from transformer_jax.accelerators.program import Program, read_program
from transformer_jax.accelerators.targets import COMPILER_OPTIONS, Target
from transformer_jax.config import Config
from transformer_jax.data.batching import Shape, choose_shapes
from transformer_jax.decoding.decode import prepare, search, search_spec
from transformer_jax.model.transformer import Transformer, abstract_params
from transformer_jax.runtime.fields import require
from transformer_jax.training.loop import abstract_state, jit_step
from transformer_jax.training.sharding import AXES, batch_sharding, make_mesh, replicated, row_multiple
from transformer_jax.training.step import dropout_rng
from transformer_jax.types import Batch

FLOPS_SHARE, BANDWIDTH_SHARE = 0.65, 0.85
"""Share of a device's peak rates that large matrix products and large copies reach. Assumed, not measured."""

# log(source tokens) of 3,003 sentences of newstest2014 (words x 1.25), and log(target / source) (German words x 1.35):
# mean and standard deviation. The lengths of a recipe whose corpus is not here.
_LOG_LENGTH, _LOG_RATIO, _NUM_PAIRS = (3.125, 0.509), (-0.010, 0.185), 100_000


@dataclasses.dataclass(frozen=True)
class Report:
    """What compiling a program for one batch shape shows. Bytes are those of one device."""

    rows: int
    src_length: int
    tgt_length: int
    fits: bool
    argument_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    memory_bytes: int = 0
    """The device's memory."""
    needed_bytes: int = 0
    """Arguments, temporaries, results and code."""
    compile_seconds: float = 0.0
    kernels: int = 0
    """Kernels or fusions that a run of the program starts."""
    copies: int = 0
    matrix_flops: float = 0.0
    bytes_moved: float = 0.0
    collective_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    """{"kind over axes": bytes of the arrays}."""
    estimated_seconds: float = 0.0
    """A roofline: for each kernel the longer of its operations and its bytes at the assumed shares of the peak rates;
    launches; and rings of the collectives, without overlap. An estimate, not a measurement."""
    estimated_mfu: float = 0.0
    """Operations of the model (`training_flops`) in the estimated time, as a share of the peak."""
    estimated_tokens_per_second: float = 0.0
    """Target tokens, padding included, of all devices."""


def typical_shapes(config: Config) -> tuple[Shape, ...]:
    """Return the batch shapes of a corpus with sentence lengths like those of WMT14 English-German."""
    data, rng = config.data, np.random.default_rng(0)
    source = rng.lognormal(*_LOG_LENGTH, _NUM_PAIRS)
    target = source * rng.lognormal(*_LOG_RATIO, _NUM_PAIRS)
    lengths = [np.rint(side).astype(np.int64).clip(2) for side in (source, target)]
    kept = np.maximum(*lengths) <= data.max_length
    if data.batching == "packed":
        length = min(data.packed_length, data.batch_tokens)
        return (Shape(data.batch_tokens // length, length, length),)
    return choose_shapes(lengths[0][kept], lengths[1][kept], data.batch_tokens, data.max_shapes)


def compile_training(config: Config, target: Target, shapes: Sequence[Shape] = ()) -> Iterator[Report]:
    """Compile the training step for each batch shape, with the mesh of the recipe.

    Args:
        config: The recipe.
        target: The absent accelerators.
        shapes: Batch shapes over all devices. Empty: `typical_shapes`.

    Raises:
        UserError: The compiler is missing, or the mesh does not fit the devices or the model.
    """
    training = config.training
    devices = make_mesh(training.mesh_data, training.mesh_fsdp, training.mesh_tensor, target.topology())
    state = abstract_state(config, devices)
    step = jit_step(config, devices, jax.tree.map(lambda leaf: leaf.sharding, state))
    key = jax.eval_shape(lambda: dropout_rng(0, training.dropout_generator))
    place = replicated(devices)
    controls = _abstract(key.shape, key.dtype, place), _abstract((), jnp.bool_, place), None
    multiple = row_multiple(devices, training.accumulate)
    for shape in shapes or typical_shapes(config):
        shape = shape._replace(rows=-(-shape.rows // multiple) * multiple)
        src, tgt = (_abstract((shape.rows, n), jnp.int32, batch_sharding(devices)) for n in shape[1:])
        segments = (src, tgt) if config.data.batching == "packed" else (None, None)
        flops = shape.rows * np.dot(shape[1:], training_flops(config.model, *shape[1:]))
        yield _report(step.lower(state, Batch(src, tgt, tgt, *segments), controls), target, devices, shape, flops)


def compile_decoding(config: Config, target: Target, shape: Shape) -> Report:
    """Compile the search of `config.decoding` for one batch of sources, on one device of the target."""
    device = Mesh(np.array(target.topology().devices[:1]).reshape(1, 1, 1), AXES)
    place = replicated(device)
    decoding, max_length = config.decoding, shape.src_length + config.decoding.max_length_offset
    prepare_fn = partial(prepare, config=config.model, quantization=decoding.quantization)
    params = jax.eval_shape(prepare_fn, abstract_params(config.model))
    spec = search_spec(
        config.model,
        decoding,
        max_lengths=_abstract((shape.rows,), jnp.int32, place),
        max_length=max_length,
        forbidden_ids=decoding.forbidden_ids,
    )
    lowered = search.lower(
        (jax.tree.map(lambda leaf: leaf.update(sharding=place), params),),
        _abstract((shape.rows, shape.src_length), jnp.int32, place),
        spec,
        models=(Transformer(config.model),),
        quantization=decoding.quantization,
    )
    return _report(lowered, target, device, shape._replace(tgt_length=max_length), 0.0)


def largest_batch(config: Config, target: Target) -> int:
    """Return a number of batch tokens whose longest shape fits and, if five tries suffice, fills 95 % of the memory."""
    tokens, best, longest = config.data.batch_tokens, 0, typical_shapes(config)[-1]
    for _ in range(5):
        rows = max(1, tokens // max(longest[1:]))
        report = next(compile_training(config, target, [longest._replace(rows=rows)]))
        best = max(best, tokens) if report.fits else best
        if report.fits and report.needed_bytes >= 0.95 * report.memory_bytes:
            break
        # Temporaries are nearly proportional to the tokens, and arguments do not depend on them.
        growth = (report.memory_bytes - report.argument_bytes) / (report.needed_bytes - report.argument_bytes)
        tokens = max(1024, int(0.98 * tokens * growth) // 1024 * 1024)
    require(best > 0, f"no batch was found that fits a device of {target.name}. Split the model with --mesh")
    return best


def _abstract(shape: Sequence[int], dtype: DTypeLike, sharding: NamedSharding) -> np.ndarray:
    """Return what stands for an array when a program is compiled."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[return-value]  # by its shape and dtype


def _report(lowered: Lowered, target: Target, mesh: Mesh, shape: Shape, model_flops: float) -> Report:
    """Compile a program, and count what it does."""
    start, device = time.monotonic(), target.device
    try:
        compiled = lowered.compile(COMPILER_OPTIONS if target.is_gpu else None)
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
            raise
        used, capacity = (int(float(found[n]) * 1024 ** ("KMGT".index(found[n + 1]) + 1)) for n in (1, 3))
        return Report(*shape, fits=False, memory_bytes=capacity, needed_bytes=used)
    seconds = time.monotonic() - start
    program = read_program(compiled.as_text() or "", dict(mesh.shape))
    estimate = estimated_seconds(program, target, dict(mesh.shape))
    collectives: dict[str, int] = {}
    for one in program.collectives:
        name = f"{one.kind} over {'+'.join(one.axes) or 'none'}"
        collectives[name] = collectives.get(name, 0) + one.bytes * one.times
    memory = compiled.memory_analysis()
    assert memory is not None  # these compilers report it
    code, results = memory.generated_code_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes + results + code
    return Report(
        *shape,
        fits=needed <= device.memory,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=code,
        memory_bytes=int(device.memory),
        needed_bytes=needed,
        compile_seconds=seconds,
        kernels=program.launches,
        copies=sum(kernel.times for kernel in program.kernels if kernel.kind == "copy"),
        matrix_flops=sum(kernel.operations * kernel.times for kernel in program.kernels),
        bytes_moved=sum(kernel.bytes * kernel.times for kernel in program.kernels),
        collective_bytes=collectives,
        estimated_seconds=estimate,
        estimated_mfu=model_flops / mesh.size / device.flops / estimate,
        estimated_tokens_per_second=shape.rows * shape.tgt_length / estimate,
    )


def estimated_seconds(program: Program, target: Target, mesh: dict[str, int]) -> float:
    """Return the roofline of `Report.estimated_seconds`."""
    device, total = target.device, 0.0
    for kernel in program.kernels:
        compute = kernel.operations / (FLOPS_SHARE * device.flops)
        memory = kernel.bytes / (BANDWIDTH_SHARE * device.bandwidth)
        total += kernel.times * (max(compute, memory) + device.launch)
    for one in program.collectives:
        number = math.prod(mesh[axis] for axis in one.axes)
        rounds = 2 if one.kind == "all-reduce" else 1
        total += one.times * rounds * (number - 1) / number * one.bytes / device.link
    return total


def render(reports: Sequence[Report], target: Target) -> str:
    """Return reports as a table, with a line for each program that does not fit: by how much, and what helps."""
    lines = [
        f"{target.name}:{target.shape}, per device. Times are estimates, not measurements: {FLOPS_SHARE:.0%} of the "
        f"peak operations, {BANDWIDTH_SHARE:.0%} of the bandwidth.",
        f"{'rows x src + tgt':>20}{'arguments':>11}{'temporary':>11}{'of memory':>11}{'kernels':>9}{'copies':>8}"
        f"{'compiled':>10}{'estimate':>10}{'MFU':>5}{'target tokens/s':>17}",
    ]
    for one in reports:
        shape = f"{one.rows} x {one.src_length} + {one.tgt_length}"
        if not one.kernels:  # the compiler stopped
            lines.append(f"{shape:>20}{one.needed_bytes / one.memory_bytes:33.0%}")
            continue
        lines.append(
            f"{shape:>20}{one.argument_bytes / 1e9:8.2f} GB{one.temporary_bytes / 1e9:8.2f} GB"
            f"{one.needed_bytes / one.memory_bytes:11.0%}{one.kernels:9,}{one.copies:8,}{one.compile_seconds:8.0f} s"
            f"{1e3 * one.estimated_seconds:7.1f} ms{one.estimated_mfu:5.0%}{one.estimated_tokens_per_second:17,.0f}"
        )
    for name in sorted({name for one in reports for name in one.collective_bytes}):
        sizes = [f"{one.collective_bytes.get(name, 0) / 1e6:,.1f}" for one in reports]
        lines.append(f"{name}: {', '.join(sizes)} MB")
    lines += [
        f"{one.rows} rows of {one.src_length} + {one.tgt_length} tokens do not fit: they need "
        f"{(one.needed_bytes - one.memory_bytes) / 1e9:.1f} GB more than the {one.memory_bytes / 1e9:.1f} GB of a "
        "device. Set --training.accumulate 2, --model.remat dots or a smaller --data.batch-tokens; "
        "--training.mesh-fsdp splits parameters and optimizer state"
        for one in reports
        if not one.fits
    ]
    return "\n".join(lines)
