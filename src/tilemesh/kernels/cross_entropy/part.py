"""Cross-entropy over logits of which each of several processes has some classes: what one of them computes alone.

Per row, a part gives log(sum(exp(its logits))) and the logit of the target where that is one of its classes; from the
sums over all parts, which the caller exchanges, every part makes the gradient of its own logits. The logits are never
joined, and nothing of their size is allocated: the gradient is written over them.
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
) -> tuple[Tensor, Tensor]:
    """Of each row log(sum(exp(logits))) and its target's logit, 0 where that is another part's; at least float32.

    logits: (N, V), the classes from `first` on of `classes` in all; target: (N,), int64 or int32. A target outside of
    all classes is an error on a CPU; on a GPU the row's target logit is NaN in the part that begins with class 0.
    """
    how = _checked(logits, target, first, classes, ignore_index, implementation)
    if how == "torch":
        return _sums_by_torch(logits, target, first, ignore_index)
    from tilemesh.kernels.cross_entropy import kernel

    kind = accumulator(logits.dtype)
    log_sums, chosen = (torch.empty(target.shape, dtype=kind, device=logits.device) for _ in range(2))
    given = {"logits": logits, "target": target, "log_sums": log_sums, "chosen": chosen}
    launcher(how)(
        kernel.part_plan, given, written=("log_sums", "chosen"), first=first, classes=classes, ignore=ignore_index
    )
    return log_sums, chosen


def write_part_gradient(
    logits: Tensor,
    target: Tensor,
    first: int,
    log_sums: Tensor,
    upstream: Tensor,
    *,
    ignore_index: int = -100,
    implementation: str = "auto",
) -> Tensor:
    """Turn a part's logits into their gradient: upstream * (softmax - target), zeros where a target is ignored.

    log_sums: (N,), over all parts; upstream: of every row's loss, one number.
    """
    how = implementation_of(implementation, [logits])
    if how == "torch":
        return _gradient_by_torch(logits, target, first, log_sums, upstream, ignore_index)
    from tilemesh.kernels.cross_entropy import kernel

    given = {"logits": logits, "target": target, "log_sums": log_sums, "grad": upstream}
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


def _sums_by_torch(logits: Tensor, target: Tensor, first: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    wide = logits.to(accumulator(logits.dtype))
    inside, columns = _here(target, first, logits.shape[1])
    counts = target != ignore_index
    chosen = wide.gather(1, columns[:, None])[:, 0].masked_fill(~(inside & counts), 0)
    return torch.logsumexp(wide, 1).masked_fill(~counts, 0), chosen


def _gradient_by_torch(
    logits: Tensor, target: Tensor, first: int, log_sums: Tensor, upstream: Tensor, ignore_index: int
) -> Tensor:
    wide = (logits.to(log_sums.dtype) - log_sums[:, None]).exp_()
    inside, columns = _here(target, first, logits.shape[1])
    wide.scatter_add_(1, columns[:, None], -inside.to(wide.dtype)[:, None])
    wide.mul_((upstream * (target != ignore_index))[:, None])
    return logits.copy_(wide)
