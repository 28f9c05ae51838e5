"""What is measured of a processor at the sizes of a Transformer layer: narrow products, norms, turned heads, calls.

A peak is that of a square product in warm caches. A layer's products are narrow, their operands come from memory, a
norm is a dozen small operations, and each operation costs its caller something before it does anything. What is
measured here is what eager training pays for these; bytes and calls are counted as `plan/passes.py` counts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilemesh.core.calibration import Part
from tilemesh.core.hardware import CPU
from tilemesh.measure.calibrate_operators import (
    AVX2_BYTES,
    operator_figure,
    timed_operator,
    vector_bytes,
)
from tilemesh.measure.figure import MATMUL_SHARE, MEMORY_SHARE, Figure, FigureOutcome

NARROW = (32, 64, 128, 256)
"""Smaller dims of the products that are timed; the other is 128 or, beyond, the same. Wider ones approach the peak."""
TOKENS = 1024
SETS = 16
"""Operands take turns, so that they come from memory as in a step, where much lies between two uses."""

NORM_MOVES = 7 + 25
"""Tensors that an RMSNorm's forward and backward pass read and write."""
TURN_MOVES = 9 + 12
"""The same of turning a head's halves."""
BLOCK_CALLS = 200
"""Calls of one layer, forward and backward, as the planner counts them; a test holds the two to each other."""
BLOCKS = 4


def layer_figures(part: Part, cores: int, seconds: float) -> list[Figure]:
    """Predicted, not yet measured."""
    peak = MATMUL_SHARE * CPU.peak_flops_per_s["fp32"] * cores / CPU.sm_count * vector_bytes() / AVX2_BYTES
    stream = MEMORY_SHARE * min(1.0, cores / 2) * CPU.memory_bytes_per_s
    figures = [
        operator_figure(part, cores, "projection_flops_per_s", "FLOP/s", peak,
                partial(_projection, width, backward, cores, seconds), f"{word}-{width}")
        for width in NARROW for backward, word in ((False, "forward"), (True, "backward"))
    ]  # fmt: skip
    figures.append(operator_figure(part, cores, "rows_bytes_per_s", "B/s", stream, partial(_norm, cores, seconds)))
    figures.append(operator_figure(part, cores, "halves_bytes_per_s", "B/s", stream, partial(_turn, cores, seconds)))
    figures.append(operator_figure(part, cores, "operation_s", "s", CPU.launch_s, partial(_block, cores, 2 * seconds)))
    return figures


def _projection(width: int, backward: bool, cores: int, seconds: float) -> FigureOutcome:
    """x W^T, or both gradients."""
    other = max(width, 128)
    xs = [torch.rand(TOKENS, width) for _ in range(SETS)]
    ws = [torch.rand(other, width) for _ in range(SETS)]
    gs = [torch.rand(TOKENS, other) for _ in range(SETS)]

    def forward(index: int) -> object:
        place = index % SETS
        return torch.mm(xs[place], ws[place].t())

    def back(index: int) -> object:
        place = index % SETS
        return torch.mm(gs[place], ws[place]), torch.mm(gs[place].t(), xs[place])

    flops = 2.0 * TOKENS * width * other
    return timed_operator("mm", back if backward else forward, cores, seconds, 2 * flops if backward else flops)


def _norm(cores: int, seconds: float) -> FigureOutcome:
    x, gain = torch.rand(4 * TOKENS, 128, requires_grad=True), torch.rand(128, requires_grad=True)
    gradient = torch.rand(4 * TOKENS, 128)

    def both(index: int) -> object:
        y = functional.rms_norm(x, (128,), gain, 1e-5)
        return torch.autograd.grad(y, (x, gain), gradient)

    return timed_operator("rms_norm", both, cores, seconds, NORM_MOVES * 4.0 * x.numel())


def _turn(cores: int, seconds: float) -> FigureOutcome:
    x = torch.rand(4 * TOKENS // 128, 128, 4, 32, requires_grad=True)
    cos, sin = torch.rand(128, 16), torch.rand(128, 16)
    gradient = torch.rand(4 * TOKENS // 128, 4, 128, 32)

    def both(index: int) -> object:
        return torch.autograd.grad(_turned(x.transpose(1, 2), cos, sin), x, gradient)

    return timed_operator("rotary", both, cores, seconds, TURN_MOVES * 4.0 * x.numel())


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _block(cores: int, seconds: float) -> FigureOutcome:
    """Layers so small that only their calls take time."""
    step = layer_passes(BLOCKS, width=8, hidden=16, heads=2, rows=1, tokens=8)
    outcome = timed_operator("layer", lambda index: step(), cores, seconds, None)
    measured = None if outcome.measured is None else outcome.measured.scaled(1 / (BLOCKS * BLOCK_CALLS))
    return FigureOutcome(measured, outcome.peers, outcome.missing, outcome.case)


def layer_passes(layers: int, *, width: int, hidden: int, heads: int, rows: int, tokens: int) -> Callable[[], object]:
    """Forward and backward passes of layers in plain torch: norm, q, k, v, turn, attention, norm, gated MLP."""
    weights = [
        [torch.rand(out, inner, requires_grad=True) for out, inner in _shapes(width, hidden)] for _ in range(layers)
    ]
    gains = [[torch.ones(width, requires_grad=True) for _ in range(2)] for _ in range(layers)]
    flat = [tensor for layer in (*weights, *gains) for tensor in layer]
    each = width // heads
    cos, sin = torch.rand(tokens, each // 2), torch.rand(tokens, each // 2)
    start = torch.rand(rows, tokens, width, requires_grad=True)

    def step() -> object:
        x = start
        for (q, k, v, o, gate, up, down), (first, second) in zip(weights, gains, strict=True):
            h = functional.rms_norm(x, (width,), first, 1e-5)
            split = [functional.linear(h, tensor).view(rows, tokens, heads, -1).transpose(1, 2) for tensor in (q, k, v)]
            keys, queries = _turned(split[1], cos, sin), _turned(split[0], cos, sin)
            y = functional.scaled_dot_product_attention(queries, keys, split[2], is_causal=True)
            x = x + functional.linear(y.transpose(1, 2).flatten(-2), o)
            h = functional.rms_norm(x, (width,), second, 1e-5)
            x = x + functional.linear(functional.silu(functional.linear(h, gate)) * functional.linear(h, up), down)
        return torch.autograd.grad(x.sum(), flat)

    return step


def seconds_each(call: Callable[[], object], seconds: float) -> float:
    """Of one call, when it is made again and again for so long."""
    began, calls = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < seconds or not calls:
        call()
        calls += 1
    return taken / calls


def _shapes(width: int, hidden: int) -> list[tuple[int, int]]:
    return [(width, width)] * 4 + [(hidden, width)] * 2 + [(width, hidden)]
