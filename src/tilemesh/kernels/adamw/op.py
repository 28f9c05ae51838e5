"""A step and the norm as operators of torch, for those who record calls: torch.compile, export, fake tensors.

What they do is `reference.py` and `norm.py`; here are their schemas. Numbers travel as tensors of one element, so that
a graph is not made anew at each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_library = torch.library.Library("tilemesh", "FRAGMENT")
_library.define(
    "adamw(Tensor(a!)[] parameters, Tensor[] gradients, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] masters, int[] mastered, Tensor rate, Tensor step, Tensor divisor, float[] betas, float eps, "
    "float[] decays, str implementation) -> ()"
)
_library.define("global_norm(Tensor[] tensors, str implementation) -> Tensor")


def traced_step(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor], masters: Sequence[Tensor | None], numbers: Sequence[float | Tensor],
    betas: tuple[float, float], eps: float, decays: Sequence[float], implementation: str,
) -> None:  # fmt: skip
    """One step in a graph. numbers: the rate, the step and the divisor; masters: None where there is none."""
    device = parameters[0].device
    scalars = [
        number if isinstance(number, Tensor) else torch.full((1,), number, dtype=torch.float64, device=device)
        for number in numbers
    ]
    mastered = [at for at, master in enumerate(masters) if master is not None]
    held = [master for master in masters if master is not None]
    lists = (list(parameters), list(gradients), list(exp_avgs), list(exp_avg_sqs), held, mastered)
    with torch.no_grad():
        torch.ops.tilemesh.adamw.default(*lists, *scalars, list(betas), eps, list(decays), implementation)


def traced_norm(tensors: Sequence[Tensor], implementation: str) -> Tensor:
    norm: Tensor = torch.ops.tilemesh.global_norm.default(list(tensors), implementation)
    return norm


def _adamw(  # type: ignore[no-untyped-def]
    parameters, gradients, exp_avgs, exp_avg_sqs, masters, mastered, rate, step, divisor, betas, eps, decays,
    implementation,
):  # fmt: skip
    from tilemesh.kernels.adamw.reference import AdamW

    by_place = dict(zip(mastered, masters, strict=True))
    kept = AdamW(
        parameters, exp_avgs, exp_avg_sqs, masters=[by_place.get(at) for at in range(len(parameters))],
        betas=tuple(betas), eps=eps, weight_decay=decays, implementation=implementation,
    )  # fmt: skip
    kept.step(gradients, rate=rate, step=step, divisor=divisor)


def _global_norm(tensors, implementation):  # type: ignore[no-untyped-def]
    from tilemesh.kernels.adamw.norm import global_norm

    # A result that is a part of another tensor would be a view in the operator's schema.
    return global_norm(tensors, implementation=implementation).clone()


def _no_result(*given: object) -> None:
    """Everything is in place."""


def _norm_like(tensors, implementation):  # type: ignore[no-untyped-def]
    wide = any(tensor.dtype is torch.float64 for tensor in tensors)
    return tensors[0].new_empty((), dtype=torch.float64 if wide else torch.float32)


for _device in ("CPU", "CUDA"):
    _library.impl("adamw", _adamw, _device)
    _library.impl("global_norm", _global_norm, _device)
torch.library.register_fake("tilemesh::adamw", _no_result, lib=_library)
torch.library.register_fake("tilemesh::global_norm", _norm_like, lib=_library)
