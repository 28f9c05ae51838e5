"""One token drawn from each row's own distribution, and its log-probabilities: logits are read, nothing else is kept.

The one idea: where a number falls among the shares of tokens in their order needs their sum alone. A program has a
row: it looks for the largest logit, adds up the shares, and goes through them until they exceed the number's part of
the sum.
Shares are float32 and their sums float64, as in `model/sampling.py`.
"""

# mypy: disable-error-code="no-untyped-def"

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilemesh.kernels.early import take_turn
from tilemesh.kernels.launch import call
from tilemesh.kernels.launch.call import Place, one_launch
from tilemesh.kernels.launch.gpu import launches_early
from tilemesh.kernels.launch.steps import LaunchPlan

_BLOCK = 4096


@triton.jit
def draw_row(
    logits, temperature, uniform, tokens, scores, N, V, x_n, t_n, u_n, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One row. Reads it three times, of which memory sees about one."""
    if EARLY:
        take_turn()
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * x_n
    most, place, wrong = float("-inf"), 0, 0
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.load(base + columns, mask=columns < V, other=0.0).to(tl.float32)
        # NaN and infinities give NaN, everything else 0.
        wrong += tl.sum((value - value != 0.0).to(tl.int32), 0)
        value = tl.where(columns < V, value, float("-inf"))
        largest, at = tl.max(value, 0, return_indices=True)
        place = tl.where(largest > most, begin + at, place)
        most = tl.maximum(most, largest)
    most = tl.where(wrong > 0, 0.0, most)
    asked = tl.load(temperature + row * t_n)
    heat = tl.maximum(asked, 1.1754943508222875e-38).to(tl.float32)
    own = tl.sum(tl.zeros((BLOCK,), tl.float64), 0)
    total = own
    for begin in range(0, V, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.load(base + columns, mask=columns < V, other=float("-inf")).to(tl.float32) - most
        own += tl.sum(tl.exp(value).to(tl.float64), 0)
        total += tl.sum(tl.exp(value / heat).to(tl.float64), 0)
    target = tl.load(uniform + row * u_n) * total
    found, last = -1, place
    before = tl.sum(tl.zeros((BLOCK,), tl.float64), 0)
    begin = 0
    while (begin < V) & (found < 0):
        columns = begin + tl.arange(0, BLOCK)
        value = tl.load(base + columns, mask=columns < V, other=float("-inf")).to(tl.float32) - most
        share = tl.exp(value / heat).to(tl.float64)
        ends = before + tl.cumsum(share, 0)
        first = tl.min(tl.where((ends > target) & (share > 0), columns, V), 0)
        found = tl.where(first < V, first, -1)
        last = tl.maximum(last, tl.max(tl.where(share > 0, columns, -1), 0))
        before += tl.sum(share, 0)
        begin += BLOCK
    # Rounding may carry the number to the very end: then it is the last token that has a share.
    token = tl.where(asked > 0, tl.where(found < 0, last, found), place)
    value = tl.load(base + token).to(tl.float32) - most
    own_score = value.to(tl.float64) - tl.log(own)
    drawn_score = (value / heat).to(tl.float64) - tl.log(total)
    tl.store(tokens + row, tl.where(wrong > 0, -1, token).to(tl.int64))
    tl.store(scores + row, own_score)
    tl.store(scores + N + row, tl.where(asked > 0, drawn_score, 0.0))


def plan(places: Mapping[str, Place], *, early: bool = False) -> LaunchPlan:
    x = places["logits"]
    rows, columns = x.shape
    numbers = {"N": rows, "V": columns, "x_n": x.strides[0]}
    numbers |= {"t_n": places["temperature"].strides[0], "u_n": places["uniform"].strides[0]}
    constants = {"BLOCK": min(_BLOCK, max(16, triton.next_power_of_2(columns))), "EARLY": early}
    return one_launch(f"{__name__}:draw_row", (rows, 1), places, numbers, constants, warps=8, early=early)


def draw_rows(
    logits_NV: Tensor, temperature_N: Tensor, uniform_N: Tensor, interpreted: bool = False
) -> tuple[Tensor, Tensor]:
    """Tokens (N) int64, -1 where logits are NaN or infinite, and their log-probabilities (2, N) float64: the model's
    own, and as drawn. temperature: 0 takes the likeliest token. uniform: from 0 to below 1. Both float64."""
    tokens_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
    scores_2N = torch.empty((2, len(logits_NV)), dtype=torch.float64, device=logits_NV.device)
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    given = {"logits": logits_NV, "temperature": temperature_N, "uniform": uniform_N}
    given |= {"tokens": tokens_N, "scores": scores_2N}
    launch = call.interpreted if interpreted else call.compiled
    launch(plan, given, written=("tokens", "scores"), early=launches_early(logits_NV.device))
    return tokens_N, scores_2N
