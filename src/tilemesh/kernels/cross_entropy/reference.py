"""Cross-entropy from logits in plain torch: ignored targets, label smoothing, z-loss; and how exact it must be."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError, unknown
from tilemesh.kernels.accuracy import CONFIDENCE, accumulator, unit
from tilemesh.kernels.cross_entropy.cost import FORM
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.launch.tensors import is_plain, is_traced
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem

REDUCTIONS = ("mean", "sum", "none")


def check(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, reduction: str,
    overwrite: bool,
) -> None:  # fmt: skip
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    if logits.dim() < 1 or target.shape != logits.shape[:-1]:
        raise UsageError(
            f"logits have shape {tuple(logits.shape)} and target {tuple(target.shape)}: "
            "expected logits (…, V) and target (…)"
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise UsageError(f"target is {target.dtype}: expected int64 or int32 numbers of classes; cast with .long()")
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing is {label_smoothing}: expected a number from 0 to 1")
    if not z_loss >= 0:
        raise UsageError(f"z_loss is {z_loss}: expected 0 or more")


def check_values(logits: Tensor, target: Tensor, ignore_index: int, *_: object) -> None:
    check_targets(target, logits.shape[-1], ignore_index)


def check_targets(target: Tensor, classes: int, ignore_index: int) -> None:
    """Every target is a class or ignored. Reads the targets: on a GPU that would wait for it."""
    if is_traced() or not is_plain(target) or target.numel() == 0:
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= classes))]
    if wrong.numel():
        raise UsageError(
            f"target {int(wrong.flatten()[0])} is outside the {classes} classes of the logits ({wrong.numel()} of "
            f"{target.numel()} targets): expected 0 to {classes - 1}, or ignore_index={ignore_index}"
        )


def of_row(logits: Tensor, *_: object) -> Tensor:
    """Kept of each row: its largest logit, and sum(exp(logits - largest))."""
    return logits.new_empty(logits.shape[:-1], dtype=accumulator(logits.dtype))


def counted(logits: Tensor, *_: object) -> Tensor:
    """Kept: how many targets count, as a float."""
    return logits.new_empty((), dtype=accumulator(logits.dtype))


@operator(
    kernel="tilemesh.kernels.cross_entropy.kernel",
    check=check,
    check_values=check_values,
    kept=(of_row, of_row, counted),
    overwrites="overwrite",
)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    overwrite: bool = False,
) -> Tensor:
    """Cross-entropy in nats between logits (…, V) and classes (…), as torch defines it, at least in float32.

    z_loss adds z_loss * log(sum(exp(logits)))² to each row. reduction: mean (over targets that are not ignored; NaN
    where all are), sum, or none (0 for ignored ones). overwrite: the backward pass writes the gradient over the logits,
    which saves a tensor of their size; nobody may read the logits afterwards. A target outside of the classes is an
    error on a CPU; on a GPU its row's loss is NaN.
    """
    classes = logits.shape[-1]
    rows = logits.reshape(-1, classes).to(accumulator(logits.dtype))
    targets = target.reshape(-1).long()
    losses = functional.cross_entropy(
        rows, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    if z_loss:
        losses = losses + z_loss * torch.where(targets == ignore_index, 0.0, torch.logsumexp(rows, -1).square())
    if reduction == "none":
        return losses.reshape(target.shape)
    return losses.sum() / (targets != ignore_index).sum() if reduction == "mean" else losses.sum()


def error_bound(logits: Tensor, target: Tensor, ignore_index: int = -100, z_loss: float = 0.0) -> Tensor:
    """How far each row's loss may be from the float64 one: the sum of V exponentials, a logarithm, two subtractions.

    All of it is relative to the largest logit, so that what the logits share does not count: an exponential is off by
    its own distance from the largest, weighed by its probability. z_loss has the rounding of the logarithm itself.
    """
    u, classes = unit(accumulator(logits.dtype)), logits.shape[-1]
    rows = logits.double()
    total, below = torch.logsumexp(rows, -1), rows.amax(-1, keepdim=True) - rows
    chosen = rows.gather(-1, torch.where(target == ignore_index, 0, target).long()[..., None])[..., 0]
    size = (torch.softmax(rows, -1) * below).sum(-1) + (total - chosen).abs()
    bound = (CONFIDENCE * classes**0.5 + 16 + 8 * size) * u
    bound = bound + 2 * z_loss * total.abs() * (bound + 2 * total.abs() * u)
    return 1.01 * torch.where(target == ignore_index, 0.0, bound)


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(problem.sizes, generator=generator, device=device).to(getattr(torch, problem.dtype))
    return logits, torch.randint(problem.sizes[1], problem.sizes[:1], generator=generator, device=device)


def _plain(logits: Tensor, target: Tensor) -> Tensor:
    """What a user of torch writes: the loss of 16-bit logits is computed in float32."""
    return functional.cross_entropy(logits.to(accumulator(logits.dtype)), target)


BENCH = FunctionBench(cross_entropy, FORM, arguments, eager=_plain)
