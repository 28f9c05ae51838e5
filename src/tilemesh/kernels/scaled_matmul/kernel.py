"""The Triton kernel of a product of 8-bit codes: tiles by TMA, sums in tensor cores, scales before anything is stored.

A program has every so many tiles of the result, so that one tile's first codes are on their way while another's results
are scaled and stored. Neighbouring programs have neighbouring rows of tiles, which share weights in the L2.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.steps import Argument, Descriptor, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.scaled_matmul.reference import by_library

_TOGETHER = 4  # rows of tiles that are computed before the next columns
_FEW, _MANY = 64, 4096  # rows


@triton.jit
def scaled_product(
    x, w, x_scales, scales, y, M, N, K, s_m, s_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TOGETHER: tl.constexpr,
    PROGRAMS: tl.constexpr, WHOLE: tl.constexpr, FLOAT8: tl.constexpr, UPCAST: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Every PROGRAMS-th tile of y. Reads (BLOCK_M + BLOCK_N) K codes for each."""
    across = tl.cdiv(N, BLOCK_N)
    down = tl.cdiv(M, BLOCK_M)
    steps = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), across * down, PROGRAMS, flatten=FLATTEN):
        band = tile // (TOGETHER * across)
        first = band * TOGETHER
        rows = tl.minimum(down - first, TOGETHER)
        row0 = (first + tile % (TOGETHER * across) % rows) * BLOCK_M
        column0 = tile % (TOGETHER * across) // rows * BLOCK_N
        made = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if WHOLE else tl.float32)
        for step in range(steps):
            left = x.load([row0, step * BLOCK_K])
            right = w.load([column0, step * BLOCK_K])
            if UPCAST:
                if FLOAT8:
                    left = left.to(tl.float8e4nv, bitcast=True)
                    right = right.to(tl.float8e4nv, bitcast=True)
                left, right = left.to(tl.float32), right.to(tl.float32)
                made += tl.dot(left, right.T, input_precision="ieee").to(made.dtype)
            else:
                made = tl.dot(left, right.T, made, out_dtype=made.dtype)
        m = row0 + tl.arange(0, BLOCK_M)
        n = column0 + tl.arange(0, BLOCK_N)
        by_row = tl.load(x_scales + m * s_m, mask=m < M, other=0.0)
        by_column = tl.load(scales + n * s_n, mask=n < N, other=0.0)
        found = made.to(tl.float32) * by_row[:, None] * by_column[None, :]
        to_y = y + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(to_y, found.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def plan(
    places: Mapping[str, Place], *, multiprocessors: int, interpreted: bool = False,
    tile: tuple[int, int, int, int, int] | None = None, flatten: bool = True, together: int = _TOGETHER,
) -> LaunchPlan:  # fmt: skip
    """`tile`: rows, columns, inputs, warps and stages of a program."""
    x, w = places["x"], places["w"]
    (m, k), n = x.shape, w.shape[0]
    high, across, deep, warps, stages = tile or _tile(m, n)
    arguments: dict[str, Argument] = {
        "x": Descriptor("x", x.shape, x.strides, (high, deep)),
        "w": Descriptor("w", w.shape, w.strides, (across, deep)),
        "x_scales": Pointer("x_scales"), "scales": Pointer("scales"), "y": Pointer("y"), "M": m, "N": n, "K": k,
        "s_m": 0 if places["x_scales"].shape[0] == 1 else 1, "s_n": 0 if places["scales"].shape[0] == 1 else 1,
    }  # fmt: skip
    programs = min(multiprocessors, blocks(m, high) * blocks(n, across))
    constants = {
        "BLOCK_M": high, "BLOCK_N": across, "BLOCK_K": deep, "TOGETHER": together, "PROGRAMS": programs,
        "WHOLE": x.dtype == "int8", "FLOAT8": x.dtype == "uint8", "UPCAST": interpreted, "FLATTEN": flatten,
    }  # fmt: skip
    step = Step(f"{__name__}:scaled_product", (programs, 1), arguments, constants, warps=warps, stages=stages)
    return LaunchPlan((step,))


def _tile(rows: int, outputs: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and inputs of a tile, warps and stages: the best of those tried on an H200, see
    docs/compress/LOG.md."""
    if rows <= _FEW:
        return _FEW, 64, 256, 4, 4
    return (128, 128, 128, 8, 4) if rows * outputs <= 2048 * 2048 else (128, 256, 128, 8, 4)


def library_is_quicker(x: Tensor, weight: Tensor, code: str, dtype: str) -> bool:
    """Products of fp8 codes that `_scaled_mm` serves and was quicker at on an H200 (docs/compress/LOG.md): few rows,
    which it divides over the inputs, and very many."""
    if code != "fp8" or dtype != "bfloat16" or x.device.type != "cuda":
        return False
    return (len(x) <= _FEW or len(x) >= _MANY) and x.shape[1] % 16 == 0 and len(weight) % 16 == 0


def forward(launch: Any, x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, code: str, dtype: str) -> Tensor:
    if library_is_quicker(x, weight, code, dtype):
        return by_library(x.contiguous(), weight.contiguous(), x_scales, scales, code=code, dtype=dtype)
    y = torch.empty((len(x), len(weight)), dtype=getattr(torch, dtype), device=x.device)
    x, weight = (matrix if matrix.is_contiguous() else matrix.contiguous() for matrix in (x, weight))
    on_cpu = x.device.type == "cpu"
    if code == "fp8" and not on_cpu:  # Triton's interpreter has no such memory
        x, weight = x.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn)
    given = {"x": x, "w": weight, "x_scales": x_scales.contiguous(), "scales": scales.contiguous(), "y": y}
    count = 4 if on_cpu else torch.cuda.get_device_properties(x.device).multi_processor_count
    launch(plan, given, written=("y",), multiprocessors=count, interpreted=on_cpu)
    return y
