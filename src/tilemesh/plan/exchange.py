"""What data parallelism exchanges in a step, and how much of that the backward pass hides.

ZeRO changes what travels: 0 sums gradients (all_reduce); 1 scatter-sums them once and gathers the new weights; 2
scatter-sums after every microbatch, since a rank no longer has room for all; 3 also gathers the weights for every
forward and every backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilemesh.core.hardware import DTYPE_BYTES
from tilemesh.model.config import ModelConfig, count_parameters
from tilemesh.plan.collectives import RanksOfNodes
from tilemesh.plan.constants import HIDDEN_COST
from tilemesh.plan.layout import PlanFields
from tilemesh.plan.memory import AUTOCAST, STATE_BYTES
from tilemesh.plan.passes import Code
from tilemesh.plan.shards import kv_width_per_rank, shard_parameters, stage_parameters


@dataclass(frozen=True)
class DataExchange:
    """One step's exchange over dp: the seconds nothing hides, and the bytes a rank sends."""

    exposed_s: float
    sent_bytes: float


def data_exchange(
    plan: PlanFields, axis: RanksOfNodes, parameters: int, forward_s: float, backward_s: float, layers: int
) -> DataExchange:
    """For a rank with so many parameters in so many layers, whose passes of one microbatch take so long."""
    weight, gradient, _ = STATE_BYTES[plan.precision]
    gradients, weights = gradient * parameters, weight * parameters
    m = plan.accumulation
    # One exchange a layer, so that it can hide behind the next layer's passes; a scatter-sum takes as long as a gather.
    scatter_s = layers * axis.all_gather_s(gradients / layers)
    gather_s = layers * axis.all_gather_s(weights / layers)
    scattered, gathered = axis.sent_bytes(gradients, "reduce_scatter"), axis.sent_bytes(weights, "all_gather")
    if not axis.hides:
        forward_s = backward_s = 0.0
    if plan.zero == 0:
        beside, alone_s, times = 2 * scattered, 0.0, 1
        exposed_s = _left(layers * axis.all_reduce_s(gradients / layers), backward_s, layers)
    elif plan.zero <= 2:
        beside, alone_s, times = scattered, gather_s, 1 if plan.zero == 1 else m
        exposed_s = _left(scatter_s, backward_s, layers)
    else:
        beside, alone_s, times = 2 * gathered + scattered, 0.0, m
        exposed_s = _left(gather_s, forward_s, layers) + _left(gather_s + scatter_s, backward_s, layers)
    slowed_s = HIDDEN_COST * beside / axis.inside_bytes_per_s if axis.hides else 0.0
    sent = times * beside + (gathered if alone_s else 0.0)
    return DataExchange(times * (exposed_s + slowed_s) + alone_s, sent)


def _left(exchange_s: float, behind_s: float, layers: int) -> float:
    """What does not hide behind a pass: the excess, and always one layer's part, which has no computation beside it."""
    alone = exchange_s / layers
    return max(alone, exchange_s - behind_s * (layers - 1) / layers)


def whole_parameters(model: ModelConfig, layers: int, last: bool) -> int:
    """Of the first stage, what tensor parallelism does not split: norms, biases after a sum, learned positions."""
    counted = count_parameters(model)
    each = counted.norms + (2 * model.width if model.biases else 0)
    return layers * each + counted.position_embedding + (counted.final_norm if last else 0)


def repeated_parameters(model: ModelConfig, tp: int, layers: int) -> int:
    """Of a rank's parameters, the key and value projections that other ranks of tp hold too: kv heads fewer than tp.

    Each of these ranks has other queries, so each has a part of their gradient.
    """
    if tp <= model.kv_heads:
        return 0
    return layers * 2 * kv_width_per_rank(model, tp) * (model.width + bool(model.biases))


def exchanged(model: ModelConfig, plan: PlanFields, context: int, layers: int, code: Code) -> dict[str, dict[str, int]]:
    """Bytes of the buffers that the first rank hands to each collective in a step, by axis and operation.

    The buffer is the whole one: what is summed, what gathering gives, what scatter-summing takes. It does not depend on
    the algorithm. Sums of single numbers (the loss, the gradients' norm) are left out.
    """
    found: dict[str, dict[str, int]] = {}
    tokens, m = plan.microbatch * context, plan.accumulation
    last = plan.pp == 1
    size = DTYPE_BYTES[plan.compute_dtype]
    # Under autocast partial results are 16 bits wide; the stream, its gradient and the embedding are not.
    stream = 4 if plan.precision in AUTOCAST and code != "fused" else size
    narrow, wide = tokens * model.width * size, tokens * model.width * stream
    if plan.tp > 1:
        again = 2 if plan.recompute == "full" else 0
        forward, backward = (2 + again) * layers * narrow, 2 * layers * wide
        loss = 3 * 4 * tokens if last else 0  # a token's maximum, sum and target
        head = wide if last else 0
        # Once a step, whatever the accumulation: the gradients of kv heads that several ranks hold.
        repeated = STATE_BYTES[plan.precision][1] * repeated_parameters(model, plan.tp, layers)
        if plan.sequence_parallel:
            # Joined on entering two regions a layer and scattered on leaving; backward the other way round. What is
            # only joined travels as narrow as the products take it; the embedding's gradient is of the stream.
            regathered = 2 * layers * narrow if code == "fused" else 0
            joined = (4 + again) * layers * narrow + (narrow if last else 0) + wide + regathered
            scattered = forward + backward + wide + head
            # What tp leaves whole sees a part of the tokens on each rank: its gradients are summed, once a step.
            summed = STATE_BYTES[plan.precision][1] * whole_parameters(model, layers, last)
            found["tp"] = {
                "all_gather": m * joined,
                "reduce_scatter": m * scattered,
                "all_reduce": m * loss + summed + repeated,
            }
        else:
            found["tp"] = {"all_reduce": m * (forward + backward + wide + head + loss) + repeated}
    if plan.pp > 1:
        # Each chunk's output goes on; the gradient of each chunk's input goes back, but for the model's own input.
        found["pp"] = {"send": m * (2 * plan.interleave - 1) * narrow // plan.tp}
    if plan.dp > 1:
        weight, gradient, _ = STATE_BYTES[plan.precision]
        parameters = stage_parameters(shard_parameters(model, plan.tp), layers, True, last)
        times = m if plan.zero >= 2 else 1
        if plan.zero == 0:
            found["dp"] = {"all_reduce": gradient * parameters}
        else:
            gathers = {1: 1, 2: 1, 3: 2 * m}[plan.zero]
            found["dp"] = {"reduce_scatter": times * gradient * parameters, "all_gather": gathers * weight * parameters}
    return {axis: {name: nbytes for name, nbytes in by.items() if nbytes} for axis, by in found.items()}
