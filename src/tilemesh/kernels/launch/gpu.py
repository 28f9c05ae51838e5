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


_DRIVER_NAMES = {
    "t4": "Tesla T4", "a10": "NVIDIA A10", "a100-80": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200", "b200": "NVIDIA B200",
}  # fmt: skip
"""What drivers call the GPUs that `core.hardware` has."""


def described_gpu(name: str) -> Gpu:
    """One that need not be here, by its name in the planner, as in h200."""
    device = find_device(name)
    if device.name not in _DRIVER_NAMES:
        raise unknown("GPU", name, _DRIVER_NAMES)
    driver_name = _DRIVER_NAMES[device.name]
    return Gpu(driver_name, device.capability, device.sm_count, device.shared_bytes_per_block)


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
