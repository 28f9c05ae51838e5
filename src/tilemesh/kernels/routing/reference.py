"""Routing tokens to experts in plain torch: which experts, where each token's rows lie among theirs, and back.

The one idea: a pair of a token and one of its experts has a place among the rows of all experts, which follow one
another; in those of one expert tokens keep their order. With these places rows go out and come back token by token:
nothing is sorted, no two programs write one row, and sums have a fixed order. Nobody waits for how many rows each
expert has.

N: tokens; D: width; X: experts; C: experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import accumulator, rounding_error, sum_error
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem
from tilemesh.kernels.routing.cost import PERMUTE_ROWS_FORM, ROUTE_TOKENS_FORM, UNPERMUTE_ROWS_FORM

MOST_EXPERTS = 1024


def check_route(scores: Tensor, experts: Tensor | None, picked: int, renormalized: bool) -> None:
    if scores.dim() != 2 or not 1 <= picked <= scores.shape[1]:
        raise UsageError(f"scores {tuple(scores.shape)} and picked {picked}: expected (N, X) and 1 to X")
    if experts is not None and (experts.dtype is not torch.int64 or experts.shape != (len(scores), picked)):
        raise UsageError(
            f"experts are {experts.dtype} {tuple(experts.shape)}: expected int64 ({len(scores)}, {picked})"
        )


def serves_route(scores: Tensor, experts: Tensor | None, picked: int, renormalized: bool) -> bool:
    return scores.dtype is torch.float32 and scores.shape[1] <= MOST_EXPERTS


@operator(
    kernel="tilemesh.kernels.routing.kernel:ROUTE", check=check_route, served=serves_route, keeps_results=(1,),
    partial=True,
)  # fmt: skip
def route_tokens(
    scores: Tensor, experts: Tensor | None = None, *, picked: int, renormalized: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each token's scores (N, X) the `picked` likeliest experts: their weights and numbers, the likeliest first
    (N, C), where each pair's row is among those of all experts (N, C), and how many rows each expert has (X,).

    Weights are probabilities of a softmax over all experts, divided by their sum where `renormalized`. experts: those
    of each token (N, C), where they were picked before.
    """
    likely = scores.softmax(-1)
    if experts is None:
        experts = likely.detach().topk(picked, -1).indices
    weights = likely.gather(-1, experts)
    if renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    flat = experts.flatten()
    slots = inverse(flat.argsort(stable=True)).view(experts.shape)
    counts = flat.new_zeros(scores.shape[1]).scatter_add(0, flat, torch.ones_like(flat))
    return weights, experts, slots, counts


def check_permute(x: Tensor, slots: Tensor) -> None:
    if x.dim() != 2 or slots.dim() != 2 or len(x) != len(slots) or slots.dtype is not torch.int64:
        raise UsageError(
            f"x {tuple(x.shape)} and slots {slots.dtype} {tuple(slots.shape)}: expected (N, D) and int64 (N, C)"
        )


def serves_rows(x: Tensor, *others: Tensor) -> bool:
    return x.dtype is not torch.float64 or x.device.type == "cpu"


@operator(kernel="tilemesh.kernels.routing.kernel:PERMUTE", check=check_permute, served=serves_rows)
def permute_rows(x: Tensor, slots: Tensor) -> Tensor:
    """Each token's row at all of its places: (N C, D). slots: (N, C), every number below N C once (`route_tokens`)."""
    return x.index_select(0, inverse(slots.flatten()) // slots.shape[1])


def check_unpermute(results: Tensor, weights: Tensor, slots: Tensor) -> None:
    if results.dim() != 2 or slots.dim() != 2 or len(results) != slots.numel() or slots.dtype is not torch.int64:
        raise UsageError(
            f"results {tuple(results.shape)} and slots {slots.dtype} {tuple(slots.shape)}: expected (N C, D) and int64 "
            "(N, C)"
        )
    if weights.shape != slots.shape or not weights.is_floating_point():
        raise UsageError(f"weights are {weights.dtype} {tuple(weights.shape)}: expected floats {tuple(slots.shape)}")


@operator(
    kernel="tilemesh.kernels.routing.kernel:UNPERMUTE",
    check=check_unpermute,
    served=serves_rows,
    own_dtype=("weights",),
)
def unpermute_rows(results: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """Of each token the sum of its results, each times its weight, in the order of its places: (N, D).

    results: (N C, D); weights: (N, C), of their dtype or wider; slots: (N, C), every number below N C once
    (`route_tokens`). Kernels add up in float32.
    """
    rows = results.index_select(0, slots.flatten()).view(*slots.shape, results.shape[1])
    return (rows * weights.to(results.dtype)[..., None]).sum(-2)


def inverse(order: Tensor) -> Tensor:
    """Of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


# ---- for benchmarks and tests ------------------------------------------------------------------------------------


def _scores(tokens: int, experts: int, device: torch.device, seed: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator(device).manual_seed(seed), device=device)


def _slots(tokens: int, picked: int, device: torch.device, seed: int) -> Tensor:
    slots: Tensor = route_tokens(_scores(tokens, max(8, picked), device, seed), picked=picked)[2]
    return slots


def _route_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor]:
    return (_scores(problem.sizes[0], problem.sizes[1], device, seed),)


def _permute_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    tokens, width, picked = problem.sizes
    x = _scores(tokens, width, device, seed).to(getattr(torch, problem.dtype))
    return x, _slots(tokens, picked, device, seed)


def _unpermute_arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width, picked = problem.sizes
    results = _scores(tokens * picked, width, device, seed).to(getattr(torch, problem.dtype))
    return results, _scores(tokens, picked, device, seed + 1).softmax(-1), _slots(tokens, picked, device, seed)


def exact_unpermuted(results: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """The float64 result, for errors to be measured against."""
    return (results.double()[slots] * weights.double()[..., None]).sum(-2)


def unpermute_bound(results: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """How far each element of a correct result may be from it: weights and products may be rounded as results are."""
    magnitude = exact_unpermuted(results.abs(), weights.abs(), slots)
    rounded = 3 * rounding_error(magnitude, results.dtype)
    return 1.01 * (rounded + sum_error(magnitude, slots.shape[1] + 1, accumulator(results.dtype)))


class _RouteBench(FunctionBench):
    def _options(self, problem: SizedProblem) -> dict[str, object]:
        return {"picked": problem.sizes[2]}


ROUTE_TOKENS_BENCH = _RouteBench(route_tokens, ROUTE_TOKENS_FORM, _route_arguments)
PERMUTE_ROWS_BENCH = FunctionBench(permute_rows, PERMUTE_ROWS_FORM, _permute_arguments)
UNPERMUTE_ROWS_BENCH = FunctionBench(
    unpermute_rows, UNPERMUTE_ROWS_FORM, _unpermute_arguments, exact=exact_unpermuted, bound=unpermute_bound
)
