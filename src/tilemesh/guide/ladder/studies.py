"""Small kernels beside the ladder, each about one thing a warp or a block can do badly: counted by the interpreter.

Every function names a text of `cuda/` with its launch; the formula that the count must equal stands in its docstring.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Device
from tilemesh.guide.ladder.interpret import Counted, launch
from tilemesh.guide.ladder.memory import WARP
from tilemesh.guide.ladder.rungs import source, with_constants

WIDTH, HEIGHT, FIRST_BLOCK = 12, 6, (4, 3)  # of the first kernel: 6 blocks of 12 threads


@dataclass(frozen=True)
class SmallKernel:
    """A text with its constants and its launch, the same for the interpreter and for NVRTC."""

    file: str
    name: str
    constants: Mapping[str, int]
    grid: tuple[int, int]
    block: tuple[int, int]
    inputs: int  # elements of `input`; `output` has one for each thread

    def text(self) -> str:
        return with_constants(source(self.file), self.constants)

    def run(self, values: Any) -> tuple[Counted, Any]:
        output = np.full(self.grid[0] * self.block[0], np.nan, np.float32)
        arguments = {"input": values, "output": output, "N": output.size}
        return launch(self.text(), self.name, self.grid, self.block, arguments), output


def first_kernel(width: int = WIDTH, height: int = HEIGHT, block: tuple[int, int] = FIRST_BLOCK) -> Counted:
    """matrixAddDoubleB: one thread for each element, so 2 reads and 1 write for each, whatever the block is."""
    a, b = (np.random.default_rng(seed).standard_normal((height, width)).astype(np.float32) for seed in (1, 2))
    c = np.full_like(a, np.nan)
    grid = (-(-width // block[0]), -(-height // block[1]))
    arguments = {"A": a, "B": b, "C": c, "width": width, "height": height}
    counted = launch(source("first.cu"), "matrixAddDoubleB", grid, block, arguments)
    if not np.array_equal(c, a + 2 * b):
        raise RunError("the first kernel did not compute A + 2 B")
    return counted


def convolution(*, shared: bool, threads: int = 128, blocks: int = 2) -> SmallKernel:
    """Reads of global memory for each block: 3 threads, and with shared memory threads + 2. For 128: 384 and 130."""
    file, constants = ("convolve_shared.cu", {"THREADS": threads}) if shared else ("convolve.cu", {})
    return SmallKernel(file, "convolve", constants, (blocks, 1), (threads, 1), threads * blocks + 2)


def divergence(paths: int, run: int, steps: int = 32, blocks: int = 4, threads: int = 256) -> SmallKernel:
    """`paths` loops, chosen by the thread's index over `run`: a warp executes every loop that one of its lanes takes.

    Inside the loops the share of lanes at work is one over the number of different paths within a warp.
    """
    return SmallKernel(
        "divergence.cu",
        "diverge",
        {"PATHS": paths, "RUN": run, "STEPS": steps},
        (blocks, 1),
        (threads, 1),
        blocks * threads,
    )


def paths_in_warp(paths: int, run: int) -> int:
    return min(paths, max(1, WARP // run))


def strided_copy(stride: int, blocks: int = 16, threads: int = 256) -> SmallKernel:
    """Neighbours read elements `stride` apart: a warp touches min(32, 4 stride) sectors for its 128 bytes."""
    return SmallKernel("stride.cu", "copy", {"STRIDE": stride}, (blocks, 1), (threads, 1), blocks * threads)


def sectors_per_request(stride: int) -> int:
    return min(WARP, 4 * stride)


def strided_banks(stride: int, turns: int = 8, blocks: int = 2) -> SmallKernel:
    """A warp reads words `stride` apart: gcd(stride, 32) of them lie in one bank, and take as many passes."""
    return SmallKernel("banks.cu", "banks", {"STRIDE": stride, "TURNS": turns}, (blocks, 1), (WARP, 1), WARP * stride)


def passes_per_request(stride: int) -> int:
    return int(np.gcd(stride, WARP))


# Occupancy and the order of blocks ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Occupancy:
    """How many blocks one multiprocessor holds at a time, and which resource runs out first."""

    blocks: int
    warps: int
    most_warps: int
    limited_by: str

    @property
    def share(self) -> float:
        return self.warps / self.most_warps


def occupancy(device: Device, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """From what the compiler reserved: threads in a block, registers in a thread, shared bytes in a block.

    Registers are handed out to warps in units of 256, shared memory in units of 128 bytes plus 1 KiB for the system
    (Hopper; CUDA's programming guide, "Compute Capabilities").
    """
    if not 1 <= threads <= 1024:
        raise UsageError(f"threads {threads}: a block has 1 to 1,024")
    warps = -(-threads // WARP)
    warp_registers = -(-registers * WARP // 256) * 256
    block_shared = -(-shared_bytes // 128) * 128 + 1024
    limits = {
        "threads": device.threads_per_sm // (warps * WARP),
        "registers": device.registers_per_sm // (warps * warp_registers) if registers else device.blocks_per_sm,
        "shared memory": device.shared_bytes_per_sm // block_shared,
        "blocks": device.blocks_per_sm,
    }
    limited_by = min(limits, key=lambda name: limits[name])
    blocks = limits[limited_by]
    return Occupancy(blocks, blocks * warps, device.threads_per_sm // WARP, limited_by)


def scheduled(durations: Sequence[float], slots: int) -> list[tuple[int, float, float]]:
    """Dynamic scheduling of blocks: (slot, begin, end) of each, the next block going to the slot that is free first."""
    if slots < 1:
        raise UsageError(f"slots {slots}: expected at least one")
    free = [(0.0, slot) for slot in range(slots)]
    placed = []
    for duration in durations:
        begin, slot = heapq.heappop(free)
        placed.append((slot, begin, begin + duration))
        heapq.heappush(free, (begin + duration, slot))
    return placed
