"""What the makers say their hardware can do: devices, links, nodes and the clusters built of them.

The one idea: a ceiling has to be comparable, so every figure here is *dense* (no structured sparsity),
*per direction*, in base units, and carries its source. Figures measured on a machine are not here: they are a
`Calibration`, and they win over these wherever there is one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.ranges import shown

DTYPE_BYTES: Mapping[str, int] = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of one element by dtype name; a tf32 operand lies in memory as fp32."""

LOCAL = "local"
"""The name of this machine's own cores, measured, as a device: there are no more of it."""
_LARGEST_CLUSTER = 1_000_000
GPUS_PER_NODE = 8  # HGX and DGX boards from A100 to B200 carry eight

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """One GPU, or one CPU with all its cores. Figures that only a GPU has are 0 on a CPU."""

    name: str
    kind: Literal["gpu", "cpu"]
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    """Dense matmul peak by dtype name. A dtype that is missing has no unit of its own on this device."""
    memory_bytes: int
    """Capacity on the datasheet. NVIDIA's "GB" of device memory are 2**30 bytes, as its driver's totals show."""
    usable_bytes: int
    """What the driver reports as total memory to a program: capacity less ECC and what the driver keeps."""
    memory_bytes_per_s: float
    l2_bytes: int
    sm_count: int = 0
    """Streaming multiprocessors of a GPU; cores of a CPU."""
    shared_bytes_per_block: int = 0
    shared_bytes_per_sm: int = 0
    registers_per_sm: int = 0
    threads_per_sm: int = 0
    blocks_per_sm: int = 0
    capability: tuple[int, int] = (0, 0)
    launch_s: float = 5e-6
    """Assumed host cost of one launch where nothing was measured; a calibration replaces it."""
    power_w: float = 0.0
    """Of the board, at most. A GPU that may draw less than the one it is like sustains less."""
    like: str = ""
    """Of a GPU that a file describes (`core/described_gpu.py`): the one here whose constants hold for it too."""
    ranks_per_core: float = 1.0
    """Above 1 on a CPU whose ranks outnumber its cores: figures are those of a rank while all of them compute."""
    heap: str = ""
    """Of a CPU "glibc" where torch takes its tensors from it: it holds more than they need."""

    @property
    def kin(self) -> str:
        """The name by which constants of the cost model know it."""
        return self.like or self.name

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s, or an error that names the dtypes this device has."""
        if dtype not in self.peak_flops_per_s:
            known = ", ".join(self.peak_flops_per_s)
            raise UsageError(f"{self.name} has no matmul peak for dtype '{dtype}': known are {known}")
        return self.peak_flops_per_s[dtype]


@dataclass(frozen=True)
class Link:
    """A way between two devices: bytes per second in *one* direction, and the time of an empty message.

    `meeting_s`: what a collective takes beside its messages, since its ranks come to it from computing and not at once.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    meeting_s: float = 0.0


@dataclass(frozen=True)
class ClusterNode:
    """Devices in one box. `inter` is one adapter to the outside; the box has `adapters` of them."""

    device: Device
    count: int
    intra: Link
    inter: Link
    adapters: int

    @property
    def inter_bytes_per_s_per_device(self) -> float:
        """What each device gets, in one direction, when all send to other nodes at once."""
        return self.inter.bytes_per_s * self.adapters / self.count


