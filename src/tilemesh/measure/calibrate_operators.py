"""What is measured of a processor's training operators: fused attention, elementwise products and exponentials.

A Transformer step on a CPU is matmuls, which a peak describes, and these, which no peak describes: attention over
small heads, tensors that half fit a cache, activations bound by their exponential. All in fp32, at the sizes of a
layer of a small model, since larger ones approach the streams that are measured apart.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from tilemesh.core.calibration import Part
from tilemesh.core.hardware import CPU
from tilemesh.measure.figure import MATMUL_SHARE, MEMORY_SHARE, Figure, FigureOutcome, best
from tilemesh.measure.row import CaseValue
from tilemesh.measure.timing import compare, settle

AVX2_BYTES = 32  # the vector the generic CPU computes with
CLOCK_HZ = 3e9  # of the generic CPU
EXPONENTIAL_STEPS = 20  # instructions of a vectorised exponential and its division, about

HEAD_WIDTHS = (32, 64)
ROWS, HEADS, CONTEXT = 8, 4, 128  # sequences, heads and tokens of the attention that is timed
ELEMENTS = 1024 * 512  # of the tensors that are multiplied: 2 MiB each
ATTENTION_SHARE = 0.4  # of a matmul's rate, what attention of small heads is expected to reach

NO_LIMIT = "bounded by the matmul peak and the memory's bandwidth, in rows of their own"
NO_PEER = "torch's own operator: it is the peer of others"


def operator_figures(part: Part, cores: int, seconds: float) -> list[Figure]:
    """Attention forward and backward by head width, a product, an activation; predicted, not yet measured."""
    lanes = vector_bytes() / 4
    attention = ATTENTION_SHARE * MATMUL_SHARE * CPU.peak_flops_per_s["fp32"] * cores / CPU.sm_count
    figures = [
        operator_figure(part, cores, "attention_flops_per_s", "FLOP/s", attention * vector_bytes() / AVX2_BYTES,
                partial(_attention, width, backward, cores, seconds), f"{_word(backward)}-{width}")
        for width in HEAD_WIDTHS for backward in (False, True)
    ]  # fmt: skip
    stream = MEMORY_SHARE * min(1.0, cores / 2) * CPU.memory_bytes_per_s
    figures.append(
        operator_figure(part, cores, "elementwise_bytes_per_s", "B/s", stream, partial(_product, cores, seconds))
    )
    exponentials = cores * CLOCK_HZ * lanes / EXPONENTIAL_STEPS
    figures.append(
        operator_figure(
            part, cores, "exponentials_per_s", "elements/s", exponentials, partial(_activation, cores, seconds)
        )
    )
    return figures


def operator_figure(
    part: Part, cores: int, rate: str, unit: str, predicted: float, measure: Callable[[], FigureOutcome], key: str = ""
) -> Figure:
    name = rate.partition("_")[0]
    case: dict[str, CaseValue] = {"cores": cores, "dtype": "fp32"}
    if key:
        case["pass"] = key
    missing = {"limit": NO_LIMIT, "peers": NO_PEER}
    return Figure(
        part=part, rate=rate, name=name, case=case, unit=unit, predicted=predicted, limit=None, missing=missing,
        measure=measure, key=key,
    )  # fmt: skip


def timed_operator(
    name: str, call: Callable[[int], object], cores: int, seconds: float, amount: float | None
) -> FigureOutcome:
    """On so many threads: a rate of `amount` per second, or seconds where that is None."""
    with torch_threads(cores):
        settle()
        result = compare({name: call}, repeats=9, warmup=1, seconds=seconds)
    return best(result, amount)


def attention_flops(rows: int, heads: int, context: int, width: int, backward: bool) -> float:
    """Of causal attention, the masked half not counted; backward makes the scores again and four products more."""
    forward = 4 * rows * heads * context * context * width / 2
    return 2.5 * forward if backward else forward


def _attention(width: int, backward: bool, cores: int, seconds: float) -> FigureOutcome:
    q, k, v = (torch.rand(ROWS, HEADS, CONTEXT, width, requires_grad=True) for _ in range(3))

    def forward(index: int) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward(0)
    gradient = torch.ones_like(out)

    def back(index: int) -> object:
        return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    flops = attention_flops(ROWS, HEADS, CONTEXT, width, backward)
    return timed_operator("sdpa", back if backward else forward, cores, seconds, flops)


def _product(cores: int, seconds: float) -> FigureOutcome:
    """A new tensor each time, as eager code makes them."""
    a, b = torch.rand(ELEMENTS), torch.rand(ELEMENTS)
    return timed_operator("mul", lambda index: a * b, cores, seconds, 3 * 4 * ELEMENTS)


def _activation(cores: int, seconds: float) -> FigureOutcome:
    x = torch.rand(ELEMENTS)
    return timed_operator("silu", lambda index: functional.silu(x), cores, seconds, ELEMENTS)


def _word(backward: bool) -> str:
    return "backward" if backward else "forward"


def vector_bytes(cpuinfo: Path = Path("/proc/cpuinfo"), arch: str | None = None) -> int:
    """How wide this processor's vectors are, by what it says it can do; NEON's 16 on arm64, AVX2's 32 unless told."""
    if (arch or platform.machine()) in ("aarch64", "arm64"):
        return 16
    try:
        return 64 if "avx512f" in cpuinfo.read_text().split() else AVX2_BYTES
    except OSError:
        return AVX2_BYTES


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute with this many threads, and give back what was set."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
