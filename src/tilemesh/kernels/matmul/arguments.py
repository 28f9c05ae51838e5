"""What callers may give the fused matmul: checked, folded to two dims, and described as a `Problem`.

Every refusal happens here, before anything is launched, and says what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.launch.tensors import check_alike, check_tensors, dtype_name
from tilemesh.kernels.matmul.config import TILE_KINDS, Config
from tilemesh.kernels.matmul.problem import Problem
from tilemesh.kernels.matmul.run import matrix_of

IMPLEMENTATIONS = ("auto", *TILE_KINDS, "library", "torch", "interpret")
_HAS_FP32_PRECISION = hasattr(torch._C, "_get_fp32_precision_getter")  # torch 2.9 and later


def checked_shape(
    a: Tensor, b: Tensor, c: Tensor | None, activation: str, implementation: str, config: Config | None
) -> tuple[int, ...]:
    """D's shape, or an error that says what does not fit; nothing has been launched yet."""
    if activation not in ACTIVATIONS:
        raise unknown("activation", str(activation), ACTIVATIONS)
    if implementation not in IMPLEMENTATIONS:
        raise unknown("implementation", str(implementation), IMPLEMENTATIONS)
    check_given(a, b, c, None)
    if config is not None and not isinstance(config, Config):
        raise UsageError(f"config is a {type(config).__name__}: expected a tilemesh.kernels.Config")
    if config is not None and implementation not in ("auto", "interpret", config.kind):
        raise UsageError(
            f"implementation '{implementation}' with a config of kind '{config.kind}': give one of the two"
        )
    given = {"a": a, "b": b} | ({} if c is None else {"c": c})
    check_alike(given)
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise UsageError(f"shapes do not multiply: {_shapes(given)}; expected a (…, M, K) and b (K, N)")
    shape = (*a.shape[:-1], b.shape[1])
    if c is not None and not _broadcasts(tuple(c.shape), shape):
        raise UsageError(f"c does not broadcast to D {shape}: {_shapes(given)}; expected (…, M, N), (N,) or (…, M, 1)")
    return shape


def _shapes(given: Mapping[str, Tensor]) -> str:
    return ", ".join([f"{name} {tuple(tensor.shape)}" for name, tensor in given.items()])


def check_given(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor | None) -> None:
    if a is None or b is None:
        raise UsageError(f"{'a' if a is None else 'b'} is a NoneType: expected a torch.Tensor")
    check_tensors({"a": a, "b": b, "c": c, "out": out})


def check_out(out: Tensor, shape: tuple[int, ...], a: Tensor) -> None:
    if tuple(out.shape) != shape or out.dtype != a.dtype or out.device != a.device:
        given = f"{tuple(out.shape)} {dtype_name(out.dtype)} on {out.device}"
        raise UsageError(f"out is {given}: expected {shape} {dtype_name(a.dtype)} on {a.device}")
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise UsageError("out is an expanded tensor, several elements share memory: give one of its own")


def check_strides(out: Tensor) -> None:
    """No two elements of `out` in one place, and leading dims that fold into one without a copy: kernels write two."""
    inner = 0  # the largest offset of the dims with smaller strides: the next stride must step over it
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)) if 0 not in out.shape else ():
        if size > 1 and stride <= inner:
            raise UsageError(f"out {tuple(out.shape)} has strides {out.stride()}: elements share memory or interleave")
        inner += (size - 1) * stride
    try:
        out.view(out.shape[:-1].numel(), out.shape[-1])
    except RuntimeError:
        raise UsageError(
            f"out {tuple(out.shape)} has strides {out.stride()}: its leading dims must be contiguous"
        ) from None


def _broadcasts(given: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    if len(given) > len(shape):
        return False
    # Not `have in (1, want)`: of sizes that torch.compile traces as unknown, it finds none in a tuple.
    return all(have == 1 or have == want for have, want in zip(reversed(given), reversed(shape), strict=False))


def two_dim(
    a: Tensor, b: Tensor, c: Tensor | None, d: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Leading dims folded into M. A, and a C that is neither row nor column, are copied where no view can fold them."""
    rows, columns = d.shape[:-1].numel(), d.shape[-1]  # counted: -1 cannot be told from zero elements
    if c is not None:
        c = _two_dim_c(c, d.shape, rows, columns)
    fold = (lambda t: t.view(rows, columns)) if d.dim() > 2 else (lambda t: t)
    return a.flatten(0, -2) if a.dim() > 2 else a, b, c, fold(d), None if z is None else fold(z)


def _two_dim_c(c: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """C as (M, N), (1, N) or (M, 1), the leading dims of D's shape folded into M."""
    if c.numel() == 1 and columns != 1:
        return c.reshape(1, 1).expand(rows, 1)
    # As many elements as a row do not make one: a column may be as long as D is wide.
    if c.numel() == columns and (c.dim() == 0 or c.shape[-1] == columns):
        return c.reshape(1, columns)
    if len(shape) == 2:
        return c
    width = c.shape[-1]
    return c.expand(*shape[:-1], width).reshape(rows, width)


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
    precision = "ieee" if a.dtype is torch.float32 and not allows_tf32() else "tf32"
    return Problem(
        matrix_of(a), matrix_of(b), place, matrix_of(d), c_kind, dtype_name(a.dtype), activation, precision, keep
    )


def apart(given: Tensor, out: Tensor) -> Tensor:
    """An input that shares memory with `out` is copied first: some kernels write D before all of it is read."""
    ahead = out.data_ptr() - given.data_ptr()
    lower = given if ahead > 0 else out
    if lower.is_contiguous() and abs(ahead) >= lower.nbytes:  # the usual case, in half the time
        return given
    reach = 1
    for size, stride in zip(lower.shape, lower.stride(), strict=True):
        reach += (size - 1) * stride
    if abs(ahead) >= reach * lower.element_size() or given.device != out.device or given.numel() == 0:
        return given
    return given.clone()


def allows_tf32() -> bool:
    """By torch's newer setting, which follows the older one; reading the older raises once the newer was set."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if _HAS_FP32_PRECISION else matmul.allow_tf32
