"""cross_entropy(x @ weight.T, target) in plain torch. The kernels never hold all logits: see kernel.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.cross_entropy import reference as loss
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.linear_cross_entropy.cost import FORM
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem

REDUCTIONS = ("mean", "sum")


def check(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float,
    reduction: str, overwrite: bool, differentiated: bool,
) -> None:  # fmt: skip
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: expected x (…, D) and weight (V, D)"
        )
    logits = x.new_empty((), device="meta").expand(*x.shape[:-1], weight.shape[0])  # their shape alone
    loss.check(logits, target, ignore_index, label_smoothing, z_loss, reduction, overwrite)


def check_values(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, *_: object) -> None:
    loss.check_targets(target, weight.shape[0], ignore_index)


def gradient_of_x(x: Tensor, weight: Tensor, target: Tensor, *options: object) -> Tensor:
    return x.new_empty(x.shape if options[-1] else (0,))


def gradient_of_weight(x: Tensor, weight: Tensor, target: Tensor, *options: object) -> Tensor:
    return weight.new_empty(weight.shape if options[-1] else (0,), dtype=held_dtype(weight.dtype))


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the weight's gradient until it is scaled: a sum over all rows may be too large for float16, whose loss scale
    comes with the scaling."""
    return torch.float32 if dtype is torch.float16 else dtype


@operator(
    kernel="tilemesh.kernels.linear_cross_entropy.kernel",
    check=check,
    check_values=check_values,
    kept=(gradient_of_x, gradient_of_weight),
    overwrites="overwrite",
    told="differentiated",
    casts=True,
)
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    overwrite: bool = True,
    differentiated: bool = False,
) -> Tensor:
    """cross_entropy(x @ weight.T, target) without ever holding all logits: x (…, D), weight (V, D), target (…).

    On a GPU the forward pass also computes both gradients, for some rows at a time, and the weight's is added up in
    float32; the backward pass only scales them (in place with `overwrite`, so that it can run once). As
    `cross_entropy` otherwise. `differentiated` is filled in: whether gradients may be asked for.
    """
    logits = functional.linear(x, weight)
    return loss.cross_entropy.reference(  # type: ignore[attr-defined]
        logits,
        target,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
    )


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, width, classes = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    x = torch.randn(rows, width, generator=generator, device=device).to(dtype)
    weight = (torch.randn(classes, width, generator=generator, device=device) * width**-0.5).to(dtype)
    return x, weight, torch.randint(classes, (rows,), generator=generator, device=device)


def _plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """What a user of torch writes: the loss of 16-bit logits is computed in float32."""
    return functional.cross_entropy(functional.linear(x, weight).to(accumulator(x.dtype)), target)


BENCH = FunctionBench(linear_cross_entropy, FORM, arguments, eager=_plain)
