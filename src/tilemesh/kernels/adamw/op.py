"""A step and the norm as operators of torch, for those who record calls: torch.compile, export, fake tensors.

What they do is `reference.py` and `norm.py`; here are their schemas. Numbers travel as tensors of one element, so that
a graph is not made anew at each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


def register(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """What an operator does, and the shapes of what it makes: the modules that import this one say both."""
    for device in ("CPU", "CUDA"):
        _library.impl(name, implementation, device)
    torch.library.register_fake(f"tilemesh::{name}", fake, lib=_library)
