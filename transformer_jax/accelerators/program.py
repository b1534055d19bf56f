"""Count what a compiled program does, from XLA's optimized text: kernels, bytes, operations and collectives."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_ITEM_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f8e4m3fn": 1} | {
    f"{s}{b}": b // 8 for s in "sufc" for b in (8, 16, 32, 64)
}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
# Instructions that do nothing on a device.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "opt-barrier"}
_COLLECTIVE = re.compile(r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?")


class Instruction(NamedTuple):
    """A line of the text."""

    name: str
    type: str
    opcode: str
    rest: str  # operands, and attributes

    @property
    def operands(self) -> list[str]:
        """Return the names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.rest.partition(")")[0])

    def dims(self, attribute: str) -> list[int]:
        """Return the numbers of an attribute such as `lhs_contracting_dims={1}`, plain or in JSON."""
        found = re.search(rf'{attribute}"?[=:][\[{{]([\d,"]*)', self.rest)
        return _numbers(found[1]) if found else []


class Kernel(NamedTuple):
    """A kernel of a program, or what a device does for one instruction."""

    kind: str
    operations: float
    """Multiplications and additions of matrix products. Others are not counted."""
    bytes: float
    """Bytes read from and written to the device's memory."""
    times: int = 1
    """Number of times that a run of the program starts it."""


class Collective(NamedTuple):
    """An exchange between devices."""

    kind: str
    bytes: int
    """Size of the complete array on a device: the result, or for a reduce-scatter the operand."""
    axes: tuple[str, ...]
    """Axes of the mesh that it crosses."""
    times: int = 1


class Program(NamedTuple):
    """What one device does in a step."""

    kernels: tuple[Kernel, ...]
    collectives: tuple[Collective, ...]

    @property
    def launches(self) -> int:
        """Return the number of kernels that a step starts."""
        return sum(kernel.times for kernel in self.kernels)


def read_program(text: str, mesh: dict[str, int]) -> Program:
    """Count the text of a compiled program (`compiled.as_text()`) for a mesh {axis: size}."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            instructions = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif (found := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line))) and computations:
            instructions.append(Instruction(*found.groups()))
    items = list(_walk(computations, entry, mesh, 1))
    kernels = tuple(item for item in items if isinstance(item, Kernel))
    return Program(kernels, tuple(item for item in items if isinstance(item, Collective)))


def _walk(
    computations: dict[str, list[Instruction]], name: str, mesh: dict[str, int], count: int
) -> Iterator[Kernel | Collective]:
    """Yield what a computation does, `count` times."""
    types = {instruction.name: instruction.type for instruction in computations[name]}
    for one in computations[name]:
        inner = re.findall(r"%([\w.\-]+)", " ".join(_CALLED.findall(one.rest)))
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            continue
        if found := _COLLECTIVE.fullmatch(one.opcode):
            full = types.get(one.operands[0], "") if found[1] == "reduce-scatter" else one.type
            sizes = _array_bytes(full, on_chip=True)
            size = max(sizes) if one.opcode == "all-gather-start" else sum(sizes)
            yield Collective(found[1], size, _crossed_axes(one, mesh), count)
        elif one.opcode == "while":
            trips = re.search(r'known_trip_count"?[:=]\{"?n"?[:=]"(\d+)"', one.rest)
            yield from _walk(computations, inner[-1], mesh, count * (int(trips[1]) if trips else 1))
        elif one.opcode == "conditional":
            branches = [list(_walk(computations, branch, mesh, count)) for branch in inner]
            yield from max(branches, key=lambda items: sum(item.bytes for item in items))
        elif one.opcode in ("call", "async-start"):
            yield from _walk(computations, inner[0], mesh, count)
        else:
            fused = computations[inner[0]] if one.opcode == "fusion" else []
            if any(_COLLECTIVE.fullmatch(part.opcode) for part in fused):  # TPU: a collective and its neighbors
                yield from (item for item in _walk(computations, inner[0], mesh, count) if isinstance(item, Collective))
            operand_types = [types.get(operand, "") for operand in one.operands]
            moved = (
                _fusion_bytes(one, fused, operand_types)
                if fused
                else _bytes(one.type) + sum(map(_bytes, operand_types))
            )
            inside = {part.name: part.type for part in fused}
            operations = sum(_operations(part, inside) for part in fused) if fused else _operations(one, types)
            yield Kernel(_kind(one, fused), operations, moved, count)


def _kind(one: Instruction, fused: Sequence[Instruction]) -> str:
    target = re.search(r'custom_call_target="([^"]+)"', one.rest)
    kind = target[1] if target else one.opcode
    if "matmul" in kind or "gemm" in kind or any(part.opcode in ("dot", "convolution") for part in (one, *fused)):
        return "matrix product"
    return "attention" if "fmha" in kind else "copy" if kind.startswith("copy") else kind


def _array_bytes(type_: str, *, on_chip: bool = False) -> list[int]:
    """Return the size of each array in a type; `on_chip` includes arrays in the fast memory on a TPU's chip."""
    return [
        0
        if "S(1)" in layout and not on_chip
        else math.prod(map(int, filter(None, dims.split(",")))) * _ITEM_BYTES.get(dtype, 0)
        for dtype, dims, layout in _ARRAY.findall(type_)
    ]


