"""The likeliest token of each row of logits in plain torch, and whether the row can be believed.

N: rows; V: vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.likeliest.cost import FORM
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem


def check(logits: Tensor) -> None:
    if logits.dim() != 2 or not logits.shape[1]:
        raise UsageError(f"logits have shape {tuple(logits.shape)}: expected (N, V) with V at least 1")


def served(logits: Tensor) -> bool:
    return logits.dtype is not torch.float64 or logits.device.type == "cpu"


@operator(kernel="tilemesh.kernels.likeliest.kernel", check=check, served=served)
def likeliest(logits: Tensor) -> Tensor:
    """The place of the largest of each row's logits (N, V), the first of equals: (N,) int64. -1: some are NaN or
    infinite."""
    # NaN is the largest and the least of all that it is among.
    least_N, most_N = logits.aminmax(dim=-1)
    return torch.where(least_N.isfinite() & most_N.isfinite(), logits.argmax(-1), -1)


def exact(logits: Tensor) -> Tensor:
    """The place in float64, which holds every logit as it is."""
    return logits.double().argmax(-1).double()


def no_error(logits: Tensor) -> Tensor:
    """A place is right or wrong."""
    return torch.zeros(logits.shape[:1], dtype=torch.float64, device=logits.device)


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    generator = torch.Generator(device).manual_seed(seed)
    return (torch.randn(problem.sizes, generator=generator, device=device).to(getattr(torch, problem.dtype)),)


BENCH = FunctionBench(likeliest, FORM, arguments, exact=exact, bound=no_error)
