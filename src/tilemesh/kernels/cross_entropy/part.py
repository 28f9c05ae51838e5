"""Cross-entropy over logits of which each of several processes has some classes: what one of them computes alone.

Per row, a part gives its largest logit, sum(exp(its logits - largest)) and the logit of the target where that is one of
its classes; from what these are over all parts, which the caller exchanges, every part makes the gradient of its own.
The logits are never joined, and nothing of their size is allocated: the gradient is written over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator
from tilemesh.kernels.cross_entropy.reference import check_targets
from tilemesh.kernels.launch.computation import launcher
from tilemesh.kernels.launch.implementation import implementation_of
from tilemesh.kernels.launch.tensors import check_device, check_dtype, check_tensors


def part_sums(
    logits: Tensor, target: Tensor, first: int, classes: int, *, ignore_index: int = -100, implementation: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row its largest logit, sum(exp(logits - largest)), and its target's logit; at least float32.

    The target's logit is 0 where it is another part's, and all three are where the target is ignored.

    logits: (N, V), the classes from `first` on of `classes` in all; target: (N,), int64 or int32. A target outside of
    all classes is an error on a CPU; on a GPU the row's target logit is NaN in the part that begins with class 0.
    """
    how = _checked(logits, target, first, classes, ignore_index, implementation)
    if how == "torch":
        return _sums_by_torch(logits, target, first, ignore_index)
    from tilemesh.kernels.cross_entropy import kernel

    kind = accumulator(logits.dtype)
    tops, totals, chosen = (torch.empty(target.shape, dtype=kind, device=logits.device) for _ in range(3))
    made = {"tops": tops, "totals": totals, "chosen": chosen}
    given = {"logits": logits, "target": target, **made}
    launcher(how)(kernel.part_plan, given, written=tuple(made), first=first, classes=classes, ignore=ignore_index)
    return tops, totals, chosen


def write_part_gradient(
    logits: Tensor,
    target: Tensor,
    first: int,
    tops: Tensor,
    totals: Tensor,
    upstream: Tensor,
    *,
    ignore_index: int = -100,
    implementation: str = "auto",
) -> Tensor:
    """Turn a part's logits into their gradient: upstream * (softmax - target), zeros where a target is ignored.

    tops, totals: (N,), of each row over all parts; upstream: of every row's loss, one number.
    """
    how = implementation_of(implementation, [logits])
    if how == "torch" or logits.stride(1) != 1:  # the kernel writes a row's columns side by side
        return _gradient_by_torch(logits, target, first, tops, totals, upstream, ignore_index)
    from tilemesh.kernels.cross_entropy import kernel

    given = {"logits": logits, "target": target, "tops": tops, "totals": totals, "grad": upstream}
    launcher(how)(
        kernel.backward_plan, given, written=("logits",), ignore=ignore_index, smoothing=0.0, z=0.0, mean=False,
        first=first,
    )  # fmt: skip
    return logits


def _checked(logits: Tensor, target: Tensor, first: int, classes: int, ignore_index: int, implementation: str) -> str:
    check_tensors({"logits": logits, "target": target})
    check_dtype({"logits": logits})
    check_device({"logits": logits, "target": target})
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"logits have shape {tuple(logits.shape)} and target is {target.dtype} {tuple(target.shape)}: expected "
            "logits (N, V) and int64 or int32 target (N,)"
        )
    if not 0 <= first <= first + logits.shape[1] <= classes:
        raise UsageError(f"classes {first} to {first + logits.shape[1]} of {classes}: expected a part of them")
    if target.device.type == "cpu":
        check_targets(target, classes, ignore_index)
    return implementation_of(implementation, [logits])


def _here(target: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Which targets are this part's, and their columns (0 for the others)."""
    inside = (target >= first) & (target < first + width)
    return inside, (target.long() - first).masked_fill(~inside, 0)


def _sums_by_torch(logits: Tensor, target: Tensor, first: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    wide = logits.to(accumulator(logits.dtype))
    inside, columns = _here(target, first, logits.shape[1])
    counts = target != ignore_index
    chosen = wide.gather(1, columns[:, None])[:, 0].masked_fill(~(inside & counts), 0)
    tops = wide.amax(1).clamp(min=torch.finfo(wide.dtype).min)  # no difference is inf - inf
    totals = (wide - tops[:, None]).exp_().sum(1)
    return tops.masked_fill(~counts, 0), totals.masked_fill(~counts, 0), chosen


def _gradient_by_torch(
    logits: Tensor, target: Tensor, first: int, tops: Tensor, totals: Tensor, upstream: Tensor, ignore_index: int
) -> Tensor:
    counts = target != ignore_index
    wide = (logits.to(tops.dtype) - tops[:, None]).exp_().div_(totals[:, None])
    inside, columns = _here(target, first, logits.shape[1])
    wide.scatter_add_(1, columns[:, None], -inside.to(wide.dtype)[:, None])
    return logits.copy_(wide.mul_(upstream).masked_fill_(~counts[:, None], 0))
