"""The GPU under a launch: what of it decides which kernels run, its index and its current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tilemesh.core.errors import unknown
from tilemesh.core.hardware import find_device

# A CPU build of torch has none.
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", int)


@dataclass(frozen=True)
class Gpu:
    """What of a GPU decides which kernels it can run."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @property
    def tma(self) -> bool:
        return self.capability >= (9, 0)

    @property
    def hopper(self) -> bool:
        """Whether it has Hopper's tensor core instructions; later GPUs have others."""
        return self.capability[0] == 9

    @property
    def arch(self) -> int:
        """As Triton names what to compile for: 90 for Hopper."""
        return self.capability[0] * 10 + self.capability[1]


DESCRIBED = {
    "t4": Gpu("Tesla T4", (7, 5), 40, 65_536),
    "a10": Gpu("NVIDIA A10", (8, 6), 72, 101_376),
    "a100-80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166_912),
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 232_448),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 232_448),
}
"""GPUs that need not be here, by their names in `core.hardware`: figures of NVIDIA's documents."""


def described_gpu(name: str) -> Gpu:
    """By its name in the planner, as in h200."""
    device = find_device(name).name
    if device not in DESCRIBED:
        raise unknown("GPU", name, DESCRIBED)
    return DESCRIBED[device]


@functools.cache
def gpu_of(index: int) -> Gpu:
    facts = torch.cuda.get_device_properties(index)
    shared = int(facts.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return Gpu(facts.name, (facts.major, facts.minor), facts.multi_processor_count, shared)


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def launches_early(device: torch.device) -> bool:
    """Whether kernels on this device can be launched while the one before runs: that came with Hopper, as TMA did."""
    return device.type == "cuda" and gpu_of(device_index(device)).tma