@dataclass(frozen=True)
class Cluster:
    """Nodes that are all alike: one device, one size, one pair of links. Of nodes that differ, what each can do."""

    nodes: tuple[ClusterNode, ...]
    parts: tuple[Cluster, ...] = ()
    """Where the nodes are of several kinds: those of each."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise UsageError("a cluster needs at least one node")
        if any(node != self.nodes[0] for node in self.nodes):
            raise UsageError("the nodes of a cluster must be alike: same device, count and links")

    @property
    def node(self) -> ClusterNode:
        return self.nodes[0]

    @property
    def device(self) -> Device:
        return self.node.device

    @property
    def world(self) -> int:
        """Devices in all nodes together, one rank each."""
        return len(self.nodes) * self.node.count

    def part(self, ranks: int) -> Cluster:
        """So many of its devices: whole nodes, or equal parts of some."""
        size = math.gcd(ranks, self.node.count)
        if ranks == self.world or size == self.node.count:
            return replace(self, nodes=self.nodes[: ranks // self.node.count], parts=())
        smaller = grown(self.node, size) if self.device.kind == "gpu" else replace(self.node, count=size)
        return Cluster((smaller,) * (ranks // size))

    @property
    def name(self) -> str:
        """The string that `parse_cluster` turns into this cluster, with the nodes spelled out; "2xlocal" for this
        machine's own cores."""
        if self.parts:
            return "+".join(part.name for part in self.parts)
        if self.device.name == LOCAL:
            return f"{self.world}xlocal"
        return f"{len(self.nodes)}x{self.node.count}x{self.device.name}"


# ---- devices ---------------------------------------------------------------------------------------------------
# Threads, blocks, registers and shared memory come from "Technical Specifications per Compute Capability" in the CUDA
# C++ Programming Guide; shared memory per block is the opt-in maximum (1 KiB per block is the system's).
# usable_bytes is the total that `torch.cuda.get_device_properties` prints on such a machine; drivers differ by 0.3 %,
# so the lower figure seen is taken.

T4 = Device(  # NVIDIA T4 datasheet (2019) and Turing architecture white paper, TU104
    name="t4",
    kind="gpu",
    # FP64 from the white paper: 1/32 of FP32. Turing's tensor cores know neither bf16 nor tf32.
    peak_flops_per_s={"fp64": 0.254e12, "fp32": 8.1e12, "fp16": 65e12},
    memory_bytes=16 * _GIB,
    usable_bytes=14930 * _MIB,
    memory_bytes_per_s=320e9,  # derived: 256 bit x 10 Gbit/s of GDDR6
    l2_bytes=4 * _MIB,
    sm_count=40,
    shared_bytes_per_block=64 * _KIB,
    shared_bytes_per_sm=64 * _KIB,
    registers_per_sm=65536,
    threads_per_sm=1024,
    blocks_per_sm=16,
    capability=(7, 5),
    power_w=70,
)

