"""What callers may give the fused matmul: checked, folded to two dims, and described as a `Problem`.

Every refusal happens here, before anything is launched, and says what was given, what was expected and what to do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.matmul.config import TILE_KINDS, Config
from tilemesh.kernels.matmul.problem import ACTIVATIONS, Problem
from tilemesh.kernels.matmul.run import dtype_name, matrix_of

IMPLEMENTATIONS = ("auto", *TILE_KINDS, "library", "torch", "interpret")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked_shape(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, implementation: str, config: Config | None
) -> tuple[int, ...]:
    """D's shape, or an error that says what does not fit; nothing has been launched yet."""
    if activation not in ACTIVATIONS:
        raise unknown("activation", str(activation), ACTIVATIONS)
    if implementation not in IMPLEMENTATIONS:
        raise unknown("implementation", str(implementation), IMPLEMENTATIONS)
    if config is not None and implementation not in ("auto", "interpret", config.kind):
        raise UsageError(
            f"implementation '{implementation}' with a config of kind '{config.kind}': give one of the two"
        )
    given = {"a": a, "b": b} | ({} if c is None else {"c": c})
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in given.items())
    if a.dtype not in DTYPES or any(tensor.dtype != a.dtype for tensor in given.values()):
        dtypes = ", ".join(f"{name} {dtype_name(tensor.dtype)}" for name, tensor in given.items())
        raise UsageError(
            f"dtypes {dtypes}: expected one dtype for all, of float16, bfloat16, float32, float64; cast with .to()"
        )
    if any(tensor.device != a.device for tensor in given.values()):
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise UsageError(f"tensors on different devices: {devices}; move them with .to()")
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise UsageError(f"shapes do not multiply: {shapes}; expected a (…, M, K) and b (K, N)")
    shape = (*a.shape[:-1], b.shape[1])
    if c is not None and not _broadcasts(tuple(c.shape), shape):
        raise UsageError(f"c does not broadcast to D {shape}: {shapes}; expected (…, M, N), (N,) or (…, M, 1)")
    return shape


def check_out(out: Tensor | None, shape: tuple[int, ...], a: Tensor) -> None:
    if out is None:
        return
    if tuple(out.shape) != shape or out.dtype != a.dtype or out.device != a.device:
        given = f"{tuple(out.shape)} {dtype_name(out.dtype)} on {out.device}"
        raise UsageError(f"out is {given}: expected {shape} {dtype_name(a.dtype)} on {a.device}")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise UsageError("out is an expanded tensor, several elements share memory: give one of its own")
    if out.dim() > 2:
        try:
            out.view(-1, out.shape[-1])
        except RuntimeError:
            raise UsageError(
                f"out {tuple(out.shape)} has strides {out.stride()}: its leading dims must be contiguous"
            ) from None


def _broadcasts(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(given) > len(shape):
        return False
    return all(have in (1, want) for have, want in zip(reversed(given), reversed(shape), strict=False))


def two_dim(
    a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Leading dims folded into M. A, and a C that is neither row nor column, are copied where no view can fold them."""
    columns = d.shape[-1]
    if c is not None and d.dim() > 2 and c.numel() != columns:
        if c.shape[-1] == 1:
            c = c.expand(*d.shape[:-1], 1).reshape(-1, 1)
        else:
            c = c.expand(d.shape).reshape(-1, columns)
    elif c is not None and c.dim() != 2:
        c = c.reshape(1, -1) if c.numel() == columns else c.reshape(1, 1)
    elif c is not None and d.dim() > 2:
        c = c.reshape(1, columns)
    if c is not None and c.numel() == 1 and columns != 1:
        c = c.reshape(1, 1).expand(d.numel() // columns if columns else 0, 1)
    fold = (lambda t: t.view(-1, columns)) if d.dim() > 2 else (lambda t: t)
    return a.reshape(-1, a.shape[-1]) if a.dim() > 2 else a, b, c, fold(d), None if z is None else fold(z)


def _c_kind(c: Tensor, rows: int, columns: int) -> str:
    """How a C that broadcasts to (rows, columns) is read; a row wins where both fit."""
    shape = (1,) * (2 - c.dim()) + tuple(c.shape)
    if shape[0] == 1 and shape[1] == columns and rows != 1:
        return "row"
    if shape[1] == 1 and columns != 1:
        return "column"
    return "full"


def _vector(c: Tensor, kind: str) -> Tensor:
    return c.reshape(1, -1) if kind == "row" else c


def problem_of(a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, *, activation: str, keep: bool = False) -> Problem:
    """The problem that 2-d tensors pose."""
    c_kind = "none" if c is None else _c_kind(c, d.shape[0], d.shape[1])
    place = None if c is None else matrix_of(c.expand(d.shape) if c_kind == "full" else _vector(c, c_kind))
    precision = "tf32" if allows_tf32() else "ieee"
    return Problem(
        matrix_of(a), matrix_of(b), place, matrix_of(d), c_kind, dtype_name(a.dtype), activation, precision, keep
    )


def apart(given: Tensor, out: Tensor) -> Tensor:
    """An input that shares memory with `out` is copied first: some kernels write D before all of it is read."""
    ranges = []
    for tensor in (given, out):
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        ranges.append((tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()))
    (first, first_end), (second, second_end) = ranges
    overlaps = given.device == out.device and first < second_end and second < first_end and given.numel() > 0
    return given.clone() if overlaps else given


def allows_tf32() -> bool:
    return torch.backends.cuda.matmul.allow_tf32
