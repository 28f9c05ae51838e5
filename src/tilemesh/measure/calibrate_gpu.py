"""What is measured of a GPU: matmul peak per dtype, memory bandwidth, and what one kernel costs host and device.

Kernel time throughout (`gpu.KernelTimer`), but for the host's cost of a call. Predictions and limits come from the
datasheet, where `core.hardware` has this GPU's. fp32 is IEEE arithmetic; tf32 is fp32 data on tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch

from tilemesh.core.hardware import Device, device_for
from tilemesh.core.units import format_bytes
from tilemesh.measure.figure import MATMUL_SHARE, MEMORY_SHARE, Figure, FigureOutcome, best, best_size
from tilemesh.measure.gpu import KernelTimer, call_timer, l2_cache_bytes
from tilemesh.measure.row import CaseValue
from tilemesh.measure.sample import Sample
from tilemesh.measure.timing import Call, compare

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}

# Where tensor cores reach their peak differs by GPU and library: the best of these counts.
SIZES = (2048, 4096, 8192)
LONGEST_S = 0.05

# The first compute capabilities with tensor cores for these dtypes.
NEEDS_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}

# Generic costs of a kernel where nothing was measured: the device's gap between two kernels of a graph.
KERNEL_FLOOR_S = 1.5e-6

NO_PEER = "torch calls the vendor's library here: it is the peer of others"


def gpu_figures(*, quick: bool = False) -> list[Figure]:
    """Every figure of the current GPU, predicted; nothing is measured yet."""
    name = torch.cuda.get_device_name()
    device = device_for(name)
    silent = f"no datasheet of '{name}' is known here"
    seconds = 0.3 if quick else 1.0
    capability = torch.cuda.get_device_capability()
    dtypes = [dtype for dtype in DTYPES if capability >= NEEDS_CAPABILITY.get(dtype, (0, 0))]
    figures = [_matmul_figure(name, device, silent, dtype, seconds) for dtype in dtypes]
    buffers = GpuBuffers(max(4 * l2_cache_bytes(), 1 << 30))
    figures += [_stream_figure(name, device, silent, kind, buffers, seconds) for kind in ("copy", "read", "write")]
    return [*figures, *_launch_figures(name, device, seconds)]


def _matmul_figure(name: str, device: Device | None, silent: str, dtype: str, seconds: float) -> Figure:
    peak = None if device is None else device.peak_flops_per_s.get(dtype)
    why = silent if device is None else f"the datasheet of {device.name} has no {dtype} peak"
    return datasheet_figure(
        "matmul", "matmul_flops_per_s", "FLOP/s", {"gpu": name, "dtype": dtype}, peak, MATMUL_SHARE, why,
        partial(_matmul, dtype, seconds), dtype=dtype,
    )  # fmt: skip


def _stream_figure(
    name: str, device: Device | None, silent: str, kind: str, buffers: GpuBuffers, seconds: float
) -> Figure:
    bandwidth = None if device is None else device.memory_bytes_per_s
    case: dict[str, CaseValue] = {"gpu": name, "buffer": format_bytes(buffers.size_bytes)}
    measure = partial(_stream, kind, buffers, seconds)
    return datasheet_figure(kind, f"{kind}_bytes_per_s", "B/s", case, bandwidth, MEMORY_SHARE, silent, measure)


def datasheet_figure(
    name: str, rate: str, unit: str, case: Mapping[str, CaseValue], limit: float | None, share: float, why: str,
    measure: Callable[[], FigureOutcome], *, dtype: str = "", key: str = "",
) -> Figure:  # fmt: skip
    """A rate of the GPU whose limit is its datasheet's: a share of that is predicted. Without a datasheet there is
    neither, and `why` says so."""
    return Figure(
        part="gpu", rate=rate, dtype=dtype, key=key, name=name, case=case, unit=unit, limit=limit,
        predicted=None if limit is None else share * limit, measure=measure,
        missing={"peers": NO_PEER} | ({"predicted": why, "limit": why} if limit is None else {}),
    )  # fmt: skip


def _launch_figures(name: str, device: Device | None, seconds: float) -> list[Figure]:
    missing = {"limit": "no datasheet says what a launch costs", "peers": NO_PEER}

    def figure(rate: str, what: str, predicted: float, measure: Callable[[], FigureOutcome]) -> Figure:
        return Figure(
            part="gpu", rate=rate, name=what, case={"gpu": name}, unit="s", predicted=predicted,
            limit=None, missing=missing, measure=measure,
        )  # fmt: skip

    host_s = Device.launch_s if device is None else device.launch_s
    return [
        figure("launch_s", "call (host)", host_s, partial(_tiny, True, seconds)),
        figure("kernel_floor_s", "kernel (device)", KERNEL_FLOOR_S, partial(_tiny, False, seconds)),
    ]


def _matmul(dtype: str, seconds: float) -> FigureOutcome:
    """The best of the sizes; each is timed alone, so that only one size's matrices are in memory."""
    samples: dict[int, Sample] = {}

    def seconds_of(size: int) -> float:
        result = compare({"matmul": _matmul_call(dtype, size)}, timer=KernelTimer(), repeats=15, seconds=seconds)
        samples[size] = result["matmul"]
        return samples[size].median

    with _fp32_precision(dtype):
        size = best_size(seconds_of, SIZES, LONGEST_S)
    return FigureOutcome(samples[size].rate(2.0 * size**3), case={"n": size})


def _matmul_call(dtype: str, size: int) -> Call:
    # Random values: a GPU's clock under load depends on how many bits flip, and zeros would flatter it.
    a, b = (torch.randn(size, size, device="cuda").to(DTYPES[dtype]) for _ in range(2))
    if dtype == "fp8":
        scale = torch.ones((), device="cuda")
        # torch's only way to cuBLASLt's fp8 product; it wants the second matrix column-major.
        return lambda index: torch._scaled_mm(
            a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    out = torch.empty_like(a)
    return lambda index: torch.mm(a, b, out=out)


@contextmanager
def _fp32_precision(dtype: str) -> Iterator[None]:
    """IEEE or tensor-core arithmetic for fp32 data, and back to what was set."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _stream(kind: str, buffers: GpuBuffers, seconds: float) -> FigureOutcome:
    x, y = buffers.pair
    routines: dict[str, dict[str, Callable[[int], Any]]] = {
        "copy": {"copy_": lambda index: y.copy_(x), "mul": lambda index: torch.mul(x, 1.0, out=y)},
        "read": {"sum": lambda index: x.sum(), "amax": lambda index: x.amax()},
        "write": {"fill_": lambda index: y.fill_(1.5), "zero_": lambda index: y.zero_()},
    }
    amount = buffers.size_bytes * (2.0 if kind == "copy" else 1.0)
    return best(compare(routines[kind], timer=KernelTimer(), repeats=15, seconds=seconds), amount)


def _tiny(host: bool, seconds: float) -> FigureOutcome:
    x = torch.zeros(1, device="cuda")
    timer = call_timer() if host else KernelTimer()
    return best(compare({"add_": lambda index: x.add_(1)}, timer=timer, repeats=31, seconds=seconds), None)


class GpuBuffers:
    """Two buffers far larger than the L2, made when first needed and shared by all streams."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // 4 * 4

    @cached_property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.rand(self.size_bytes // 4, device="cuda")
        return x, torch.empty_like(x)