A10 = Device(  # NVIDIA A10 datasheet (2021): dense columns; GA102 white paper
    name="a10",
    kind="gpu",
    # FP64 derived: two FMA units an SM (GA102 white paper) x 72 SMs x 1.695 GHz x 2.
    peak_flops_per_s={"fp64": 0.488e12, "fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12, "fp16": 125e12},
    memory_bytes=24 * _GIB,
    # Derived, not seen: ECC takes 1/16 of GDDR6 (24 -> 22.5 GiB, as 16 -> 15 on a T4), the driver about 0.4 GiB more.
    usable_bytes=22630 * _MIB,
    memory_bytes_per_s=600e9,
    l2_bytes=6 * _MIB,
    sm_count=72,
    shared_bytes_per_block=99 * _KIB,
    shared_bytes_per_sm=100 * _KIB,
    registers_per_sm=65536,
    threads_per_sm=1536,
    blocks_per_sm=16,
    capability=(8, 6),
    power_w=150,
)

A100 = Device(  # NVIDIA A100 80GB datasheet (2021), SXM column, figures without the sparsity asterisk
    name="a100-80",
    kind="gpu",
    # fp64 is the tensor core's (9.7 without), since that is what a matmul uses.
    peak_flops_per_s={"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
    memory_bytes=80 * _GIB,
    usable_bytes=81251 * _MIB,
    memory_bytes_per_s=2039e9,
    l2_bytes=40 * _MIB,
    sm_count=108,
    shared_bytes_per_block=163 * _KIB,
    shared_bytes_per_sm=164 * _KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    capability=(8, 0),
    power_w=400,
)

H100 = Device(  # NVIDIA H100 datasheet, SXM column, and white paper
    name="h100",
    kind="gpu",
    # The white paper's table without sparsity; the datasheet prints twice these from tf32 on. fp64 by tensor cores.
    peak_flops_per_s={
        "fp64": 66.9e12,
        "fp32": 66.9e12,
        "tf32": 494.7e12,
        "bf16": 989.4e12,
        "fp16": 989.4e12,
        "fp8": 1978.9e12,
    },
    memory_bytes=80 * _GIB,
    usable_bytes=81082 * _MIB,
    memory_bytes_per_s=3.35e12,
    l2_bytes=50 * _MIB,
    sm_count=132,
    shared_bytes_per_block=227 * _KIB,
    shared_bytes_per_sm=228 * _KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    capability=(9, 0),
    power_w=700,
)

H200 = replace(  # NVIDIA H200 datasheet, SXM column: H100's processor with 141 GB of HBM3e
    H100,
    name="h200",
    memory_bytes=141 * _GIB,
    usable_bytes=143156 * _MIB,
    memory_bytes_per_s=4.8e12,
    l2_bytes=60 * _MIB,  # as the driver reports it; the datasheet is silent, H100 has 50
)

B200 = Device(  # NVIDIA Blackwell architecture technical brief, HGX B200 at 1000 W, dense; DGX B200 user guide
    name="b200",
    kind="gpu",
    peak_flops_per_s={"fp64": 40e12, "fp32": 80e12, "tf32": 1.1e15, "bf16": 2.25e15, "fp16": 2.25e15, "fp8": 4.5e15},
    memory_bytes=180 * _GIB,  # 1,440 GB in eight
    usable_bytes=182631 * _MIB,
    # Derived from what the driver reports: 7680 bit x 3996 MHz x 2. The DGX sheet rounds to 64 TB/s in eight.
    memory_bytes_per_s=7.672e12,
    l2_bytes=int(126.5 * _MIB),  # as the driver reports it
    sm_count=148,
    shared_bytes_per_block=227 * _KIB,
    shared_bytes_per_sm=228 * _KIB,
    registers_per_sm=65536,
    threads_per_sm=2048,
    blocks_per_sm=32,
    capability=(10, 0),
    power_w=1000,
)

CPU = Device(  # no product: a plain desktop, to have something to plan with before this machine is calibrated
    name="cpu",
    kind="cpu",
    # 8 cores x 3 GHz x 2 AVX2 units x 8 fp32 lanes x 2 (multiply and add); fp64 has half the lanes.
    peak_flops_per_s={"fp64": 0.384e12, "fp32": 0.768e12},
    memory_bytes=16 * _GIB,
    usable_bytes=15 * _GIB,  # assumed: the system keeps about 1 GiB
    memory_bytes_per_s=51.2e9,  # two channels of DDR4-3200 (JEDEC JESD79-4): 2 x 8 B x 3.2 GT/s
    l2_bytes=16 * _MIB,  # the cache all cores share
    sm_count=8,
    launch_s=2e-6,
)

DEVICES: Mapping[str, Device] = {device.name: device for device in (T4, A10, A100, H100, H200, B200, CPU)}
_ALIASES = {"a100": "a100-80", "a100-80gb": "a100-80", "h100-sxm": "h100", "h200-sxm": "h200"}

# ---- links -----------------------------------------------------------------------------------------------------
# Latencies are not on datasheets. For GPUs: the small-message hop (ring, LL) in NCCL's tuning table, its NVLink, PCI
# and network rows. For Ethernet: assumed, TCP through the kernel. All are starting points to be measured.

_NVLINK_S, _PCIE_S, _INFINIBAND_S, _ETHERNET_S = 0.6e-6, 1.0e-6, 2.7e-6, 20e-6

LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        # One GPU's links together, one direction; NVIDIA advertises both directions (600, 900, 1800 GB/s).
        Link("nvlink3", 12 * 25e9, _NVLINK_S),  # A100 white paper: 12 links
        Link("nvlink4", 18 * 25e9, _NVLINK_S),  # H100 white paper: 18 links
        Link("nvlink5", 18 * 50e9, _NVLINK_S),  # Blackwell technical brief: 18 links
        # Sixteen lanes, one direction: GT/s x 16 lanes x 128/130 (line code) / 8. PCI-SIG base specifications.
        Link("pcie3", 8e9 * 16 * 128 / 130 / 8, _PCIE_S),
        Link("pcie4", 16e9 * 16 * 128 / 130 / 8, _PCIE_S),
        Link("pcie5", 32e9 * 16 * 128 / 130 / 8, _PCIE_S),
        # Four lanes, one port, one direction; InfiniBand Trade Association roadmap: 200, 400 and 800 Gbit/s.
        Link("hdr", 200e9 / 8, _INFINIBAND_S),
        Link("ndr", 400e9 / 8, _INFINIBAND_S),
        Link("xdr", 800e9 / 8, _INFINIBAND_S),
        # IEEE 802.3 line rates, one port, one direction.
        *(Link(f"ethernet{gbit}", gbit * 1e9 / 8, _ETHERNET_S) for gbit in (10, 25, 100, 200, 400)),
        # Ranks of one machine copy through its memory: half of the CPU's bandwidth, as a copy reads and writes.
        Link("memory", CPU.memory_bytes_per_s / 2, 1e-6),
    )
}

