"""Rows of several groups, each group times a matrix of its own (experts of a layer), in plain torch.

N: rows of all groups; X: groups; O: outputs; I: inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator, rounding_error, sum_error
from tilemesh.kernels.grouped_linear.cost import FORM, loads_of
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem

MOST_GROUPS = 1024


def check(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2] or not 1 <= len(weight) <= MOST_GROUPS:
        raise UsageError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)}: expected (N, I) and (X, O, I) of at most "
            f"{MOST_GROUPS} groups"
        )
    if ends.dtype is not torch.int32 or ends.shape != weight.shape[:1]:
        raise UsageError(f"ends are {ends.dtype} {tuple(ends.shape)}: expected int32 of shape ({len(weight)},)")


def check_values(x: Tensor, weight: Tensor, ends: Tensor) -> None:
    """Groups follow one another and are all of the rows. Reads the ends: on a GPU that would wait for it."""
    values = [0, *ends.tolist()]
    if values != sorted(values) or values[-1] != len(x):
        raise UsageError(f"ends are {values[1:]}: expected numbers that do not fall, up to {len(x)} rows")


def served(x: Tensor, weight: Tensor, ends: Tensor) -> bool:
    """16 bits, rows that begin at multiples of 16 bytes, and a GPU that copies tiles by itself."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and not weight.shape[1] % 8 and not weight.shape[2] % 8
    return fits and len(x) > 0 and (x.device.type == "cpu" or launches_early(x.device))


@operator(
    kernel="tilemesh.kernels.grouped_linear.plan", check=check, check_values=check_values, served=served, casts=True
)
def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Of each group g, the rows from ends[g - 1] (or 0) up to ends[g] times weight[g]^T: (N, O).

    x: (N, I), rows of a group side by side; weight: (X, O, I); ends: (X,), int32. A group may have no rows, and then
    a gradient of zeros. Kernels add up in float32, in a fixed order; sizes are read on the device, nobody waits for
    them.
    """
    parts = zip(torch.split(x, lengths(ends)), weight, strict=True)
    return torch.cat([functional.linear(rows, matrix) for rows, matrix in parts])


def lengths(ends: Tensor) -> list[int]:
    """How many rows each group has."""
    values = [0, *ends.tolist()]
    return [after - before for before, after in pairwise(values)]


def exact(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The float64 result, for errors to be measured against."""
    parts = zip(torch.split(x.double(), lengths(ends)), weight.double(), strict=True)
    return torch.cat([rows @ matrix.T for rows, matrix in parts])


def error_bound(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """How far each element of a correct result may be from `exact`."""
    magnitude = exact(x.abs(), weight.abs(), ends)
    rounded = rounding_error(exact(x, weight, ends), x.dtype)
    return 1.01 * (sum_error(magnitude, x.shape[1] + 1, accumulator(x.dtype)) + rounded)


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests."""
    rows, outputs, inputs, groups = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    x = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
    weight = torch.randn(groups, outputs, inputs, generator=generator, device=device).to(dtype)
    counts = torch.tensor(loads_of(rows, groups, problem.options["load"]), device=device)
    return x, weight, counts.cumsum(0).int()


@dataclass(frozen=True)
class GroupedBench(FunctionBench):
    """Beside the loop over groups also torch's own grouped product."""

    gpu_peers: ClassVar[tuple[str, ...]] = ("grouped_mm",)

    def calls(self, problem: SizedProblem) -> dict[str, Callable[..., object]]:
        return super().calls(problem) | {"grouped_mm": _by_torch}

    def _options(self, problem: SizedProblem) -> dict[str, str]:
        return {}


def _by_torch(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return y


BENCH = GroupedBench(grouped_linear, FORM, arguments, exact=exact, bound=error_bound)