def _bytes(type_: str) -> int:
    return sum(_array_bytes(type_))


def _fusion_bytes(one: Instruction, fused: Sequence[Instruction], operand_types: Sequence[str]) -> int:
    """Return the bytes that a fusion moves: of an operand that it only slices or updates, the part that it touches."""
    total, written = 0, _bytes(one.type)
    types = {part.name: part.type for part in fused}
    for part in fused:
        if part.opcode != "parameter":
            continue
        full = _bytes(operand_types[int(part.rest.partition(")")[0])])
        users = [user for user in fused if part.name in user.operands]
        if users and all(user.opcode in ("slice", "dynamic-slice", "gather") for user in users):
            full = min(full, sum(_bytes(user.type) for user in users))
        elif users and all(user.opcode == "dynamic-update-slice" and user.operands[0] == part.name for user in users):
            written -= full - sum(_bytes(types.get(user.operands[1], "")) for user in users)
            full = 0
        total += full
    return total + max(0, written)


def _shape(type_: str) -> list[int]:
    found = _ARRAY.search(type_)
    return [int(size) for size in found[2].split(",") if size] if found else []


def _operations(one: Instruction, types: dict[str, str]) -> float:
    """Return 2 x the multiplications of a matrix product or of an attention kernel."""
    shapes = [_shape(types.get(operand, "")) for operand in one.operands]
    output = math.prod(_shape(one.type))
    if one.opcode == "convolution":  # how TPUs write a product; an axis of the window stands for a batch axis
        lhs, labels = shapes[0], re.search(r"dim_labels=(\w+)_", one.rest)
        return 2.0 * output * (lhs[labels[1].index("f")] if labels and lhs else 0)
    if one.opcode == "dot" or "gemm_backend_config" in one.rest:
        contracted = one.dims("lhs_contracting_dim(?:ension)?s")
        return 2.0 * output * math.prod(shapes[0][axis] for axis in contracted)
    if "fmha" in one.rest:  # Q K^T and the product with V; five products backward
        scores = math.prod(one.dims("intermediate_tensor_dimensions") or one.dims("dimensions"))
        return (10.0 if "Backward" in one.rest else 4.0) * scores * shapes[0][-1]
    return 0.0


def _crossed_axes(one: Instruction, mesh: dict[str, int]) -> tuple[str, ...]:
    """Return the axes along which the devices of a collective's first group differ."""
    attribute = one.rest.partition("replica_groups=")[2] or one.rest.partition("source_target_pairs=")[2]
    dims = [_numbers(part) for part in re.findall(r"[\[(]([\d,]+)[\])]", attribute.partition(", use_")[0])]
    if attribute.startswith("{{"):  # the devices of each group
        group = np.array(_numbers(attribute[2:].partition("}")[0]))
    elif attribute.startswith("["):  # [groups, devices]<=[dims]T(order): the devices 0, 1, ... in that order
        group = _devices(dims[1], *dims[2:3]).reshape(dims[0])[0]
    elif attribute.startswith("mesh["):  # mesh['a'=2,'b'=4], device_ids=([dims]T(order)) {'a'}: along the axis a
        names, grouped = re.findall(r"'(\w+)'=(\d+)", attribute), attribute.partition("{")[2].partition("}")[0]
        sizes = [int(size) for _, size in names]
        group = _devices(*(dims[:2] or [sizes])).reshape(sizes)[
            tuple(slice(None) if f"'{name}'" in grouped else 0 for name, _ in names)
        ]
    else:
        group = np.arange(math.prod(mesh.values()))
    coordinates = np.unravel_index(group.reshape(-1), list(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, coordinates, strict=True) if len(set(place.tolist())) > 1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _devices(dims: Sequence[int], order: Sequence[int] = ()) -> np.ndarray:
    """Return the devices 0, 1, ... as an array of the shape `dims`, with its axes in another order if one is given."""
    return np.arange(math.prod(dims)).reshape(dims).transpose(order or range(len(dims)))
