"""What is measured of a processor: matmul peak, memory bandwidth and the cost of one torch call; one core and all.

Predictions come from the generic CPU of `core.hardware`, scaled to the cores and the vectors there are. No datasheet is
known for a processor at large, so there is no limit: the calibration *is* the limit of later rows. Copying counts the
bytes read plus the bytes written; reading and writing are measured apart, because they differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from tilemesh.core.calibration import Part
from tilemesh.core.hardware import CPU
from tilemesh.core.units import format_bytes
from tilemesh.measure.calibrate_layer import layer_figures
from tilemesh.measure.calibrate_operators import AVX2_BYTES, operator_figures, torch_threads, vector_bytes
from tilemesh.measure.calibrate_pinned import Pinned
from tilemesh.measure.figure import MATMUL_SHARE, MEMORY_SHARE, Figure, FigureOutcome, best, best_size
from tilemesh.measure.machine import Machine, last_cache_bytes
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import compare, settle

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)

# One core keeps about half of a desktop's two memory channels busy; two or more fill them.
CORES_TO_FILL_MEMORY = 2

NO_DATASHEET = "no datasheet of this processor is known here"
NO_UNIT = "the generic CPU has no unit for this dtype"


def cpu_figures(machine: Machine, *, quick: bool = False) -> list[Figure]:
    """Every figure of this processor, predicted; nothing is measured yet. One core's machine has no other part."""
    seconds = 0.15 if quick else 0.5
    buffers = Buffers(buffer_bytes(machine.memory_bytes, quick=quick))
    parts: list[tuple[Part, int]] = [("one_core", 1)]
    if machine.cores > 1:
        parts.append(("all_cores", machine.cores))
    figures = [_matmul_figure(part, cores, machine.cores, dtype, seconds) for part, cores in parts for dtype in DTYPES]
    for kind in ("copy", "read", "write"):
        figures += [_stream_figure(part, cores, kind, buffers, seconds) for part, cores in parts]
    pinned = Pinned(machine.cores, seconds / 2)
    for part, cores in parts:
        layer = [*operator_figures(part, cores, seconds / 2), *layer_figures(part, cores, seconds / 2)]
        figures += [pinned.bind(figure) for figure in layer] if part == "one_core" else layer
    return [*figures, _launch_figure(seconds)]


def _matmul_figure(part: Part, cores: int, all_cores: int, dtype: str, seconds: float) -> Figure:
    peak = CPU.peak_flops_per_s.get(dtype)
    return Figure(
        part=part,
        rate="matmul_flops_per_s",
        dtype=dtype,
        name="matmul",
        case={"cores": cores, "dtype": dtype},
        unit="FLOP/s",
        predicted=None if peak is None else MATMUL_SHARE * peak * cores / CPU.sm_count * vector_bytes() / AVX2_BYTES,
        limit=None,
        missing={"limit": NO_DATASHEET} | ({} if peak is not None else {"predicted": NO_UNIT}),
        measure=partial(_matmul, dtype, cores, all_cores, seconds),
    )


def _stream_figure(part: Part, cores: int, kind: str, buffers: Buffers, seconds: float) -> Figure:
    share = min(1.0, cores / CORES_TO_FILL_MEMORY)
    return Figure(
        part=part,
        rate=f"{kind}_bytes_per_s",
        name=kind,
        case={"cores": cores, "buffer": format_bytes(buffers.size_bytes)},
        unit="B/s",
        predicted=MEMORY_SHARE * share * CPU.memory_bytes_per_s,
        limit=None,
        missing={"limit": NO_DATASHEET},
        measure=partial(_stream, kind, cores, buffers, seconds),
    )


def _launch_figure(seconds: float) -> Figure:
    return Figure(
        part="one_core",
        rate="launch_s",
        name="call",
        case={"cores": 1},
        unit="s",
        predicted=CPU.launch_s,
        limit=None,
        missing={"limit": "no datasheet says what a call costs"},
        measure=partial(_launch, seconds),
    )


