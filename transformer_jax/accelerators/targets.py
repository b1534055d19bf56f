"""The accelerators that programs can be compiled for, with the figures of their vendors."""

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from transformer_jax.runtime.fields import require
from transformer_jax.types import UserError

if TYPE_CHECKING:
    from jax.experimental.topologies import TopologyDescription


@dataclass(frozen=True)
class Device:
    """An accelerator: the vendor's peak rates, which no program reaches."""

    memory: float
    """Bytes of memory."""
    flops: float
    """Operations per second of dense bfloat16 matrix products."""
    bandwidth: float
    """Bytes per second to and from memory."""
    link: float
    """Bytes per second that a device sends in a ring of its neighbors."""
    launch: float = 0.0
    """Seconds to start a kernel."""
    gpu: str = ""
    """What XLA needs to know of a GPU: a GpuTargetConfigProto, in addition to `_GPU`."""


def _gpu(capability: tuple[int, int], cores: int, fpus: int, threads: int, shared: int, cache: int, ghz: float) -> str:
    major, minor = capability
    return (
        f"core_count: {cores} fpus_per_core: {fpus} threads_per_core_limit: {threads} shared_memory_per_core: {shared} "
        f"shared_memory_per_block_optin: {shared - 1024} l2_cache_size: {cache} clock_rate_ghz: {ghz} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
    )


_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  device_memory_size: {memory:.0f} memory_bandwidth: {bandwidth:.0f} {gpu}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""

_AMPERE, _HOPPER = _gpu((8, 0), 108, 64, 2048, 167_936, 41_943_040, 1.41), (9, 0)
_H100 = _gpu(_HOPPER, 132, 128, 2048, 233_472, 52_428_800, 1.98)

# GPUs: memory, bandwidth and the description of openxla/xla, xla/backends/gpu/target_config/specs (L4: NVIDIA's data
# sheet and Ada whitepaper); operations and NVLink (one direction; L4: PCIe 4) of NVIDIA's data sheets. TPUs:
# cloud.google.com/tpu/docs/system-architecture-tpu-vm and, for links, jax-ml.github.io/scaling-book/tpus.
DEVICES = {
    "a100-40gb": Device(42.3e9, 312e12, 1.555e12, 300e9, 2e-6, _AMPERE),
    "a100-80gb": Device(85.1e9, 312e12, 2.039e12, 300e9, 2e-6, _AMPERE),
    "l4": Device(24.1e9, 121e12, 0.300e12, 32e9, 2e-6, _gpu((8, 9), 58, 128, 1536, 102_400, 50_331_648, 2.04)),
    "h100": Device(84.9e9, 989e12, 3.352e12, 450e9, 2e-6, _H100),
    "h200": Device(151.4e9, 989e12, 4.800e12, 450e9, 2e-6, _H100),
    "b200": Device(191.5e9, 2250e12, 7.672e12, 900e9, 2e-6, _gpu((10, 0), 148, 128, 2048, 233_472, 132_644_864, 1.965)),
    "v4": Device(32 * 2**30, 275e12, 1.228e12, 90e9),
    "v5e": Device(15.75 * 2**30, 197e12, 0.819e12, 90e9),
    "v5p": Device(95 * 2**30, 459e12, 2.765e12, 180e9),
    "v6e": Device(32 * 2**30, 918e12, 1.640e12, 180e9),
}
COMPILER_OPTIONS: dict[str, bool | str] = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
"""For GPUs: without the device no kernel can be timed, and so none can be chosen by its time."""
_GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Target:
    """A number of accelerators of one kind, written `h100`, `h100:8` or `v5e:4x4`."""

    name: str
    device: Device
    shape: str
    """Number of GPUs, or the topology of TPU chips."""

    @property
    def is_gpu(self) -> bool:
        """Return whether the device is a GPU, and otherwise a TPU."""
        return bool(self.device.gpu)

    def topology(self) -> "TopologyDescription":
        """Return the absent devices.

        Raises:
            UserError: The compiler is not installed, or there is no such topology.
        """
        package, extra = ("jax_cuda13_plugin", "cuda") if self.is_gpu else ("libtpu", "aot-tpu")
        if find_spec(package) is None:
            raise UserError(f"no compiler for {self.name}. Install it: pip install 'transformer-jax[{extra}]'")
        from jax.experimental import topologies

        try:
            if not self.is_gpu:
                options = {"chip_config_name": "megacore"} if self.name == "v4" else {}  # a chip is one device
                return topologies.get_topology_desc(f"{self.name}:{self.shape}", "tpu", **options)
            number = int(self.shape)
            hosts = -(-number // _GPUS_PER_HOST)
            config = _GPU.format(name=self.name, **vars(self.device))
            shape = f"1x{hosts}x{number // hosts}"
            return topologies.get_topology_desc(shape, "cuda", topology=shape, target_config=config)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            require("lockfile" not in str(error), "libtpu serves one process at a time. Wait for the other compilation")
            raise UserError(f"--target {self.name}:{self.shape} is not a topology that XLA knows: {error}") from error


def set_environment() -> None:
    """Let the compilers start without their devices: they look for them for minutes. Call it before jax is imported."""
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # it cannot load programs of absent devices
    defaults = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "JAX_PLATFORMS": "cpu"}
    os.environ |= defaults | os.environ


def parse_target(text: str) -> Target:
    """Return the target that a text such as `h100:8` or `v5e:4x4` names.

    Raises:
        UserError: There is no such device, or the number of devices is missing or not a number.

    >>> parse_target("v5e:4x4").shape, parse_target("h100").shape
    ('4x4', '1')
    """
    name, _, shape = text.lower().partition(":")
    if name not in DEVICES:
        raise UserError(f"--target {text} names no device. Use one of {', '.join(DEVICES)}, such as h100:8 or v5e:4x4")
    target = Target(name, DEVICES[name], shape or "1")
    if not all(part.isdigit() and int(part) for part in target.shape.split("x")) or (target.is_gpu and "x" in shape):
        raise UserError(f"--target {text}: {shape!r} is neither a number of GPUs (h100:8) nor TPU chips (v5e:4x4)")
    if not target.is_gpu and not shape:
        raise UserError(f"--target {text} has no topology. Add it, such as v5e:2x4 or v5p:2x2x1")
    return target
