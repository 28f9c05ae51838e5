"""The kernel of 4-bit codes times 17 to 256 rows, for Hopper GPUs.

The one idea: a code becomes a number once for all rows of a tile, in the registers that tensor cores take their first
operand from, so nothing but the codes and the activations moves through shared memory. A byte has the codes of two
neighbouring inputs, so the activations' even and odd columns are put apart beforehand.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.early import take_turn
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.steps import Argument, Buffer, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.lowbit_linear import tokens

MOST = 256
"""Rows; with more, decoding the matrix once and the library's product are quicker."""
STEP = 128
"""Inputs of a step: at most a group."""
_SMALL = 32  # rows of a program, several of which fit on a multiprocessor
_PAIRS = 512  # of neighbouring inputs that a program puts apart


@triton.jit
def _codes_as_bf16(raw):
    """Both codes of every byte as bfloat16, less 8: four bytes at a time, twelve instructions.

    A code is put behind a leading one (128), which is then subtracted, exactly, with the 8.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b, lead, one, less;
        mov.b32 lead, 0x43004300; mov.b32 one, 0x3F803F80; mov.b32 less, 0xC308C308;
        prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
        lop3.b32 $0, a, 0x000F000F, lead, 0xEA; lop3.b32 $1, b, 0x000F000F, lead, 0xEA;
        shr.b32 a, a, 4; shr.b32 b, b, 4;
        lop3.b32 $2, a, 0x000F000F, lead, 0xEA; lop3.b32 $3, b, 0x000F000F, lead, 0xEA;
        fma.rn.bf16x2 $0, $0, one, less; fma.rn.bf16x2 $1, $1, one, less;
        fma.rn.bf16x2 $2, $2, one, less; fma.rn.bf16x2 $3, $3, one, less; }""",
        "=&r,=&r,=&r,=&r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def put_apart(x, halves, COUNT, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The even columns of all rows, and then the odd ones: COUNT pairs."""
    if EARLY:
        take_turn()
    first = tl.program_id(0) * BLOCK
    both = 2 * first + tl.arange(0, 2 * BLOCK)
    even, odd = tl.split(tl.reshape(tl.load(x + both, mask=both < 2 * COUNT, other=0.0), (BLOCK, 2)))
    at = first + tl.arange(0, BLOCK)
    tl.store(halves + at, even, mask=at < COUNT)
    tl.store(halves + COUNT + at, odd, mask=at < COUNT)


