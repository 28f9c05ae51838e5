"""The Triton kernels of RMSNorm and LayerNorm, with and without an addition before, and the plans that launch them.

Forward holds whole rows in registers. Backward runs as few programs as the GPU has multiprocessors (or twice as many):
each walks over rows, keeps the vectors' gradients in registers on the way, and writes them once; a second launch adds
those partial sums up in a fixed order. Nothing is atomic: results repeat bit for bit.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.core.cost import short_dtype
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.launch.call import Place
from tilemesh.kernels.launch.gpu import device_index, gpu_of
from tilemesh.kernels.launch.steps import Argument, LaunchPlan, Pointer, Step, blocks
from tilemesh.kernels.rows import by_rows, load_stages

_PROGRAMS_INTERPRETED = 3  # of the backward pass, where there is no GPU to fill


@triton.jit
def forward_pass(
    x, residual, weight, bias, y, total, root, mean, M, N, eps,
    x_m, x_n, r_m, r_n, w_n, b_n, y_m, t_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """ROWS rows per program. Reads MN (2 MN with a residual) and writes as much."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
    if residual is not None:
        more = tl.load(residual + rows[:, None] * r_m + columns[None, :] * r_n, mask=inside, other=0.0)
        # The norm is of the sum as it is stored, which is what backward reads.
        stored = (more.to(kind) + value).to(total.dtype.element_ty)
        tl.store(total + rows[:, None] * t_m + columns[None, :], stored, mask=inside)
        value = stored.to(kind)
    if CENTRED:
        middle = tl.sum(value, 1) / N
        if mean is not None:
            tl.store(mean + rows, middle, mask=rows < M)
        value = tl.where(inside, value - middle[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 1) / N + eps)
    if root is not None:
        tl.store(root + rows, inverse, mask=rows < M)
    value = value * inverse[:, None]
    if weight is not None:
        value = value * tl.load(weight + columns * w_n, mask=columns < N, other=0.0).to(kind)[None, :]
    if bias is not None:
        value = value + tl.load(bias + columns * b_n, mask=columns < N, other=0.0).to(kind)[None, :]
    tl.store(y + rows[:, None] * y_m + columns[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_pass(
    grad, grad_total, x, weight, root, mean, dx, dtotal, sums, M, N, P,
    g_m, g_n, h_m, h_n, x_m, x_n, w_n, d_m, e_m, s_v,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CENTRED: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program p of P takes every P-th group of ROWS rows. x is the normalised tensor: with a residual, the sum.

    The last groups come first: the gradient was written by the operation before, and its end is still in the L2 cache.
    Reads 2 MN (3 MN with the sum's own gradient), writes MN, and P rows of partial sums per vector.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns = tl.arange(0, COLUMNS)
    if weight is not None:
        factor = tl.load(weight + columns * w_n, mask=columns < N, other=0.0).to(kind)
    of_weight = tl.zeros((ROWS, COLUMNS), kind)
    of_bias = tl.zeros((ROWS, COLUMNS), kind)
    groups = (M + ROWS - 1) // ROWS
    for group in tl.range(tl.program_id(0), groups, P, num_stages=STAGES):
        rows = (groups - 1 - group) * ROWS + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        value = tl.load(x + rows[:, None] * x_m + columns[None, :] * x_n, mask=inside, other=0.0).to(kind)
        slope = tl.load(grad + rows[:, None] * g_m + columns[None, :] * g_n, mask=inside, other=0.0).to(kind)
        inverse = tl.load(root + rows, mask=rows < M, other=0.0)[:, None]
        if CENTRED:
            value = tl.where(inside, value - tl.load(mean + rows, mask=rows < M, other=0.0)[:, None], 0.0)
            of_bias += slope
        value = value * inverse
        of_weight += slope * value
        if weight is not None:
            slope = slope * factor[None, :]
        made = slope - value * (tl.sum(slope * value, 1) / N)[:, None]
        if CENTRED:
            made -= (tl.sum(slope, 1) / N)[:, None]
        made = made * inverse
        if grad_total is not None:
            more = tl.load(grad_total + rows[:, None] * h_m + columns[None, :] * h_n, mask=inside, other=0.0)
            made += more.to(kind)
        if dtotal is not None:
            tl.store(dtotal + rows[:, None] * e_m + columns[None, :], made.to(dtotal.dtype.element_ty), mask=inside)
        tl.store(dx + rows[:, None] * d_m + columns[None, :], made.to(dx.dtype.element_ty), mask=inside)
    at = sums + tl.program_id(0) * N + columns
    tl.store(at, tl.sum(of_weight, 0), mask=columns < N)
    if CENTRED:
        tl.store(at + s_v, tl.sum(of_bias, 0), mask=columns < N)


@triton.jit
def add_up(sums, dweight, dbias, P, N, s_v, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Column sums of the P partial rows, always in the same order; program 1 of an axis takes the bias."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), kind)
    for begin in range(0, P, ROWS):
        rows = begin + tl.arange(0, ROWS)
        inside = (rows[:, None] < P) & (columns[None, :] < N)
        total += tl.load(sums + tl.program_id(1) * s_v + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    column_sums = tl.sum(total, 0)
    if tl.program_id(1) == 0:
        if dweight is not None:
            tl.store(dweight + columns, column_sums.to(dweight.dtype.element_ty), mask=columns < N)
    else:
        if dbias is not None:
            tl.store(dbias + columns, column_sums.to(dbias.dtype.element_ty), mask=columns < N)


def _pointers(places: Mapping[str, Place], names: tuple[str, ...]) -> dict[str, Argument]:
    return {name: Pointer(name) if name in places else None for name in names}


def _strides(places: Mapping[str, Place], **letters: str) -> dict[str, Argument]:
    """`x_m`, `x_n` and the like by letter; 0 where a tensor is not given."""
    made: dict[str, Argument] = {}
    for letter, name in letters.items():
        strides = places[name].strides if name in places else (0, 0)
        made |= {f"{letter}_{dim}": stride for dim, stride in zip("mn"[-len(strides) :], strides, strict=True)}
    return made


def forward_plan(places: Mapping[str, Place], *, eps: float, centred: bool) -> LaunchPlan:
    m, n = places["x"].shape
    rows, warps = _forward_config(n)
    arguments = _pointers(places, ("x", "residual", "weight", "bias", "y", "total", "root", "mean"))
    arguments |= {"M": m, "N": n, "eps": eps, "w_n": 0, "b_n": 0}
    arguments |= _strides(places, x="x", r="residual", y="y", t="total")
    arguments |= _strides({name: places[name] for name in ("weight", "bias") if name in places}, w="weight", b="bias")
    constants = {
        "ROWS": rows, "COLUMNS": triton.next_power_of_2(n), "CENTRED": centred, "WIDE": places["x"].dtype == "float64",
    }  # fmt: skip
    wide = any(place.wide for place in places.values())
    step = Step(f"{__name__}:forward_pass", (blocks(m, rows), 1), arguments, constants, warps=warps, wide=wide)
    return LaunchPlan((step,))


def backward_plan(places: Mapping[str, Place], *, centred: bool, programs: int, shared_bytes: int = 0) -> LaunchPlan:
    m, n = places["x"].shape
    columns = triton.next_power_of_2(n)
    is_double = places["x"].dtype == "float64"
    rows, warps = backward_config(columns, is_double)
    arguments = _pointers(places, ("grad", "grad_total", "x", "weight", "root", "mean", "dx", "dtotal", "sums"))
    arguments |= {"M": m, "N": n, "P": programs, "s_v": programs * n, "w_n": 0}
    arguments |= _strides(places, g="grad", h="grad_total", x="x", d="dx", e="dtotal")
    arguments |= _strides({"weight": places["weight"]} if "weight" in places else {}, w="weight")
    loaded = sum(short_dtype(places[name].dtype)[1] for name in ("grad", "grad_total", "x") if name in places)
    stages = load_stages(rows * columns * loaded, shared_bytes)
    constants = {"ROWS": rows, "COLUMNS": columns, "CENTRED": centred, "STAGES": stages, "WIDE": is_double}
    wide = any(place.wide for place in places.values())
    step = Step(f"{__name__}:backward_pass", (programs, 1), arguments, constants, warps=warps, wide=wide)
    if "dweight" not in places and "dbias" not in places:
        return LaunchPlan((step,))
    arguments = _pointers(places, ("sums", "dweight", "dbias")) | {"P": programs, "N": n, "s_v": programs * n}
    constants = {"ROWS": 64, "COLUMNS": 32, "WIDE": is_double}
    last = Step(f"{__name__}:add_up", (blocks(n, 32), 1 + centred), arguments, constants)
    return LaunchPlan((step, last))


def _forward_config(columns: int) -> tuple[int, int]:
    """Rows and warps of a program: 32 elements per thread (measured on an H200)."""
    wide = triton.next_power_of_2(columns)
    rows = max(1, (8192 if wide > 1024 else 4096) // wide)
    return rows, max(1, rows * wide // 1024)


def backward_config(columns: int, is_double: bool) -> tuple[int, int]:
    """Rows and warps of a program, for a power of two of columns.

    About 32 elements per thread, which were the fastest on an H200 from 768 columns; 16 of twice the size in float64,
    so that the sums kept on the way fit into registers.
    """
    if is_double:
        return max(1, 2048 // columns), max(4, min(32, columns // 512))
    warps = 4 if columns <= 1024 else 8 if columns <= 8192 else columns // 1024
    return max(1, warps * 1024 // columns), warps


def _programs(device: torch.device, rows: int, columns: int, is_double: bool) -> tuple[int, int]:
    """Programs of the backward pass, and the bytes of shared memory each may take."""
    tall, warps = backward_config(triton.next_power_of_2(columns), is_double)
    most, shared_bytes = _PROGRAMS_INTERPRETED, 0
    if device.type == "cuda":
        gpu = gpu_of(device_index(device))
        most, shared_bytes = gpu.multiprocessors * (2 if warps == 4 else 1), gpu.shared_bytes
    if warps == 4:
        shared_bytes //= 2  # two programs share a multiprocessor
    return min(most, blocks(rows, tall)), shared_bytes


class Norm:
    """One of the four operators: with or without centring, with or without the addition before it."""

    def __init__(self, *, centred: bool, adds: bool) -> None:
        self.centred, self.adds = centred, adds

    def _split(self, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, float]:
        x, *rest, eps = arguments
        residual = rest.pop(0) if self.adds else None
        weight, bias = (*rest, None)[:2]
        return x, residual, weight, bias, eps

    def forward(self, launch: Any, *arguments: Any) -> tuple[Tensor, ...]:
        x = arguments[0]
        kind = accumulator(x.dtype)
        kept = tuple(torch.empty(x.shape[:-1], dtype=kind, device=x.device) for _ in range(1 + self.centred))
        return (*self.forward_alone(launch, *arguments, kept=kept), *kept)

    def forward_alone(self, launch: Any, *arguments: Any, kept: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        x, residual, weight, bias, eps = self._split(arguments)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        total = None if residual is None else torch.empty(x.shape, dtype=residual.dtype, device=x.device)
        given = {"x": by_rows(x), "y": by_rows(y), "weight": weight, "bias": bias}
        given |= {name: of_rows.view(-1) for name, of_rows in zip(("root", "mean"), kept, strict=False)}
        if residual is not None and total is not None:
            given |= {"residual": by_rows(residual), "total": by_rows(total)}
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        written = tuple(name for name in ("y", "root", "mean", "total") if name in there)
        launch(forward_plan, there, written=written, eps=float(eps), centred=self.centred)
        return (y,) if total is None else (y, total)

    def backward(
        self, launch: Any, gradients: tuple[Any, ...], arguments: tuple[Any, ...], kept: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """With an addition, x and residual are empty: the sum that was kept has their place."""
        x, residual, weight, bias, _ = self._split(arguments)
        total = x
        if self.adds:
            total, *kept = kept  # type: ignore[assignment]
        columns, device = total.shape[-1], total.device
        flat = by_rows(total)
        # A result that nothing was computed from has no gradient; the norm's is the rare one.
        grad = torch.zeros(total.shape, dtype=x.dtype, device=device) if gradients[0] is None else gradients[0]
        dx = torch.empty(total.shape, dtype=x.dtype, device=device)
        dtotal = None
        if residual is not None and residual.dtype != x.dtype:
            dtotal = torch.empty(total.shape, dtype=residual.dtype, device=device)
        dweight, dbias = (
            None if vector is None else torch.empty(columns, dtype=vector.dtype, device=device)
            for vector in (weight, bias)
        )
        kind = accumulator(x.dtype)
        programs, shared_bytes = _programs(device, flat.shape[0], columns, total.dtype == torch.float64)
        sums = torch.empty(1 + self.centred, programs, columns, dtype=kind, device=device)
        given = {
            "grad": by_rows(grad), "x": flat, "root": kept[0].view(-1), "weight": weight,
            "dx": by_rows(dx), "sums": sums, "dweight": dweight, "dbias": dbias,
        }  # fmt: skip
        given |= {"mean": kept[1].view(-1)} if self.centred else {}
        if self.adds and gradients[1] is not None:
            given |= {"grad_total": by_rows(gradients[1])}
        if dtotal is not None:
            given |= {"dtotal": by_rows(dtotal)}
        there = {name: tensor for name, tensor in given.items() if tensor is not None}
        written = tuple(name for name in ("dx", "sums", "dweight", "dbias", "dtotal") if name in there)
        launch(
            backward_plan, there, written=written, centred=self.centred, programs=programs, shared_bytes=shared_bytes
        )
        made: list[Tensor | None] = [dx]
        if self.adds:
            made.append(dx if dtotal is None else dtotal)
        made.append(dweight)
        if self.centred:
            made.append(dbias)
        return tuple(made)


RMS_NORM = Norm(centred=False, adds=False)
LAYER_NORM = Norm(centred=True, adds=False)
ADD_RMS_NORM = Norm(centred=False, adds=True)
ADD_LAYER_NORM = Norm(centred=True, adds=True)
