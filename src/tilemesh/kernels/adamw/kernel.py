"""The Triton kernels of AdamW and of the global norm over many tensors, and the plans that launch them.

Program i looks up whose block i is (`owners`), reads that tensor's row of the table, and works on BLOCK elements. The
norm leaves a partial sum per block, added up by one program in a fixed order: nothing is atomic.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping

import triton
import triton.language as tl

from tilemesh.kernels.adamw.table import BLOCK, NORM_BLOCK, NORM_WARPS, WARPS
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.steps import LaunchPlan


@triton.jit
def address(rows, at, LIKE, ALIGNED: tl.constexpr):
    """A tensor's address from the table, typed like another pointer."""
    pointer = tl.load(rows + at).to(LIKE.dtype)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def count(rows, at, ALIGNED: tl.constexpr):
    """A tensor's number of elements; the compiler needs a divisor of it to make accesses wide."""
    elements = tl.load(rows + at)
    if ALIGNED:
        elements = tl.multiple_of(elements, 16)
    return elements


@triton.jit
def update(
    table, owners, scalars, like_parameter, like_gradient, like_state, beta1, beta2, eps,
    BLOCK: tl.constexpr, MASTERS: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One block of one parameter. `like_…` are never read: they say the dtypes.

    scalars (float64): rate, the corrections of both averages' bias, and what gradients are divided by.
    """
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = table + tl.load(owners + tl.program_id(0)) * 8
    begin, size = tl.load(rows + 5), count(rows, 6, ALIGNED)
    decay = tl.load(rows + 7).to(tl.float64, bitcast=True)
    rate, divisor = tl.load(scalars), tl.load(scalars + 3)
    step = (rate / tl.load(scalars + 1)).to(kind)
    root = tl.sqrt(tl.load(scalars + 2)).to(kind)
    at = (tl.program_id(0) - begin) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    parameter = address(rows, 0, like_parameter, ALIGNED)
    gradient = address(rows, 1, like_gradient, ALIGNED)
    average = address(rows, 2, like_state, ALIGNED)
    square = address(rows, 3, like_state, ALIGNED)
    slope = tl.load(gradient + at, mask=inside, other=0.0).to(kind) / divisor.to(kind)
    first = tl.load(average + at, mask=inside, other=0.0)
    second = tl.load(square + at, mask=inside, other=0.0)
    if MASTERS:
        master = address(rows, 4, like_state, ALIGNED)
        value = tl.load(master + at, mask=inside, other=0.0)
    else:
        value = tl.load(parameter + at, mask=inside, other=0.0).to(kind)
    # Which product of a sum of two is fused with the addition is said, not left to the compiler: results are then the
    # same in all forms of this kernel.
    value = tl.fma(-(rate * decay).to(kind), value, value)
    first = tl.fma(beta1.to(kind), first, (1.0 - beta1).to(kind) * slope)
    second = tl.fma(beta2.to(kind), second, (1.0 - beta2).to(kind) * (slope * slope))
    value -= step * first / (tl.sqrt(second) / root + eps.to(kind))
    tl.store(average + at, first, mask=inside)
    tl.store(square + at, second, mask=inside)
    if MASTERS:
        tl.store(master + at, value, mask=inside)
    tl.store(parameter + at, value.to(like_parameter.dtype.element_ty), mask=inside)


@triton.jit
def correct(rate, step, divisor, scalars, log_beta1, log_beta2):
    """The scalars of a step, from tensors on the device; the logarithms are of base 2."""
    tl.store(scalars, tl.load(rate).to(tl.float64))
    steps = tl.load(step).to(tl.float64)
    tl.store(scalars + 1, 1.0 - tl.exp2(steps * log_beta1))
    tl.store(scalars + 2, 1.0 - tl.exp2(steps * log_beta2))
    tl.store(scalars + 3, tl.load(divisor).to(tl.float64))


@triton.jit
def squares(table, owners, partial, like, BLOCK: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr):
    """The sum of one block's squares."""
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    rows = table + tl.load(owners + tl.program_id(0)) * 4
    at = (tl.program_id(0) - tl.load(rows + 1)) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(address(rows, 0, like, ALIGNED) + at, mask=at < count(rows, 2, ALIGNED), other=0.0).to(kind)
    tl.store(partial + tl.program_id(0), tl.sum(value * value, 0))


@triton.jit
def root_of_sum(partial, norm, N, BLOCK: tl.constexpr):
    """The root of N partial sums' sum, which is made in float64."""
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.load(partial + at, mask=at < N, other=0.0).to(tl.float64)
    tl.store(norm, tl.sqrt(tl.sum(total, 0)).to(norm.dtype.element_ty))


def update_plan(
    places: Mapping[str, Place], *, beta1: float, beta2: float, eps: float, masters: bool, aligned: bool
) -> LaunchPlan:
    numbers, grid = {"beta1": beta1, "beta2": beta2, "eps": eps}, (places["owners"].shape[0], 1)
    wide = places["like_state"].dtype == "float64"
    constants = {"BLOCK": BLOCK, "MASTERS": masters, "ALIGNED": aligned, "WIDE": wide}
    return one_launch(f"{__name__}:update", grid, places, numbers, constants, warps=WARPS)


def correct_plan(places: Mapping[str, Place], *, log_beta1: float, log_beta2: float) -> LaunchPlan:
    numbers = {"log_beta1": log_beta1, "log_beta2": log_beta2}
    return one_launch(f"{__name__}:correct", (1, 1), places, numbers, {}, warps=1)


def squares_plan(places: Mapping[str, Place], *, aligned: bool) -> LaunchPlan:
    constants = {"BLOCK": NORM_BLOCK, "ALIGNED": aligned, "WIDE": places["like"].dtype == "float64"}
    return one_launch(f"{__name__}:squares", (places["owners"].shape[0], 1), places, {}, constants, warps=NORM_WARPS)


def norm_plan(places: Mapping[str, Place]) -> LaunchPlan:
    numbers = {"N": places["partial"].shape[0]}
    return one_launch(f"{__name__}:root_of_sum", (1, 1), places, numbers, {"BLOCK": 4096}, warps=16)
