"""Bits per matrix under a byte budget: a knapsack in which each matrix takes one of several schemes.

The one idea: what a scheme costs in quality is measured, one matrix at a time, as the divergence of the model's
predictions from those of the whole model; costs of different matrices are taken to add up. `choose` is pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.compress.calibrate import ROWS
from tilemesh.core.errors import UsageError
from tilemesh.kernels.lowbit.codes import rounded
from tilemesh.kernels.lowbit.formats import Scheme
from tilemesh.model.transformer import Transformer

_UNITS = 4000  # that a budget is divided into


def choose(costs: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int) -> list[int]:
    """For each matrix the number of its scheme, such that sizes add up to at most the budget and costs are smallest.

    Sizes are rounded up to thousandths of the budget or finer, so that the budget is kept.
    """
    least = sum(min(each) for each in sizes)
    if least > budget:
        raise UsageError(f"mixed bits in {budget:,} bytes: the smallest choices take {least:,}; allow more bits")
    unit = max(1, budget // _UNITS)
    limit = budget // unit
    best = np.full(limit + 1, np.inf)
    best[0] = 0.0
    taken: list[np.ndarray] = []
    for each_cost, each_size in zip(costs, sizes, strict=True):
        options = np.full((len(each_cost), limit + 1), np.inf)
        for number, (cost, size) in enumerate(zip(each_cost, each_size, strict=True)):
            units = -(-size // unit)
            if units <= limit:
                options[number, units:] = best[: limit + 1 - units] + cost
        taken.append(options.argmin(0))
        best = options.min(0)
    if not np.isfinite(best).any():  # rounded up, even the smallest choices do not fit
        return [int(np.argmin(each)) for each in sizes]
    place = int(best.argmin())
    chosen = []
    for options_taken, each_size in zip(reversed(taken), reversed(sizes), strict=True):
        number = int(options_taken[place])
        chosen.append(number)
        place -= -(-each_size[number] // unit)
    return chosen[::-1]


@torch.no_grad()
def sensitivities(
    model: Transformer, tokens_BT: Tensor, schemes: Mapping[str, Sequence[Scheme]]
) -> dict[str, list[float]]:
    """For each matrix and scheme: the mean divergence (nats) of the predictions where only that matrix is rounded."""
    pieces = tokens_BT[: 2 * ROWS]
    expected = functional.log_softmax(model(pieces).float(), -1)
    errors: dict[str, list[float]] = {}
    for name, choices in schemes.items():
        weight = model.get_parameter(f"{name}.weight")
        kept = weight.detach().clone()
        errors[name] = []
        for scheme in choices:
            weight.copy_(rounded(kept, scheme))
            changed = functional.log_softmax(model(pieces).float(), -1)
            errors[name].append(float((expected.exp() * (expected - changed)).sum(-1).mean().clamp(min=0)))
        weight.copy_(kept)
    return errors


def mixed_schemes(
    model: Transformer, tokens_BT: Tensor, choices: Mapping[str, Sequence[Scheme]], bits: float
) -> dict[str, Scheme]:
    """Schemes whose bytes are at most those of `bits` per weight with the first choice's scales."""
    shapes = {name: tuple(model.get_parameter(f"{name}.weight").shape) for name in choices}
    sizes = {name: [scheme.nbytes(*shapes[name]) for scheme in each] for name, each in choices.items()}
    budget = 0
    for name, each in choices.items():
        outputs, inputs = shapes[name]
        scales = each[0].nbytes(outputs, inputs) - outputs * each[0].row_bytes(inputs)
        budget += scales + int(outputs * inputs * bits / 8)
    least = sum(min(each) for each in sizes.values())
    if least > budget:  # known before anything is measured
        weights = sum(outputs * inputs for outputs, inputs in shapes.values())
        needed = math.ceil(100 * (bits + (least - budget) * 8 / weights)) / 100
        raise UsageError(
            f"weights.bits is {bits:g}, {budget:,} bytes in all, and the smallest choices take {least:,}: set it to at "
            f"least {needed:g}"
        )
    costs = sensitivities(model, tokens_BT, choices)
    names = list(choices)
    numbers = choose([costs[name] for name in names], [sizes[name] for name in names], budget)
    return {name: choices[name][number] for name, number in zip(names, numbers, strict=True)}
