"""Rows of a table by token, with the rows of a table of positions added: in plain torch, and what is expected of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.errors import UsageError
from tilemesh.kernels.embedding.cost import FORM, context_of
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.launch.tensors import is_plain, is_traced
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.problems import SizedProblem


def check(tokens: Tensor, weight: Tensor, positions: Tensor | None, start: int) -> None:
    if tokens.dtype not in (torch.int64, torch.int32) or tokens.dim() < 1:
        raise UsageError(f"tokens are {tokens.dtype} {tuple(tokens.shape)}: expected int64 or int32 of shape (…, T)")
    if weight.dim() != 2:
        raise UsageError(f"weight has shape {tuple(weight.shape)}: expected (V, D)")
    if start < 0:
        raise UsageError(f"start is {start}: expected 0 or more")
    if positions is None:
        return
    if positions.dim() != 2 or positions.shape[1] != weight.shape[1]:
        raise UsageError(
            f"positions have shape {tuple(positions.shape)}: expected (positions, {weight.shape[1]}), as wide as weight"
        )
    if start + tokens.shape[-1] > positions.shape[0]:
        raise UsageError(
            f"{tokens.shape[-1]} tokens from position {start} on: the table has {positions.shape[0]} positions"
        )


def check_values(tokens: Tensor, weight: Tensor, *_: object) -> None:
    """Every token is a row of the table. Reads the tokens: on a GPU that would wait for it."""
    if is_traced() or not is_plain(tokens) or tokens.numel() == 0:
        return
    least, most = (int(value) for value in tokens.aminmax())
    if least < 0 or most >= len(weight):
        raise UsageError(f"tokens from {least} to {most}: expected 0 to {len(weight) - 1}, the rows of weight")


@operator(kernel="tilemesh.kernels.embedding.kernel", check=check, check_values=check_values)
def embedding(tokens: Tensor, weight: Tensor, positions: Tensor | None = None, *, start: int = 0) -> Tensor:
    """weight[tokens] + positions[start : start + T], in one pass.

    tokens: (…, T), int64 or int32; weight: (V, D); positions: (P, D), whose row `start` belongs to the first token of
    each sequence. The gradient of a row is added up in float32 (float64 for float64) in a fixed order: it repeats bit
    for bit. A token outside of the table is an error on a CPU; on a GPU its row is NaN and its gradient is dropped.
    """
    y = functional.embedding(tokens, weight)
    return y if positions is None else y + positions[start : start + tokens.shape[-1]]


def arguments(problem: SizedProblem, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random ones of a problem, for benchmarks and tests; some tokens are far more frequent than others, as in text."""
    count, width, vocabulary = problem.sizes
    generator, dtype = torch.Generator(device).manual_seed(seed), getattr(torch, problem.dtype)
    tokens = (vocabulary * torch.rand(count, generator=generator, device=device) ** 4).long().clamp(max=vocabulary - 1)
    context = context_of(count)
    weight, positions = (
        torch.randn(rows, width, generator=generator, device=device).to(dtype) for rows in (vocabulary, context)
    )
    return tokens.view(-1, context), weight, positions


def _plain(tokens: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    return functional.embedding(tokens, weight) + positions


BENCH = FunctionBench(embedding, FORM, arguments, eager=_plain)
