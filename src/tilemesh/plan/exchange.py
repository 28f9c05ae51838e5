"""What data parallelism exchanges in a step, and how much of that the backward pass hides.

ZeRO changes what travels: 0 sums gradients (all_reduce); 1 scatter-sums them once and gathers the new weights; 2
scatter-sums after every microbatch, since a rank no longer has room for all; 3 also gathers the weights for every
forward and every backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.plan.collectives import Group
from tilemesh.plan.constants import HIDDEN_COST
from tilemesh.plan.layout import Layout
from tilemesh.plan.memory import STATE_BYTES


@dataclass(frozen=True)
class DataExchange:
    """One step's exchange over dp: the seconds nothing hides, and the bytes a rank sends."""

    exposed_s: float
    sent_bytes: float


def data_exchange(
    plan: Layout, axis: Group, parameters: int, forward_s: float, backward_s: float, layers: int
) -> DataExchange:
    """For a rank with so many parameters in so many layers, whose passes of one microbatch take so long."""
    weight, gradient, _ = STATE_BYTES[plan.precision]
    gradients, weights = gradient * parameters, weight * parameters
    m = plan.accumulation
    # One exchange a layer, so that it can hide behind the next layer's passes; a scatter-sum takes as long as a gather.
    scatter_s = layers * axis.all_gather_s(gradients / layers)
    gather_s = layers * axis.all_gather_s(weights / layers)
    scattered, gathered = axis.sent_bytes(gradients, "reduce_scatter"), axis.sent_bytes(weights, "all_gather")
    if plan.zero == 0:
        beside, alone_s, times = 2 * scattered, 0.0, 1
        exposed_s = _left(layers * axis.all_reduce_s(gradients / layers), backward_s, layers)
    elif plan.zero <= 2:
        beside, alone_s, times = scattered, gather_s, 1 if plan.zero == 1 else m
        exposed_s = _left(scatter_s, backward_s, layers)
    else:
        beside, alone_s, times = 2 * gathered + scattered, 0.0, m
        exposed_s = _left(gather_s, forward_s, layers) + _left(gather_s + scatter_s, backward_s, layers)
    slowed_s = HIDDEN_COST * beside / axis.inside_bytes_per_s
    sent = times * beside + (gathered if alone_s else 0.0)
    return DataExchange(times * (exposed_s + slowed_s) + alone_s, sent)


def _left(exchange_s: float, behind_s: float, layers: int) -> float:
    """What does not hide behind a pass: the excess, and always one layer's part, which has no computation beside it."""
    alone = exchange_s / layers
    return max(alone, exchange_s - behind_s * (layers - 1) / layers)
