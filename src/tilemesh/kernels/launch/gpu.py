"""The GPU under a launch: what of it decides which kernels run, its index and its current stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

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