# Device: (inside a node, one adapter to the outside, adapters in a node of eight).
# DGX A100, H100/H200 and B200 user guides: eight cluster adapters, HDR, NDR and (ConnectX-7) NDR again; XDR comes with
# B300. T4 and A10 go into ordinary servers: peers over PCIe and, as in the cloud's largest, a 100 Gbit/s port per node.
_FABRIC: Mapping[str, tuple[str, str, int]] = {
    "t4": ("pcie3", "ethernet100", 1),
    "a10": ("pcie4", "ethernet100", 1),
    "a100-80": ("nvlink3", "hdr", 8),
    "h100": ("nvlink4", "ndr", 8),
    "h200": ("nvlink4", "ndr", 8),
    "b200": ("nvlink5", "ndr", 8),
    "cpu": ("memory", "ethernet10", 1),
}

# Between a device and its host's memory: sixteen lanes for each GPU, by their datasheets.
_HOST_LINKS: Mapping[str, str] = {
    "t4": "pcie3",
    "a10": "pcie4",
    "a100-80": "pcie4",
    "h100": "pcie5",
    "h200": "pcie5",
    "b200": "pcie5",
}


def host_link(device: Device) -> Link:
    """Between a device and its host's memory; a CPU's own memory where the device is one."""
    return LINKS[_HOST_LINKS.get(device.kin, "memory" if device.kind == "cpu" else "pcie4")]


# Driver names, less "NVIDIA" and "Tesla", that mean exactly the device above. Deliberately exact: "H100 PCIe",
# "H200 NVL", "A10G", "A100-SXM4-40GB" and MIG slices have other peaks, and no figure is better than a wrong one.
_DRIVER_NAMES: Mapping[str, Device] = {
    "t4": T4,
    "a10": A10,
    "a100-sxm4-80gb": A100,
    "a100-sxm-80gb": A100,
    "h100 80gb hbm3": H100,
    "h200": H200,
    "b200": B200,
}

# ---- looking up ------------------------------------------------------------------------------------------------


def find_device(name: str) -> Device:
    """The device of that name or alias, in any case."""
    folded = name.strip().lower()
    folded = _ALIASES.get(folded, folded)
    if folded not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[folded]


def device_for(gpu_name: str) -> Device | None:
    """The device a driver means by "NVIDIA H200" or "Tesla T4"; None when no figures here fit it exactly."""
    folded = " ".join(gpu_name.lower().split())
    return _DRIVER_NAMES.get(re.sub(r"^(nvidia |tesla )+", "", folded))


def make_node(device: Device, count: int) -> ClusterNode:
    """A node of so many of a device, with the links such nodes come with."""
    intra, inter, adapters = _FABRIC[device.kin]
    # A vendor's board has one adapter per GPU, so a smaller or larger node has fewer or more of them.
    return ClusterNode(device, count, LINKS[intra], LINKS[inter], count if adapters == GPUS_PER_NODE else adapters)


