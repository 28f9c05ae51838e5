"""A GPU described in a TOML file, for plans on hardware that `core/hardware.py` has no datasheet of.

The one idea: a GPU is mostly like one that is known. The file names that one and says what differs, in the units of
datasheets; peaks are dense and links count one direction, as everywhere here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from tilemesh.core import config
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import DEVICES, GPUS_PER_NODE, ClusterNode, Link, find_device, make_node
from tilemesh.core.ranges import Range

_GIB, _MIB = 2**30, 2**20
_Above = Annotated[float, Range(0, above=True)]
_Count = Annotated[int, Range(1, 2**31 - 1)]


@dataclass(frozen=True)
class DensePeaks:
    """Peaks of matrix products without sparsity, in TFLOP/s, by dtype."""

    fp64: _Above | None = None
    """Of tensor cores where they take fp64."""
    fp32: _Above | None = None
    """Without tf32."""
    tf32: _Above | None = None
    """fp32 operands on tensor cores."""
    bf16: _Above | None = None
    """Half of what a datasheet prints "with sparsity"."""
    fp16: _Above | None = None
    """As bf16 on most GPUs."""
    fp8: _Above | None = None
    """Twice bf16 on most GPUs that have it."""


@dataclass(frozen=True)
class GpuDescription:
    """What a file may say of a GPU. What it does not say is as on the GPU that it is like."""

    name: str
    """What `--cluster` calls it: letters, digits and -, beginning with a letter."""
    like: str
    """A GPU that is known (t4, a10, a100, h100, h200, b200), of the same generation where there is one: what share of a
    peak its kernels reach counts here too."""
    memory_gib: _Above | None = None
    """Capacity, in GiB."""
    bandwidth_tb_per_s: _Above | None = None
    """Of its memory, in TB/s."""
    power_w: _Above | None = None
    """What the board may draw, in watts: below that of the GPU it is like, matrix products run slower."""
    multiprocessors: _Count | None = None
    """Streaming multiprocessors."""
    cache_mib: _Above | None = None
    """The last-level cache, in MiB."""
    per_node: _Count | None = None
    """GPUs in one machine; 8 if not given."""
    link_gb_per_s: _Above | None = None
    """Between GPUs of one machine, in GB/s in one direction: half of what is advertised for NVLink."""
    network_gb_per_s: _Above | None = None
    """Between machines, for each GPU, in GB/s in one direction: 50 for a 400 Gbit/s port per GPU."""
    tflops: DensePeaks = DensePeaks()
    """Dense peaks."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,39}", self.name):
            raise UsageError(f"name is '{self.name}': expected small letters, digits and -, such as h100-500w")
        if self.name in DEVICES or self.name.startswith("local"):
            raise UsageError(f"name is '{self.name}', which is known already: give another, such as my-{self.name}")
        if find_device(self.like).kind != "gpu":
            raise UsageError(f"like is '{self.like}': expected a GPU, one of {', '.join(gpu_names())}")
        config.check_fields(self)

    @property
    def node(self) -> ClusterNode:
        """A full machine of it."""
        known = find_device(self.like)
        tflops_by_dtype = {peak.name: getattr(self.tflops, peak.name) for peak in fields(self.tflops)}
        peaks = {dtype: tflops * 1e12 for dtype, tflops in tflops_by_dtype.items() if tflops is not None}
        memory_bytes = known.memory_bytes if self.memory_gib is None else int(self.memory_gib * _GIB)
        device = replace(
            known,
            name=self.name,
            like=known.name,
            peak_flops_per_s={**known.peak_flops_per_s, **peaks},
            memory_bytes=memory_bytes,
            # What the driver keeps of it grows with it.
            usable_bytes=memory_bytes * known.usable_bytes // known.memory_bytes,
            memory_bytes_per_s=_or(self.bandwidth_tb_per_s, 1e12, known.memory_bytes_per_s),
            power_w=_or(self.power_w, 1.0, known.power_w),
            sm_count=self.multiprocessors or known.sm_count,
            l2_bytes=int(_or(self.cache_mib, _MIB, known.l2_bytes)),
        )
        usual = make_node(device, self.per_node or GPUS_PER_NODE)
        intra, inter, adapters = usual.intra, usual.inter, usual.adapters
        if self.link_gb_per_s is not None:
            intra = Link(f"{self.name} link", self.link_gb_per_s * 1e9, intra.latency_s)
        if self.network_gb_per_s is not None:
            inter, adapters = Link(f"{self.name} network", self.network_gb_per_s * 1e9, inter.latency_s), usual.count
        return ClusterNode(device, usual.count, intra, inter, adapters)


def gpu_names() -> list[str]:
    """GPUs whose datasheets are known."""
    return [name for name, device in DEVICES.items() if device.kind == "gpu"]


def read_gpu(file: str | Path) -> ClusterNode:
    """The machine that a TOML file describes, to be given to `parse_cluster`."""
    return config.from_dict(GpuDescription, config.read_toml(file, "GPU"), str(file)).node


def _or(value: float | None, unit: float, known: float) -> float:
    return known if value is None else value * unit
