"""How long the passes of a layout take: a layer's compute and exchanges, a chunk's, and what goes between stages."""

from __future__ import annotations

from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import DTYPE_BYTES, Cluster
from tilemesh.model.config import ModelConfig
from tilemesh.plan import constants, work
from tilemesh.plan.collectives import RanksOfNodes, group, neighbour_s
from tilemesh.plan.layout import PlanFields
from tilemesh.plan.memory import AUTOCAST
from tilemesh.plan.passes import Code, default_code


class LayerTimes(NamedTuple):
    """Seconds of one microbatch on one rank: compute and tensor-parallel exchanges apart."""

    forward_s: float
    backward_s: float
    scores_s: float
    """Of the forward pass, what selective recomputation repeats."""
    exchange_s: float
    """In the forward pass."""
    exchange_back_s: float
    """In the backward pass, with what hidden exchanges cost all the same."""
    exchange_bytes: tuple[float, float]
    """Sent in the forward and in the backward pass."""
    head_s: tuple[float, float]
    head_exchange_s: tuple[float, float]
    embedding_s: tuple[float, float]
    embedding_exchange_s: float

    def recompute_s(self, recompute: str) -> float:
        """What a backward pass does again, exchanges included."""
        if recompute == "full":
            return self.forward_s + self.exchange_s
        return self.scores_s if recompute == "selective" else 0.0


class Chunks(NamedTuple):
    """Seconds of each chunk's two passes, sending included, and of sending once."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    hop_s: float


class Clock:
    """Times of layouts of one model on one cluster; remembers what they share."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: Cluster,
        context: int,
        rates: Rates | None = None,
        code: Code | None = None,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.context = context
        self._rates = rates
        self._code = code
        self._groups: dict[tuple[int, int], RanksOfNodes] = {}
        self._layers: dict[tuple[object, ...], LayerTimes] = {}

    def group(self, size: int, stride: int) -> RanksOfNodes:
        if (size, stride) not in self._groups:
            self._groups[size, stride] = group(self.cluster, size, stride)
        return self._groups[size, stride]

    def layer(self, plan: PlanFields) -> LayerTimes:
        key = (plan.tp, plan.sequence_parallel, plan.microbatch, plan.attention, plan.precision)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = layer_times(
                self.model, self.cluster, plan, self.context, self._rates, self.code(plan)
            )
        return found

    def code(self, plan: PlanFields) -> Code:
        """What runs this layout: as told, or what its precision and device are usually trained with."""
        return self._code or default_code(self.cluster.device, plan.precision)

    def stream_bytes(self, plan: PlanFields) -> int:
        """One microbatch's activations between two layers."""
        return plan.microbatch * self.context * self.model.width * DTYPE_BYTES[plan.compute_dtype]

    def hop_s(self, plan: PlanFields) -> float:
        """One microbatch's activations to the next stage: each rank of tp sends its share."""
        whole = self.stream_bytes(plan)
        hop = neighbour_s(self.cluster, plan.tp * plan.dp, plan.pp, whole / plan.tp)
        if plan.tp > 1 and not plan.sequence_parallel:
            hop += self.group(plan.tp, 1).all_gather_s(whole)
        return hop

    def chunks(self, plan: PlanFields, counts: tuple[int, ...], accumulate_s: float) -> Chunks:
        """Each chunk's passes; `accumulate_s` is what adding up a layer's gradients takes."""
        layer = self.layer(plan)
        forward = layer.forward_s + layer.exchange_s
        backward = layer.backward_s + layer.exchange_back_s + layer.recompute_s(plan.recompute) + accumulate_s
        # The sender waits until its message has gone; the ends of the pipeline have nobody to send to.
        hop = self.hop_s(plan) if plan.pp > 1 else 0.0
        fs = [forward * count + hop for count in counts]
        bs = [backward * count + hop for count in counts]
        fs[0] += layer.embedding_s[0] + layer.embedding_exchange_s
        bs[0] += layer.embedding_s[1] - hop
        fs[-1] += layer.head_s[0] + layer.head_exchange_s[0] - hop
        bs[-1] += layer.head_s[1] + layer.head_exchange_s[1]
        return Chunks(tuple(fs), tuple(bs), hop)


def layer_times(
    model: ModelConfig,
    cluster: Cluster,
    plan: PlanFields,
    context: int,
    rates: Rates | None = None,
    code: Code = "fused",
) -> LayerTimes:
    """A layer's seconds, and the head's and the embedding's, for one microbatch."""
    dtype, b, tp, sp = plan.compute_dtype, plan.microbatch, plan.tp, plan.sequence_parallel
    speed = work.speed_of(cluster.device, dtype, rates, code)
    autocast = code != "fused" and plan.precision in AUTOCAST
    layer = work.layer_work(model, tp, sp, b, context, plan.attention, dtype, code, autocast)
    head = work.head_work(model, tp, sp, b, context, dtype, code, autocast, cluster.device.kind == "gpu")
    embedding = work.embedding_work(model, tp, sp, b, context, dtype)
    axis = group(cluster, tp, 1)
    whole = b * context * model.width * DTYPE_BYTES[dtype]
    gather, reduce = axis.all_gather_s(whole), axis.all_reduce_s(whole)
    lap = axis.sent_bytes(whole, "all_gather")
    small = 3 * axis.all_reduce_s(4 * b * context)  # the loss's maximum, sum and target, one value a token
    # Forward: two sums, each after a projection split by its input; split along the sequence, a sum is a scatter-sum
    # now and a gather-all at the next projection. Backward: the sums belong to input gradients and hide behind weight
    # gradients, as does gathering the two inputs again; what gathers incoming gradients has nothing to hide behind.
    hidden = constants.HIDDEN_COST if axis.hides else 1.0
    # Hand-fused code keeps its inputs cut along the sequence and gathers them again; ours keeps them whole.
    again = 2 if code == "fused" else 0
    return LayerTimes(
        forward_s=speed.seconds(layer.forward),
        backward_s=speed.seconds(layer.backward),
        scores_s=speed.seconds(layer.scores),
        exchange_s=4 * gather if sp else 2 * reduce,
        exchange_back_s=(2 + (2 + again) * hidden) * gather if sp else 2 * hidden * reduce,
        exchange_bytes=(4 * lap, (4 + again) * lap if sp else 4 * lap),
        head_s=(speed.seconds(head.forward), speed.seconds(head.backward)),
        head_exchange_s=((gather if sp else 0.0) + small, gather if sp else reduce),
        embedding_s=(speed.seconds(embedding.forward), speed.seconds(embedding.backward)),
        embedding_exchange_s=2 * gather if sp else reduce,
    )