def grown(node: ClusterNode, count: int) -> ClusterNode:
    """A node like this one with another number of devices. A network that a file describes is one adapter for each."""
    usual = make_node(node.device, count)
    return replace(node, count=count, adapters=usual.adapters if node.inter == usual.inter else count)


def parse_cluster(text: str, described: ClusterNode | None = None) -> Cluster:
    """A cluster from "64xh100" (64 GPUs in nodes of 8; up to 8 are one node) or "4x8xa100" (4 nodes of 8); of two
    kinds of node as "32xh100+64xa100".

    `described`: a node of a GPU that is not known here, whose name may stand in the text (`core/described_gpu.py`).
    """
    if "+" in text:
        name = described.device.name if described is not None else ""
        parts = [parse_cluster(part, described if part.endswith(f"x{name}") else None) for part in text.split("+")]
        return _mixed(tuple(parts))
    match = re.fullmatch(r"([0-9]{1,18})x(?:([0-9]{1,18})x)?([a-z][a-z0-9-]*)", text.strip().lower())
    if match is None:
        raise UsageError(f"cluster {shown(text)} is not understood: write 64xh100 (64 GPUs) or 4x8xa100 (4 nodes of 8)")
    if described is not None and match[3] == described.device.name:
        full = described
    elif described is not None:
        raise UsageError(
            f"cluster '{text}' is of {match[3]} and the GPU described is {described.device.name}: write "
            f"{match[1]}x{described.device.name}, or leave the description out"
        )
    else:
        full = make_node(find_device(match[3]), GPUS_PER_NODE)
    size = full.count
    first, second = int(match[1]), match[2]
    if first == 0 or (second is not None and int(second) == 0):
        raise UsageError(f"cluster '{text}' has no devices: write at least 1x{match[3]}")
    if first * int(second or 1) > _LARGEST_CLUSTER:
        raise UsageError(f"cluster '{text}' has more than {_LARGEST_CLUSTER:,} devices: write a smaller one")
    if second is not None:
        return Cluster((grown(full, int(second)),) * first)
    if first <= size:
        return Cluster((grown(full, first),))
    if first % size:
        below = first - first % size
        even = max(d for d in range(1, size) if first % d == 0)
        raise UsageError(
            f"cluster '{text}' does not fill nodes of {size}: write {below}x{match[3]} or "
            f"{below + size}x{match[3]}, or say the nodes, {first // even}x{even}x{match[3]}"
        )
    return Cluster((full,) * (first // size))


def _mixed(parts: tuple[Cluster, ...]) -> Cluster:
    """Nodes of several kinds: a layout gives all ranks the same work, so each does in a step what the least of them can
    in that respect."""
    if len({part.node.count for part in parts}) > 1:
        sizes = " and of ".join(str(part.node.count) for part in parts)
        raise UsageError(f"a cluster of nodes of {sizes} devices: write nodes of one size, such as 4x4xh100+2x4xa100")
    devices = [part.device for part in parts]
    if len({device.kind for device in devices}) > 1:
        raise UsageError("a cluster of GPUs and CPUs: their ranks share no layout; plan them apart")
    dtypes = [dtype for dtype in devices[0].peak_flops_per_s if all(dtype in d.peak_flops_per_s for d in devices)]
    slowest = min(devices, key=lambda device: device.peak_flops_per_s[dtypes[-1]])
    device = replace(
        slowest,
        name="+".join(dict.fromkeys(device.name for device in devices)),
        like=slowest.kin,
        peak_flops_per_s={dtype: min(d.peak_flops_per_s[dtype] for d in devices) for dtype in dtypes},
        memory_bytes=min(d.memory_bytes for d in devices),
        usable_bytes=min(d.usable_bytes for d in devices),
        memory_bytes_per_s=min(d.memory_bytes_per_s for d in devices),
    )
    nodes = [part.node for part in parts]
    outside = min(nodes, key=lambda node: node.inter_bytes_per_s_per_device)
    intra = min((node.intra for node in nodes), key=lambda link: link.bytes_per_s)
    node = replace(outside, device=device, intra=intra)
    return Cluster((node,) * sum(len(part.nodes) for part in parts), parts)