@triton.jit
def some_rows(
    halves, w, scales, y, parts, M, N, K, turns, w_n, s_n, y_m,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """OUTPUTS of the N columns of y for ROWS of its rows, where codes of 4 bits have no zero points.

    halves: (2, M, K / 2), the even inputs and then the odd ones, so that both are tiles that tensor cores read where a
    copy left them. Codes are made numbers once for all ROWS, in the registers that tensor cores take them from.
    """
    if EARLY:
        take_turn()
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    turn = tl.program_id(1) % SPLIT
    m = tl.program_id(1) // SPLIT * ROWS + tl.arange(0, ROWS)
    half = K // 2
    lines = w + tl.minimum(n, N - 1)[:, None].to(tl.int64) * w_n
    even_at = halves + tl.minimum(m, M - 1)[:, None] * half
    odd_at = even_at + M * half
    to_scale = scales + tl.minimum(n, N - 1) * s_n
    made = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for round_ in range(turns):
        start = (turn * turns + round_) * STEP
        at = start // 2 + tl.arange(0, STEP // 2)
        raw = tl.load(lines + at[None, :])
        even = tl.load(even_at + at[None, :])
        odd = tl.load(odd_at + at[None, :])
        part = tl.zeros((OUTPUTS, ROWS), tl.float32)
        if UPCAST:
            first, second = (raw & 15).to(tl.float32) - 8.0, (raw >> 4).to(tl.float32) - 8.0
            part = tl.dot(first, even.to(tl.float32).T, part, input_precision="ieee")
            part = tl.dot(second, odd.to(tl.float32).T, part, input_precision="ieee")
        else:
            first, second = _codes_as_bf16(raw)
            part = tl.dot(first, even.T, part)
            part = tl.dot(second, odd.T, part)
        made += tl.load(to_scale + start // GROUP)[:, None] * part
    kept = (n < N)[:, None] & (m < M)[None, :]
    if SPLIT == 1:
        tl.store(y + m[None, :] * y_m + n[:, None], made.to(y.dtype.element_ty), mask=kept)
    else:
        tl.store(parts + (turn * M + m[None, :]).to(tl.int64) * N + n[:, None], made, mask=kept)


@triton.jit
def add_parts(parts, y, COUNT, SPLIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The sums of all programs, in one order."""
    if EARLY:
        take_turn()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    made = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(0, SPLIT):
        made += tl.load(parts + turn * COUNT + at, mask=at < COUNT, other=0.0)
    tl.store(y + at, made.to(y.dtype.element_ty), mask=at < COUNT)


@dataclass(frozen=True)
class SomeRows:
    """Of a program of `some_rows`: rows, outputs, warps, stages, and over how many programs inputs are divided."""

    rows: int
    outputs: int
    warps: int
    stages: int
    split: int


def form_of(x: Tensor) -> SomeRows | None:
    """The form that takes these rows of bfloat16; None: too few or too many for it, or no Hopper GPU, which it was
    measured on (docs/compress/LOG.md): its tiles need that much shared memory."""
    rows, inputs = x.shape
    if rows <= tokens.MOST or rows > MOST or x.dtype is not torch.bfloat16:
        return None
    if torch.cuda.get_device_capability(x.device)[0] != 9:
        return None
    form = _form(rows)
    return form if inputs % (STEP * form.split) == 0 else None


def _form(rows: int) -> SomeRows:
    if rows <= 32:
        return SomeRows(32, 64, 4, 4, 2)
    if rows <= 64:
        return SomeRows(64, 64, 4, 4, 2)
    return SomeRows(128, 64, 4, 3, 2 if rows <= 128 else 1)


def plan(
    places: Mapping[str, Place], *, rows: int, outputs: int, warps: int, stages: int, split: int, upcast: bool = False,
    early: bool = False,
) -> LaunchPlan:  # fmt: skip
    x, w, scales = places["x"], places["w"], places["scales"]
    (m, k), n = x.shape, w.shape[0]
    pairs = m * k // 2
    apart: dict[str, Argument] = {"x": Pointer("x"), "halves": Pointer("halves"), "COUNT": pairs}
    first = Step(
        f"{__name__}:put_apart", (blocks(pairs, _PAIRS), 1), apart, {"BLOCK": _PAIRS, "EARLY": early}, early=early
    )
    arguments: dict[str, Argument] = {name: Pointer(name) for name in ("halves", "w", "scales", "y")}
    arguments["parts"] = Pointer("parts") if split > 1 else None
    s_n = 0 if scales.shape[0] == 1 else scales.strides[0]
    arguments |= {"M": m, "N": n, "K": k, "turns": k // STEP // split}
    arguments |= {"w_n": w.strides[0], "s_n": s_n, "y_m": places["y"].strides[0]}
    # Small programs that begin while others still end would be put where there is room first, several to one
    # multiprocessor and none to another.
    is_early = early and rows > _SMALL
    constants = {
        "ROWS": rows, "OUTPUTS": outputs, "STEP": STEP, "GROUP": k // scales.shape[1], "SPLIT": split,
        "UPCAST": upcast, "EARLY": is_early,
    }  # fmt: skip
    grid = (blocks(n, outputs), blocks(m, rows) * split)
    second = Step(f"{__name__}:some_rows", grid, arguments, constants, warps=warps, stages=stages, early=is_early)
    buffers = {"halves": Buffer(m * k, x.dtype)}
    if split == 1:
        return LaunchPlan((first, second), buffers)
    return LaunchPlan(
        (first, second, adding(m * n, split, early)), {**buffers, "parts": Buffer(split * m * n, "float32")}
    )


def product(launch: Any, x: Tensor, codes: Tensor, scales: Tensor, y: Tensor, form: SomeRows) -> None:
    """y (M, N) = x (M, K) W^T; K is a multiple of the form's splits times 128."""
    given = {"x": x.contiguous(), "w": codes, "scales": scales, "y": y}
    told = {"upcast": x.device.type == "cpu", "early": launches_early(x.device)}
    launch(plan, given, written=("y",), **asdict(form), **told)


def adding(count: int, split: int, early: bool = False) -> Step:
    given: dict[str, Argument] = {"parts": Pointer("parts"), "y": Pointer("y"), "COUNT": count}
    constants = {"SPLIT": split, "BLOCK": 1024, "EARLY": early}
    return Step(f"{__name__}:add_parts", (blocks(count, 1024), 1), given, constants, early=early)
