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
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, Descriptor, FitError, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.launch.tensors import for_tma
from tilemesh.kernels.scaled_matmul.reference import by_library, scaled_matmul

_TOGETHER = 4  # rows of tiles that are computed before the next columns
_FEW, _MANY = 64, 4096  # rows
HOPPER_SHARED_BYTES = 227 << 10  # of a block, on an H100 or H200
_TILES = ((128, 256, 128, 8), (128, 128, 128, 8), (64, 64, 256, 4))
_STAGES = (4, 3, 2)


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
    shared_bytes: int = HOPPER_SHARED_BYTES, tile: tuple[int, int, int, int, int] | None = None, flatten: bool = True,
    together: int = _TOGETHER,
) -> LaunchPlan:  # fmt: skip
    """`tile`: rows, columns, inputs, warps and stages of a program. `shared_bytes`: the shared memory of a block."""
    x, w = places["x"], places["w"]
    (m, k), n = x.shape, w.shape[0]
    high, across, deep, warps, stages = tile or tile_of(m, n, places["y"].dtype, shared_bytes)
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


def tile_of(rows: int, outputs: int, dtype: str, limit_bytes: int) -> tuple[int, int, int, int, int]:
    """Rows, columns and inputs of a tile, warps and stages: the best of those tried on an H200 (docs/compress/LOG.md)
    that fits the shared memory of a block; fewer stages, then smaller tiles, where it does not."""
    small = 2 if rows <= _FEW else 1 if rows * outputs <= 2048 * 2048 else 0
    for tile in _TILES[small:]:
        for stages in _STAGES[:2] if tile is _TILES[0] else _STAGES:  # two of the widest were not tried
            if bytes_of_tile((*tile, stages), dtype) <= limit_bytes:
                return (*tile, stages)
    raise FitError(f"a product of 8-bit codes needs {bytes_of_tile((*tile, stages), dtype)} bytes of shared memory per "
                   f"block, this GPU has {limit_bytes}")  # fmt: skip


def bytes_of_tile(tile: tuple[int, int, int, int, int], dtype: str) -> int:
    """Shared memory of a block, at most: the codes of all stages with a barrier each, and the results on their way from
    the tensor cores' order to memory's, which are there at the same time (the loop over tiles is flattened). Triton
    moves the widest tile's results of 16 bits in two halves."""
    high, across, deep, _, stages = tile
    results = high * across * (4 if dtype == "float32" else 2)
    if across == 256 and dtype != "float32":
        results //= 2
    return stages * ((high + across) * deep + 8) + results


def library_is_quicker(x: Tensor, weight: Tensor, code: str, dtype: str) -> bool:
    """Products of fp8 codes that `_scaled_mm` serves and was quicker at on an H200 (docs/compress/LOG.md): few rows,
    which it divides over the inputs, and very many."""
    if code != "fp8" or dtype != "bfloat16" or x.device.type != "cuda":
        return False
    return (len(x) <= _FEW or len(x) >= _MANY) and x.shape[1] % 16 == 0 and len(weight) % 16 == 0


def forward(launch: Any, x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, code: str, dtype: str) -> Tensor:
    x, weight = for_tma(x), for_tma(weight)
    y = torch.empty((len(x), len(weight)), dtype=getattr(torch, dtype), device=x.device)
    if library_is_quicker(x, weight, code, dtype):
        return by_library(x, weight, x_scales, scales, code=code, dtype=dtype, out=y)
    on_cpu = x.device.type == "cpu"
    if code == "fp8" and not on_cpu:  # Triton's interpreter has no such memory
        x, weight = x.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn)
    given = {"x": x, "w": weight, "x_scales": x_scales.contiguous(), "scales": scales.contiguous(), "y": y}
    device = {"multiprocessors": 4}
    if not on_cpu:
        gpu = gpu_of(device_index(x.device))
        device = {"multiprocessors": gpu.multiprocessors, "shared_bytes": gpu.shared_bytes}
    try:
        launch(plan, given, written=("y",), **device, interpreted=on_cpu)
    except FitError:  # another GPU's shared memory, or another Triton's use of it
        y = scaled_matmul.reference(x, weight, x_scales, scales, code=code, dtype=dtype)  # type: ignore[attr-defined]
    return y
