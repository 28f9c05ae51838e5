"""What the differential gates share: values that break arithmetic, and how far a result may be from the exact one.

A result is compared with the same function in plain torch, once in the same dtypes (*eager*) and once in float64
(*exact*). Twice eager's error is the bound, of each row relative to its largest element; a row that eager itself has
lost (NaN or infinite where the exact one is not, or off by half) has none. On few elements eager may be lucky, so a few
roundings are allowed as well: `ROUNDINGS` in the precision that sums are kept in, and of 16 bits four. What is infinite
or NaN is either eager's or the exact result's. Nothing here knows what is compared.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROUNDINGS = 64  # as many as exp(x) has in float32 for the x of a softmax
HALF_ROUNDINGS = 4  # of a result of 16 bits, which was computed from others of 16 bits
DOUBLE_ROUNDINGS = 1024  # of a float64 result's largest element: nothing is exact beside it, both may have cancelled
KINDS = ("plain", "offset", "-inf", "inf", "nan", "zeros", "largest", "subnormal")
"""Of special values, as `planted` puts them into a tensor."""


def planted(x: Tensor, kind: str) -> Tensor:
    """A copy with special values of this kind among the ordinary ones; one of integers is left as it is.

    offset: all share a large number, beside which they keep half of their digits. zeros: of both signs. largest: the
    greatest and the least number. subnormal: all are that small in every third place.
    """
    x = x.clone()
    if not x.is_floating_point() or not x.numel():
        return x
    limits, places = torch.finfo(x.dtype), x.reshape(-1)  # a copy where the elements are not in order
    if kind == "offset":
        x += 4 * 2.0 ** (-math.log2(limits.eps) // 2)  # beside which whole numbers are exact
    elif kind in ("-inf", "inf", "nan"):
        places[x.numel() // 3] = float(kind)
    elif kind == "zeros":
        places[::3], places[1::3] = 0.0, -0.0
    elif kind == "largest":
        third = x.numel() // 3
        places[third : third + 2], places[x.numel() // 2] = limits.max, limits.min  # two: a sum of them overflows
    elif kind == "subnormal":
        places[::3] *= limits.smallest_normal / 8
    elif kind != "plain":
        raise ValueError(f"unknown kind of values '{kind}': known are {', '.join(KINDS)}")
    return x if kind == "offset" else x.copy_(places.view(x.shape))


def disagreement(
    found: Tensor, eager: Tensor, exact: Tensor, *, signs: bool = False, roundings: int = ROUNDINGS
) -> str | None:
    """What is wrong with a result, by its worst element; None where all is well. signs: those of zeros count too."""
    if (found.dtype, found.shape) != (eager.dtype, eager.shape):
        return f"is {found.dtype} of shape {tuple(found.shape)}, eager's {eager.dtype} of {tuple(eager.shape)}"
    if not found.numel():
        return None
    if not found.is_floating_point():
        return (
            None
            if torch.equal(found, eager)
            else f"is {found.flatten()[:8].tolist()}, eager's {eager.flatten()[:8].tolist()}"
        )
    made, plain, true = found.double(), eager.double(), exact.double()
    rounded = true.to(found.dtype).double()  # an exact result that the dtype cannot hold is infinite
    allowed = _allowed(plain, true, found.dtype, roundings).expand(found.shape)
    right = ((made - true).abs() <= allowed) | _same(made, plain) | _same(made, rounded) | allowed.isinf()
    if signs:
        right &= (made != 0) | (plain != 0) | (made.signbit() == plain.signbit())
    if bool(right.all()):
        return None
    over = torch.where(right, -1.0, torch.nan_to_num((made - true).abs() / allowed, nan=torch.inf)).flatten()
    worst = int(over.argmax())
    values = ", ".join(
        f"{name} {tensor.flatten()[worst].item():.9g}"
        for name, tensor in (("found", made), ("eager", plain), ("exact", true), ("allowed", allowed))
    )
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), found.shape))
    return f"{values} at {place}; {int((~right).sum())} of {found.numel()} elements are wrong"


def _allowed(eager: Tensor, exact: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """How far from exact each element may be: eager's largest error of all rows, relative to their largest elements."""
    wide = torch.finfo(torch.promote_types(dtype, torch.float32))
    size = torch.where(exact.isfinite(), exact.abs(), 0.0)
    row = size.amax().expand(size.shape) if dtype is torch.float64 else _row(size)
    error = torch.where(exact.isfinite(), (eager - exact).abs(), 0.0)
    lost = ~(_row(error) <= row / 2) & (row > 0)
    relative = torch.where((row > 0) & ~lost, error / row, 0.0).amax()
    eagers = torch.where(row > 0, relative * row, error.nan_to_num(nan=torch.inf).amax())
    count = max(count, DOUBLE_ROUNDINGS) if dtype is torch.float64 else count
    roundings = count * (wide.eps / 2 * row + wide.tiny)
    if dtype.itemsize == 2:
        limits = torch.finfo(dtype)
        roundings += HALF_ROUNDINGS * (limits.eps / 2 * row + limits.smallest_normal * limits.eps)
    return torch.where(lost, torch.inf, 2 * eagers + roundings)


def _row(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True) if x.dim() else x


def _same(one: Tensor, other: Tensor) -> Tensor:
    return (one == other) | (one.isnan() & other.isnan())
