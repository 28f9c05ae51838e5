"""The Triton kernel of a rotary embedding and the plan that launches it; backward turns by the negative angle.

A program owns ROWS x SHARED x E/2 pairs, where the tables' values are the same along the shared dimension (the heads):
it loads them once. Without that, float32 tables would be twice as many bytes as 16-bit pairs.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, blocks
from tilemesh.kernels.rotary.reference import MOST_DIMS

_PAIRS = 1024  # of a program: 8 per thread, which are two loads of 16 bytes in 16-bit precision
_SHARED = 8  # heads of a program, at most


@triton.jit
def turned(a, b, c, s):
    """a c - b s and b c + a s, rounded alike wherever this is compiled into: which of two products is fused into the
    sum would else be the compiler's choice."""
    c, s = c + tl.zeros_like(a), s + tl.zeros_like(a)
    return tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s)


@triton.jit
def turn(
    x, cos, sin, y, M, Q, S, H, x_p, x_q, x_s, x_e, c_p, c_q, c_e, s_p, s_q, s_e, y_p, y_q, y_s,
    ROWS: tl.constexpr, SHARED: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """M rows of the tables, S heads for each, H pairs per head. Reads x once and writes y once."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    across = (S + SHARED - 1) // SHARED
    rows = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS))[:, None, None]
    shared = (tl.program_id(0) % across * SHARED + tl.arange(0, SHARED))[None, :, None]
    pairs = tl.arange(0, HALF)[None, None, :]
    first, second = rows // Q, rows % Q
    listed = (rows < M) & (pairs < H)
    c = tl.load(cos + first * c_p + second * c_q + pairs * c_e, mask=listed, other=0.0).to(kind)
    s = tl.load(sin + first * s_p + second * s_q + pairs * s_e, mask=listed, other=0.0).to(kind)
    if BACK:
        s = -s
    inside = listed & (shared < S)
    source = x + first * x_p + second * x_q + shared * x_s + pairs * x_e
    a = tl.load(source, mask=inside, other=0.0).to(kind)
    b = tl.load(source + H * x_e, mask=inside, other=0.0).to(kind)
    target = y + first * y_p + second * y_q + shared * y_s + pairs
    a, b = turned(a, b, c, s)
    tl.store(target, a.to(y.dtype.element_ty), mask=inside)
    tl.store(target + H, b.to(y.dtype.element_ty), mask=inside)


def turn_plan(places: Mapping[str, Place], *, back: bool) -> LaunchPlan:
    x, cos, sin, y = (places[name] for name in ("x", "cos", "sin", "y"))
    at = _shared_dim(x.shape, cos.strides, sin.strides)
    assert at is not None
    p, q = (dim for dim in range(MOST_DIMS - 1) if dim != at)
    half, shared, rows_count = x.shape[3] // 2, x.shape[at], x.shape[p] * x.shape[q]
    numbers: dict[str, Argument] = {}
    for letter, place in (("x", x), ("c", cos), ("s", sin), ("y", y)):
        numbers |= {f"{letter}_p": place.strides[p], f"{letter}_q": place.strides[q]}
    numbers |= {
        "M": rows_count, "Q": x.shape[q], "S": shared, "H": half, "x_s": x.strides[at], "y_s": y.strides[at],
        "x_e": x.strides[3], "c_e": cos.strides[3], "s_e": sin.strides[3],
    }  # fmt: skip
    wide_half = triton.next_power_of_2(half)
    heads = min(_SHARED, triton.next_power_of_2(shared))
    rows = max(1, _PAIRS // (heads * wide_half))
    constants = {"ROWS": rows, "SHARED": heads, "HALF": wide_half, "BACK": back, "WIDE": x.dtype == "float64"}
    grid = (blocks(rows_count, rows) * blocks(shared, heads), 1)
    return one_launch(f"{__name__}:turn", grid, places, numbers, constants)


def _shared_dim(shape: Sequence[int], cos: Sequence[int], sin: Sequence[int]) -> int | None:
    """The last dimension along which the tables do not change, else one of size 1."""
    for dim in (2, 1, 0):
        if shape[dim] > 1 and not cos[dim] and not sin[dim]:
            return dim
    return next((dim for dim in (0, 1, 2) if shape[dim] == 1), None)


def _turned(launch: Any, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[-1]
    shape = (*(1,) * (MOST_DIMS - x.dim()), *x.shape)
    half = (*shape[:-1], width // 2)
    x, cos, sin = x.view(shape), cos.expand(half), sin.expand(half)
    if _shared_dim(shape, cos.stride(), sin.stride()) is None:  # three dimensions of angles: two of them become one
        x, cos, sin = (tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in (x, cos, sin))
    given = {"x": x, "cos": cos, "sin": sin, "y": y.view(x.shape)}
    launch(turn_plan, given, written=("y",), back=back)
    return y


def forward(launch: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _turned(launch, x, cos, sin, back=False)


def backward(
    launch: Any, gradients: tuple[Tensor, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
) -> tuple[Tensor, None, None]:
    _, cos, sin = arguments
    return _turned(launch, gradients[0], cos, sin, back=True), None, None
