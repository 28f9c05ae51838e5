"""The Triton kernels of a product with weights of 4 or 8 bits.

A few rows: every code is read once and becomes a number in registers, on its way into the tensor cores as their first
operand. A code of 4 bits is put behind a leading one (as a bfloat16, 0x4300 is 128 and its last four bits count ones),
so that no conversion is needed; what that adds to every weight, x's sum times it, is taken off per group. On Hopper
GPUs, 4 bits and few tokens are for the CUDA kernel of `tokens.py`, and some more for `some_rows.py`. Many rows: the
codes are made a matrix once, and the library multiplies.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tilemesh.kernels.grouped_linear.kernel import rows_of
from tilemesh.kernels.grouped_linear.plan import multiply_rows
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import Argument, Buffer, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.lowbit_linear import some_rows, tokens
from tilemesh.kernels.row_linear.reference import gated

FEW, FEW_TOKENS = 128, 64
"""Up to so many rows codes are decoded on their way into the product, by the kernels here and by `tokens.py`'s; see
docs/compress/LOG.md."""
MANY = 256
"""Rows of each of several matrices from which on these are decoded once: a block of 64 rows reads all codes."""
_MAGIC = {"bfloat16": (0x4300, 128), "float16": (0x6400, 1024)}  # a leading one, and what it adds
_DECODE_TILE, _DECODE_CODES = 4096, 1024  # of a program, and of those the most in a row


@triton.jit
def few_rows(
    x, w, scales, zeros, y, parts, ends, M, N, K, X, turns, x_m, w_n, s_n, y_m,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr,
    ZEROS: tl.constexpr, MAGIC: tl.constexpr, ADDS: tl.constexpr, UPCAST: tl.constexpr, SPLIT: tl.constexpr,
    MATRICES: tl.constexpr,
):  # fmt: skip
    """OUTPUTS of the N columns of y for ROWS of its rows. Reads each code once per block of rows.

    SPLIT: over how many programs the inputs of a product are divided; each then writes what it has into `parts`.
    MATRICES: at least X, of which each has rows of its own, up to its place in `ends`; 0: there is one for all rows.
    """
    kind: tl.constexpr = tl.float32 if UPCAST else x.dtype.element_ty
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    turn = tl.program_id(1) % SPLIT
    m = tl.program_id(1) // SPLIT * ROWS + tl.arange(0, ROWS)
    if MATRICES:
        matrix, begin, M = rows_of(ends, X, tl.program_id(1), MATRICES, ROWS)
        m = begin + tl.arange(0, ROWS)
        turns = tl.where(matrix < X, turns, 0)  # there are no rows left for this program
        w += matrix.to(tl.int64) * N * w_n
        scales += matrix * N * s_n
        if ZEROS:
            zeros += matrix * N * s_n
    lines = w + n[:, None].to(tl.int64) * w_n
    made = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for round_ in range(turns):
        start = (round_ * SPLIT + turn) * STEP
        part = tl.zeros((OUTPUTS, ROWS), tl.float32)
        if FOUR:
            at = start // 2 + tl.arange(0, STEP // 2)
            both = start + tl.arange(0, STEP)
            inside = (m < M)[:, None] & (both < K)[None, :]
            values = tl.load(x + m[:, None] * x_m + both[None, :], mask=inside, other=0.0).to(kind)
            even, odd = tl.split(tl.reshape(values, (ROWS, STEP // 2, 2)))
            even, odd = tl.trans(even), tl.trans(odd)
            held = (n < N)[:, None] & (2 * at < K)[None, :]
            raw = tl.load(lines + at[None, :], mask=held, other=0, eviction_policy="evict_first").to(tl.int16)
            if MAGIC:
                first = ((raw & 15) | MAGIC).to(kind, bitcast=True)
                second = ((raw >> 4) | MAGIC).to(kind, bitcast=True)
            else:
                first, second = (raw & 15).to(kind), (raw >> 4).to(kind)
            part = tl.dot(first, even, part, input_precision="ieee")
            part = tl.dot(second, odd, part, input_precision="ieee")
            total = tl.sum(even.to(tl.float32), 0) + tl.sum(odd.to(tl.float32), 0)
        else:
            at = start + tl.arange(0, STEP)
            inside = (at < K)[:, None] & (m < M)[None, :]
            value = tl.load(x + m[None, :] * x_m + at[:, None], mask=inside, other=0.0).to(kind)
            held = (n < N)[:, None] & (at < K)[None, :]
            raw = tl.load(lines + at[None, :], mask=held, other=0, eviction_policy="evict_first")
            part = tl.dot(raw.to(kind), value, part, input_precision="ieee")
            total = tl.sum(value.to(tl.float32), 0)
        group = start // GROUP
        scale = tl.load(scales + n * s_n + group, mask=(n < N) & (start < K), other=0.0)
        if FOUR or ZEROS:
            offset = tl.zeros((OUTPUTS,), tl.float32) + ADDS
            if ZEROS:
                offset += tl.load(zeros + n * s_n + group, mask=(n < N) & (start < K), other=0).to(tl.float32)
            part -= offset[:, None] * total[None, :]
        made += scale[:, None] * part
    kept = (n < N)[:, None] & (m < M)[None, :]
    if SPLIT == 1:
        tl.store(y + m[None, :] * y_m + n[:, None], made.to(y.dtype.element_ty), mask=kept)
    else:
        tl.store(parts + (turn * M + m[None, :]).to(tl.int64) * N + n[:, None], made, mask=kept)


@triton.jit
def decode_pass(
    w, scales, zeros, y, N, K, w_n, s_n,
    ROWS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, FOUR: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """The matrix that codes mean. Reads each once, writes K numbers per row. All CODES of a row share a scale.

    A thread has neighbouring bytes, and both halves of a byte are its own: they are written side by side.
    """
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * CODES
    inside = (n < N)[:, None]
    group = n * s_n + start // GROUP
    scale = tl.load(scales + group, mask=n < N, other=0.0)[:, None]
    line = w + n[:, None].to(tl.int64) * w_n
    offset = tl.zeros((ROWS, 1), tl.float32)
    if ZEROS:
        offset += tl.load(zeros + group, mask=n < N, other=0).to(tl.float32)[:, None]
    if FOUR:
        raw = tl.load(line + (start // 2 + tl.arange(0, CODES // 2))[None, :], mask=inside, other=0)
        first = ((raw & 15).to(tl.float32) - 8.0 - offset) * scale
        second = ((raw >> 4).to(tl.float32) - 8.0 - offset) * scale
        value = tl.reshape(tl.join(first, second), (ROWS, CODES))
    else:
        raw = tl.load(line + (start + tl.arange(0, CODES))[None, :], mask=inside, other=0)
        value = (raw.to(tl.float32) - offset) * scale
    k = start + tl.arange(0, CODES)
    to_y = y + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(to_y, value.to(y.dtype.element_ty), mask=inside & (k < K)[None, :])


def plan(
    places: Mapping[str, Place], *, code: str, outputs: int = 0, warps: int = 0, stages: int = 0, split: int = 0,
    step: int = 0, upcast: bool = False,
) -> LaunchPlan:  # fmt: skip
    """Of a product with a few rows. What is 0 is chosen by the number of rows. With `ends`, of several matrices under
    one another, each with its rows."""
    x, w, scales = places["x"], places["w"], places["scales"]
    matrices = places["ends"].shape[0] if "ends" in places else 0
    (m, k), n = x.shape, w.shape[0] // max(1, matrices)
    group = k // scales.shape[1]
    each = blocks(m, max(1, matrices))  # rows of a matrix
    rows = min(64, max(16, triton.next_power_of_2(each)))
    chosen = _configuration(each, code)
    split = split or (1 if matrices else 0)
    outputs, warps, stages, split = outputs or chosen[0], warps or chosen[1], stages or chosen[2], split or chosen[3]
    step = step or (128 if scales.shape[1] == 1 else min(128, group & -group))
    magic, adds = (0, 8) if upcast or code == "int8" else _MAGIC.get(x.dtype, (0, 0))
    if not upcast and code == "int4":
        adds += 8
    arguments: dict[str, Argument] = {name: Pointer(name) for name in places}
    arguments = {"zeros": None, "ends": None, **arguments, "parts": Pointer("parts") if split > 1 else None}
    s_n = 0 if scales.shape[0] == 1 else scales.strides[0]
    strides = {"x_m": x.strides[0], "w_n": w.strides[0], "s_n": s_n, "y_m": places["y"].strides[0]}
    arguments |= {"M": m, "N": n, "K": k, "X": matrices, "turns": blocks(blocks(k, step), split), **strides}
    constants = {
        "ROWS": rows, "OUTPUTS": outputs, "STEP": step, "GROUP": group, "FOUR": code == "int4",
        "ZEROS": "zeros" in places, "MAGIC": magic, "ADDS": float(adds if code == "int4" else 0), "UPCAST": upcast,
        "SPLIT": split, "MATRICES": triton.next_power_of_2(matrices) if matrices else 0,
    }  # fmt: skip
    grid = (blocks(n, outputs), (blocks(m, rows) + matrices) * split)
    first = Step(f"{__name__}:few_rows", grid, arguments, constants, warps=warps, stages=stages)
    if split == 1:
        return LaunchPlan((first,))
    return LaunchPlan((first, some_rows.adding(m * n, split)), {"parts": Buffer(split * m * n, "float32")})


def _configuration(rows: int, code: str) -> tuple[int, int, int, int]:
    """Outputs of a program, its warps and stages, and over how many programs a product's inputs are divided: the best
    of those tried on an H200 for 8192 x 8192 (docs/compress/LOG.md)."""
    if code == "int8":
        return 32, 4, 4, 1
    return (64, 4, 4, 2) if rows <= 16 else (128, 4, 4, 2)


def decode_plan(places: Mapping[str, Place], *, code: str) -> LaunchPlan:
    w, scales, y = places["w"], places["scales"], places["y"]
    n, k = y.shape
    numbers: dict[str, Argument] = {} if "zeros" in places else {"zeros": None}
    numbers |= {"N": n, "K": k, "w_n": w.strides[0], "s_n": 0 if scales.shape[0] == 1 else scales.strides[0]}
    group = k // scales.shape[1]
    codes = min(_DECODE_CODES, group & -group)
    rows = _DECODE_TILE // codes
    constants = {
        "ROWS": rows, "CODES": codes, "GROUP": group, "FOUR": code == "int4", "ZEROS": "zeros" in places,
    }  # fmt: skip
    grid = (blocks(n, rows), blocks(k, codes))
    return one_launch(f"{__name__}:decode_pass", grid, places, numbers, constants, wide=False)  # its rows are 64-bit


def forward(
    launch: Any, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, code: str, gate: str, settled: bool
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    given = {"w": codes.contiguous(), "scales": scales.contiguous()}
    if zeros is not None:
        given["zeros"] = zeros.contiguous()
    is_gated = gate != "none"
    if is_gated and not (len(rows) == 1 and tokens.takes_one(rows, codes, scales, code)):
        return gated(forward(launch, x, codes, scales, zeros, code, "none", settled), gate)
    by_tokens = tokens.serves(rows, scales, code)
    form = some_rows.form_of(rows) if by_tokens and zeros is None else None
    if form is not None:
        y = torch.empty((len(rows), len(codes)), dtype=x.dtype, device=x.device)
        some_rows.product(launch, rows, given["w"], given["scales"], y, form)
        return y.view(*x.shape[:-1], -1)
    if by_tokens and len(rows) <= FEW_TOKENS:
        y = torch.empty((len(rows), len(codes) // (2 if is_gated else 1)), dtype=x.dtype, device=x.device)
        tokens.product(launch, {**given, "x": rows.contiguous(), "y": y}, gated=is_gated, settled=settled)
        return y.view(*x.shape[:-1], -1)
    if len(rows) > FEW or by_tokens:
        weight = torch.empty((len(codes), x.shape[-1]), dtype=x.dtype, device=x.device)
        launch(decode_plan, {**given, "y": weight}, written=("y",), code=code)
        y = torch.empty((len(rows), len(codes)), dtype=x.dtype, device=x.device)
        return torch.mm(rows, weight.t(), out=y).view(*x.shape[:-1], -1)
    y = torch.empty((len(rows), len(codes)), dtype=x.dtype, device=x.device)
    launch(plan, {"x": rows, **given, "y": y}, written=("y",), code=code, upcast=x.device.type == "cpu")
    return y.view(*x.shape[:-1], -1)


class GroupedCodes:
    """The kernel of `grouped_lowbit_linear`."""

    @staticmethod
    def forward(
        launch: Any, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, ends: Tensor, code: str
    ) -> Tensor:
        groups, outputs, _ = codes.shape
        rows = x if x.stride(1) == 1 else x.contiguous()
        given = {"w": codes.contiguous().flatten(0, 1), "scales": scales.contiguous().flatten(0, 1)}
        if zeros is not None:
            given["zeros"] = zeros.contiguous().flatten(0, 1)
        if len(x) > MANY * groups and multiplies(x, outputs):
            weight = torch.empty((groups * outputs, x.shape[1]), dtype=x.dtype, device=x.device)
            launch(decode_plan, {**given, "y": weight}, written=("y",), code=code)
            return multiply_rows(launch, x, weight.view(groups, outputs, -1), ends, turned=False)
        y = torch.empty((len(x), outputs), dtype=x.dtype, device=x.device)
        given |= {"x": rows, "ends": ends.contiguous(), "y": y}
        launch(plan, given, written=("y",), code=code, upcast=x.device.type == "cpu")
        return y


def multiplies(x: Tensor, outputs: int) -> bool:
    """Whether a grouped product takes these rows and their results."""
    return x.dtype in (torch.bfloat16, torch.float16) and not x.shape[1] % 8 and not outputs % 8


GROUPED = GroupedCodes()


class NormedCodes:
    """The kernel of `norm_lowbit_linear`."""

    @staticmethod
    def forward(
        launch: Any, x: Tensor, branch: Tensor, gain: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None,
        code: str, eps: float, gate: str, settled: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not tokens.takes_one(x, codes, scales, code):
            total = x + branch
            row = functional.rms_norm(total, x.shape[1:], gain, eps)
            return forward(launch, row, codes, scales, zeros, code, gate, settled), total
        y = torch.empty((1, len(codes) // (1 if gate == "none" else 2)), dtype=x.dtype, device=x.device)
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        given = {"x": x, "w": codes, "scales": scales, "zeros": zeros, "branch": branch, "gains": gain}
        there = {name: tensor.contiguous() for name, tensor in given.items() if tensor is not None}
        there |= {"y": y, "total": total}
        tokens.product(launch, there, gated=gate != "none", settled=settled, eps=float(eps))
        return y, total


NORMED = NormedCodes()