def _matmul(dtype: str, cores: int, all_cores: int, seconds: float) -> FigureOutcome:
    with torch_threads(cores):
        settle()
        size = best_size(lambda n: _one_matmul_s(n, DTYPES[dtype]), SIZES, longest_s=seconds / 4, slack=0.1)
        a, b, out = _matrices(size, DTYPES[dtype])
        ours = compare({"torch.mm": lambda index: torch.mm(a, b, out=out)}, repeats=9, warmup=1, seconds=seconds)
    outcome = best(ours, 2.0 * size**3)
    missing = _why_no_numpy(dtype, cores, all_cores)
    peers: dict[str, Sample] = {}
    if not missing:
        # One after the other: torch's threads and those of numpy's BLAS spin, and would take each other's cores.
        settle()
        a_numpy, b_numpy, out_numpy = a.numpy(), b.numpy(), np.empty_like(a.numpy())
        theirs = compare(
            {"numpy": lambda index: np.matmul(a_numpy, b_numpy, out=out_numpy)}, repeats=9, seconds=seconds
        )
        peers, missing = {"numpy": theirs["numpy"].rate(2.0 * size**3)}, {}
    return FigureOutcome(outcome.measured, peers, {**outcome.missing, **missing}, {**outcome.case, "n": size})


def _why_no_numpy(dtype: str, cores: int, all_cores: int) -> dict[str, str]:
    if dtype in ("bf16", "fp16"):
        return {"numpy": "numpy has no BLAS routine for 16-bit floats"}
    if cores < all_cores:
        return {"numpy": "numpy's BLAS keeps the threads it started with, so it cannot be held to one core"}
    return {}


def _one_matmul_s(size: int, dtype: torch.dtype) -> float:
    a, b, out = _matrices(size, dtype)
    if size == SIZES[0]:
        torch.mm(a, b, out=out)  # the first call of a dtype sets libraries up
    began = time.perf_counter()
    torch.mm(a, b, out=out)
    return time.perf_counter() - began


def _matrices(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.rand(size, size, generator=generator).to(dtype) for _ in range(2))
    return a, b, torch.zeros_like(a)


def _stream(kind: str, cores: int, buffers: Buffers, seconds: float) -> FigureOutcome:
    x, y = buffers.pair
    x_numpy, y_numpy = x.numpy(), y.numpy()
    # Several routines where torch has them: the figure is what the memory gives, not what one routine reaches.
    routines: dict[str, dict[str, Callable[[int], Any]]] = {
        "copy": {"copy_": lambda index: y.copy_(x), "numpy": lambda index: np.copyto(y_numpy, x_numpy)},
        "read": {
            "sum": lambda index: x.sum(),
            "amax": lambda index: x.amax(),
            "numpy": lambda index: x_numpy.max(),
        },
        "write": {"fill_": lambda index: y.fill_(1.5), "numpy": lambda index: y_numpy.fill(1.5)},
    }
    amount = buffers.size_bytes * (2.0 if kind == "copy" else 1.0)
    with torch_threads(cores):
        settle()
        result = compare(routines[kind], repeats=9, warmup=1, seconds=seconds)
    return best(result, amount, peers=["numpy"])


def _launch(seconds: float) -> FigureOutcome:
    x = torch.zeros(1)
    x_numpy = np.zeros(1, dtype=np.float32)
    with torch_threads(1):
        settle()
        result = compare(
            {"add_": lambda index: x.add_(1), "numpy": lambda index: np.add(x_numpy, 1, out=x_numpy)},
            repeats=31,
            seconds=seconds,
        )
    return best(result, None, peers=["numpy"])


class Buffers:
    """Two buffers far larger than the caches, made when first needed and shared by all streams."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // 4 * 4

    @cached_property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        # Written, not only allocated: pages nobody has written all map to one page of zeros, which stays cached.
        x = torch.empty(self.size_bytes // 4).fill_(1.0)
        return x, torch.empty_like(x).fill_(2.0)


def buffer_bytes(memory_bytes: int, *, quick: bool = False, cache_bytes: int | None = None) -> int:
    """How large a buffer to stream: four times the last cache and 256 MiB at least, an eighth of memory at most."""
    cache = last_cache_bytes() if cache_bytes is None else cache_bytes
    wanted = max(2 * cache, 64 << 20) if quick else max(4 * cache, 256 << 20)
    return min(wanted, memory_bytes // 8)
