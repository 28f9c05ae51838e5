"""How long the parts of a step take: a layer's passes and exchanges, a chunk's, what goes between stages, what replicas
exchange, and what the host needs to launch it all.

On a GPU a step runs no faster than its kernels are launched. What the host needs for that does not depend on how large
the tensors are, so it is measured on a model so small that the GPU only waits (`train/host.py`), of two depths, which
gives seconds per layer and seconds per step; forward and backward passes apart from clipping and the optimiser, since a
step makes the former once a microbatch.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.hardware import Cluster
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.placement import LOOP
from tilemesh.core.step.simulate import ExchangeTimes, RoutedTimes, StepTimes
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.exchanges import Exchange, expert_exchanges, repeated_exchanges, replica_exchanges
from tilemesh.model.work.operations import (
    FusedAttention,
    embedding_work,
    expert_products,
    head_work,
    layer_work,
)
from tilemesh.model.work.routing import imbalance
from tilemesh.model.work.step_exchanges import scatters_of, sent_bytes, updates_of
from tilemesh.model.work.task import STATE_BYTES, Code, Task, default_code, is_by_layers
from tilemesh.model.work.weights import RankParameters
from tilemesh.plan import constants
from tilemesh.plan.speed import RanksOfNodes, Speed, group, neighbour_s, speed_of


class AxisTimes(NamedTuple):
    """What a layer's exchanges along one axis take for one microbatch."""

    forward_s: float
    again_s: float
    """Of the forward pass, what recomputation repeats."""
    back_s: float
    """In the backward pass, with what hidden exchanges cost all the same."""
    split_s: float
    """In the first half of a backward pass in two halves, where there are no weight gradients to hide behind."""
    nbytes: tuple[float, float, float]
    """Sent in the forward pass, in the backward pass, and again where a layer's forward pass is repeated."""


class LayerTimes(NamedTuple):
    """Seconds of one microbatch on one rank: compute, and exchanges by axis."""

    forward_s: float
    backward_s: float
    scores_s: float
    """Of the forward pass, what selective recomputation repeats."""
    between_s: float
    """Of the forward pass, what recomputation by operators repeats."""
    again_s: float
    """Of the forward pass, what full recomputation repeats."""
    weight_s: float
    """Of the backward pass, its second half: the weight gradients."""
    axes: Mapping[str, AxisTimes]
    head_s: tuple[float, float]
    head_exchange_s: tuple[float, float]
    embedding_s: tuple[float, float]
    embedding_exchange_s: float
    routed: RoutedTimes | None = None
    """Where ranks share out experts: how the layer's passes lie around the two exchanges of each."""

    @property
    def exchange_s(self) -> float:
        return sum(axis.forward_s for axis in self.axes.values())

    @property
    def exchange_again_s(self) -> float:
        return sum(axis.again_s for axis in self.axes.values())

    def exchange_back_s(self, splits: bool = False) -> float:
        """In the backward pass, or where it is in two halves."""
        return sum(axis.split_s if splits else axis.back_s for axis in self.axes.values())

    def recompute_s(self, recompute: str) -> float:
        """What a backward pass does again, exchanges included."""
        if recompute == "full":
            return self.again_s + self.exchange_again_s
        if recompute == "operators":
            return self.between_s + self.exchange_again_s
        return self.scores_s if recompute == "selective" else 0.0


def join_layers(parts: Sequence[tuple[int, LayerTimes]]) -> LayerTimes:
    """So many layers of each kind, one after the other."""
    first = parts[0][1]
    forward, backward, scores, between, again, weight = _weighted(
        (count, (layer.forward_s, layer.backward_s, layer.scores_s, layer.between_s, layer.again_s, layer.weight_s))
        for count, layer in parts
    )
    axes = {}
    for name in first.axes:
        mine = [(count, layer.axes[name]) for count, layer in parts]
        there, repeated, back, split = _weighted(
            (count, (axis.forward_s, axis.again_s, axis.back_s, axis.split_s)) for count, axis in mine
        )
        nbytes, nbytes_back, nbytes_again = _weighted((count, axis.nbytes) for count, axis in mine)
        axes[name] = AxisTimes(there, repeated, back, split, (nbytes, nbytes_back, nbytes_again))
    return first._replace(
        forward_s=forward,
        backward_s=backward,
        scores_s=scores,
        between_s=between,
        again_s=again,
        weight_s=weight,
        axes=axes,
    )


def _weighted(parts: Iterable[tuple[int, tuple[float, ...]]]) -> list[float]:
    counts, values = zip(*parts, strict=True)
    return [sum(map(operator.mul, counts, column)) for column in zip(*values, strict=True)]


class Chunks(NamedTuple):
    """Seconds of each chunk's passes, backward in two halves, and of sending once.

    Between CPU ranks a message is work of its sender, and hand-fused code, as it was published, waits until it has
    gone: there it is part of the passes. Ours on GPUs goes on, and a message delays its receiver alone.
    """

    forward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    hop_s: float
    sender_waits: bool
    routed: RoutedTimes | None = None

    @property
    def step_times(self) -> StepTimes:
        """As the simulator takes them."""
        hop_s = 0.0 if self.sender_waits else self.hop_s
        return StepTimes(self.forward_s, self.input_s, self.weight_s, hop_s, routed=self.routed)

    def busy_s(self, held: Iterable[int]) -> float:
        """A microbatch's passes through these chunks."""
        return sum(self.forward_s[chunk] + self.input_s[chunk] + self.weight_s[chunk] for chunk in held)


class Clock:
    """Times of layouts of one model on one cluster; remembers what they share."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: Cluster,
        context: int,
        rates: Rates | None = None,
        code: Code | None = None,
        imbalance: float = 0.0,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self._device = cluster.device
        self.context = context
        self._rates = rates
        self._code = code
        self._imbalance = imbalance
        self._groups: dict[tuple[int, int], RanksOfNodes] = {}
        self._layers: dict[tuple[object, ...], tuple[LayerTimes, ...]] = {}

    def group(self, size: int, stride: int) -> RanksOfNodes:
        if (size, stride) not in self._groups:
            self._groups[size, stride] = group(self.cluster, size, stride)
        return self._groups[size, stride]

    def layers(self, plan: ParallelPlan, layers: int = 1, dense: int = 0) -> LayerTimes:
        """So many layers, of which so many are dense."""
        return join_layers([*zip((layers - dense, dense), self._kinds(plan), strict=False)])

    def _kinds(self, plan: ParallelPlan) -> tuple[LayerTimes, ...]:
        """A layer of each of the model's kinds."""
        by_layers = self.is_by_layers(plan)
        key = (
            plan.tp, plan.sequence_parallel, plan.microbatch, plan.attention, plan.precision, by_layers, plan.cp,
            plan.fp8_scales, plan.cp_exchange, plan.ep, plan.expert_tp,
        )  # fmt: skip
        times = self._layers.get(key)
        if times is None:
            task = self.task(plan)
            times = tuple(layer_times(kind, self.cluster, task, self._rates) for kind in self.model.kinds)
            self._layers[key] = times
        return times

    def code(self, plan: ParallelPlan) -> Code:
        """What runs this layout: as told, or what its precision and device are usually trained with."""
        return self._code or default_code(self._device, plan.precision)

    def is_by_layers(self, plan: ParallelPlan) -> bool:
        """As `Task.by_layers`."""
        return plan.zero == 3 and is_by_layers(plan, self.code(plan))

    def task(self, plan: ParallelPlan) -> Task:
        """One microbatch of this layout. Where ranks take turns on a core, one that waits for the busiest leaves it to
        the others."""
        is_gpu, turns = self.cluster.device.kind == "gpu", self._device.ranks_per_core
        task = Task.of(plan, self.context, self.code(plan), is_gpu, imbalance=self._imbalance)
        if plan.ep == 1 or turns == 1.0:
            return task
        return dataclasses.replace(task, imbalance=max(1.0, imbalance(self.model, task) / turns))

    def hop_s(self, plan: ParallelPlan) -> float:
        """One microbatch's activations to the next stage."""
        sent = sent_bytes(self.model, self.task(plan))
        hop = neighbour_s(self.cluster, plan.tp * plan.replicas, plan.pp, sent)
        if plan.tp > 1 and not plan.sequence_parallel and self.code(plan) == "fused":
            hop += self.group(plan.tp, 1).all_gather_s(plan.tp * sent)
        return hop

    def chunks(self, plan: ParallelPlan, counts: tuple[int, ...], accumulate_s: Callable[[int, int], float]) -> Chunks:
        """Each chunk's passes; `accumulate_s` is what adding up the gradients of so many layers, some dense, takes."""
        pairs = [*zip(counts, self.model.dense_of(counts), strict=True)]
        spans = {pair: self.layers(plan, *pair) for pair in {*pairs}}
        layers = [spans[pair] for pair in pairs]
        splits = plan.pp > 1 and plan.pipeline.is_split
        stages = plan.placement.directions[0] if plan.recompute_stages else ()
        repeats = [plan.recomputes(stage) for stage in stages] or [True] * len(counts)
        hop = self.hop_s(plan) if plan.pp > 1 else 0.0
        sender_waits = self.cluster.device.kind == "cpu" or self.code(plan) == "fused"
        # The ends of the pipeline have nobody to send to.
        sent = hop if sender_waits else 0.0
        fs = [layer.forward_s + layer.exchange_s + sent for layer in layers]
        bs = [
            layer.backward_s - layer.weight_s + layer.exchange_back_s(splits) + again * layer.recompute_s(plan.repeated)
            for again, layer in zip(repeats, layers, strict=True)
        ]
        bs = [back + sent for back in bs]
        layer = layers[0]
        fs[0] += layer.embedding_s[0] + layer.embedding_exchange_s
        bs[0] += layer.embedding_s[1] - sent
        fs[-1] += layer.head_s[0] + layer.head_exchange_s[0] - sent
        bs[-1] += layer.head_s[1] + layer.head_exchange_s[1]
        ws = tuple(layer.weight_s + accumulate_s(*pair) for layer, pair in zip(layers, pairs, strict=True))
        return Chunks(tuple(fs), tuple(bs), ws, hop, sender_waits, layer.routed)


def layer_times(model: ModelConfig, cluster: Cluster, task: Task, rates: Rates | None = None) -> LayerTimes:
    """A layer's seconds, and the head's and the embedding's, for one microbatch."""
    speed = speed_of(cluster.device, task.dtype, rates, task.code)
    # Experts are shared out among replicas, or first among ranks of tp that do not share one.
    sizes = {"tp": (task.tp, 1), "cp": (task.cp, task.tp), "ep": (task.ep, task.ranks_per_expert)}
    if task.cp > 1:  # what goes over both counts as of cp
        sizes["cp+tp"] = (task.cp * task.tp, 1)
    axes = {name: group(cluster, *size) for name, size in sizes.items() if size[0] > 1 or name == "tp"}
    layer, head, embedding = layer_work(model, task), head_work(model, task), embedding_work(model, task)
    again = tuple(repeated_exchanges(model, task))
    # An exchange that hides behind a product costs something all the same; between CPU ranks nothing hides.
    hidden = constants.HIDDEN_COST if axes["tp"].hides else 1.0
    attention_s = (
        speed.seconds(tuple(part for part in layer.forward if isinstance(part, FusedAttention))),
        speed.seconds(tuple(part for part in layer.backward if isinstance(part, FusedAttention))),
    )

    def along(exchange: Exchange) -> RanksOfNodes:
        if exchange.among is None:
            return axes[exchange.axis]
        count, apart = exchange.among
        return group(cluster, count, sizes[exchange.axis][1] * apart)

    def exchange_s(exchanges: Iterable[Exchange], backward: bool, name: str = "tp", cost: float = hidden) -> float:
        several = [
            exchange
            for exchange in exchanges
            if exchange.backward is backward and exchange.axis.partition("+")[0] == name
        ]
        ring = [exchange for exchange in several if exchange.collective == "send"]
        ring_s = sum(_ring_s(along(exchange), exchange) for exchange in ring)
        # What goes round travels while the keys that are here are attended to: all but the last ones.
        stops = max((along(exchange).ranks for exchange in ring), default=1)
        behind_s = attention_s[backward] * (1 - 1 / stops) if axes[name].hides else 0.0
        is_beside = name == "ep" and task.code != "fused" and bool(model.experts)
        hidden_s = _beside_s(model, task, axes[name], speed, backward) if is_beside else 0.0
        return (
            max(ring_s - behind_s, constants.HIDDEN_COST * ring_s)
            - hidden_s
            + sum(
                (cost if exchange.hides else 1.0)
                * along(exchange).exchange_s(exchange.collective, exchange.nbytes, exchange.copies)
                for exchange in several
                if exchange.collective not in ("send", "recv")
            )
        )

    def sent_bytes(exchanges: Iterable[Exchange], backward: bool, name: str) -> float:
        return sum(
            exchange.nbytes
            if exchange.collective == "send"
            else along(exchange).sent_bytes(exchange.nbytes, exchange.collective)
            for exchange in exchanges
            if exchange.backward is backward
            and exchange.axis.partition("+")[0] == name
            and exchange.collective != "recv"
        )

    times = LayerTimes(
        forward_s=speed.seconds(layer.forward),
        backward_s=speed.seconds(layer.backward),
        scores_s=speed.seconds(layer.scores),
        between_s=speed.seconds(layer.between),
        again_s=speed.seconds(layer.again),
        weight_s=speed.seconds(layer.weight_gradients),
        axes={
            name: AxisTimes(
                exchange_s(layer.exchanges, False, name),
                exchange_s(again, False, name),
                exchange_s(layer.exchanges, True, name),
                exchange_s(layer.exchanges, True, name, 1.0),
                (
                    sent_bytes(layer.exchanges, False, name),
                    sent_bytes(layer.exchanges, True, name),
                    sent_bytes(again, False, name),
                ),
            )
            for name in axes
            if "+" not in name
        },
        head_s=(speed.seconds(head.forward), speed.seconds(head.backward)),
        head_exchange_s=(exchange_s(head.exchanges, False), exchange_s(head.exchanges, True)),
        embedding_s=(speed.seconds(embedding.forward), speed.seconds(embedding.backward)),
        embedding_exchange_s=exchange_s(embedding.exchanges, False) + exchange_s(embedding.exchanges, True),
    )
    return (
        times
        if task.ep == 1 or not model.experts
        else times._replace(routed=_routed(model, task, axes["ep"], speed, times))
    )


def _rows_s(model: ModelConfig, task: Task, axis: RanksOfNodes) -> float:
    """Of a layer's rows on their way to experts, or back."""
    rows = next(exchange for exchange in expert_exchanges(model, task) if exchange.site == "mlp")
    return axis.exchange_s(rows.collective, rows.nbytes, rows.copies)


def _beside_s(model: ModelConfig, task: Task, axis: RanksOfNodes, speed: Speed, backward: bool) -> float:
    """What of the way to experts, backward of the gradients' way home, hides behind a shared one."""
    if not axis.hides:
        return 0.0
    beside_s, rows_s = speed.seconds(expert_products(model, task, backward).shared), _rows_s(model, task, axis)
    return min(beside_s, (1 - constants.HIDDEN_COST) * rows_s)


def _routed(model: ModelConfig, task: Task, axis: RanksOfNodes, speed: Speed, times: LayerTimes) -> RoutedTimes:
    """A layer's passes, whose seconds these are, around their exchanges: attention comes before forward, and after
    backward."""
    rows_s, passes = _rows_s(model, task, axis), []
    for backward in (False, True):
        picked, shared = expert_products(model, task, backward)
        between_s = speed.seconds(picked)
        beside_s = speed.seconds(shared) if axis.hides and task.code != "fused" else 0.0
        whole_s = times.forward_s + times.exchange_s
        if backward:
            whole_s = times.backward_s - times.weight_s + times.exchange_back_s()
        rest_s = max(0.0, whole_s - max(rows_s, beside_s) - between_s - rows_s)
        if backward:
            passes.append(ExchangeTimes(0.0, rows_s, 0.0, between_s, rows_s, beside_s, rest_s))
        else:
            passes.append(ExchangeTimes(rest_s, rows_s, beside_s, between_s, rows_s, 0.0))
    return RoutedTimes(passes[0], passes[1], times.weight_s)


def _ring_s(axis: RanksOfNodes, exchange: Exchange) -> float:
    """Messages of each rank to the next until all have seen all: what gathering everything takes, and ranks meet for
    each of them."""
    gathering_s = axis.exchange_s("all_gather", exchange.nbytes * axis.ranks / (axis.ranks - 1))
    return gathering_s + (axis.ranks - 2) * axis.meeting_s


# ---- over a whole step -----------------------------------------------------------------------------------------


class DataExchange(NamedTuple):
    """One step's exchange over dp: the seconds that no computing hides, and the bytes that each rank sends."""

    exposed_s: float
    sent_bytes: float


def data_exchange(
    plan: ParallelPlan, clock: Clock, held: RankParameters, passes_s: tuple[float, float], layers: int
) -> DataExchange:
    """For a rank with so many parameters in so many layers, whose passes of one microbatch, forward and backward, take
    so long. Experts that replicas share out are exchanged among those that hold the same."""
    groups = [(held.common, plan.zero_ranks, plan.replicas, plan.tp)]
    if held.experts:  # whoever holds the same ones is further away
        apart = plan.ep * plan.ranks_per_expert
        groups.append((held.experts, plan.expert_zero_ranks, plan.expert_replicas, apart))
    exposed_s = sent_bytes = 0.0
    for parameters, zero_ranks, replicas, stride in groups:
        # They take turns on the links, so each has a part of the passes to hide behind.
        part_s = (passes_s[0] * parameters / held.total, passes_s[1] * parameters / held.total)
        ranks = (zero_ranks if plan.zero else replicas, replicas, stride)
        summed = _summed(plan, clock, parameters, ranks, part_s, layers)
        exposed_s, sent_bytes = exposed_s + summed.exposed_s, sent_bytes + summed.sent_bytes
    return DataExchange(exposed_s, sent_bytes)


def _summed(
    plan: ParallelPlan,
    clock: Clock,
    parameters: int,
    ranks: tuple[int, int, int],
    passes_s: tuple[float, float],
    layers: int,
) -> DataExchange:
    """Of so many parameters, over ranks: among how many ZeRO cuts or all are summed, how many there are, how far apart
    they are."""
    weight, gradient, _ = STATE_BYTES[plan.precision]
    nbytes = {"weights": weight * parameters, "gradients": gradient * parameters}
    shared, replicas, stride = ranks
    if shared == replicas == 1:
        return DataExchange(0.0, 0.0)
    axis = clock.group(shared, stride)
    exchanged = replica_exchanges(plan.zero, scatters_of(plan), gathered(plan))
    exposed_s = sent_bytes = 0.0
    for exchanges, behind_s in (
        (exchanged.forward, passes_s[0]),
        (exchanged.backward, passes_s[1]),
        (exchanged.alone, 0.0),
    ):
        for times, several in itertools.groupby(exchanges, key=lambda exchange: exchange.times):
            exchange_s = sent = 0.0
            for exchange in several:
                # One exchange per layer, so that it can hide behind the next layer's passes.
                exchange_s += layers * axis.exchange_s(exchange.collective, nbytes[exchange.what] / layers)
                sent += axis.sent_bytes(nbytes[exchange.what], exchange.collective)
            hides = axis.hides and behind_s > 0
            slowed_s = constants.HIDDEN_COST * sent / axis.within.bytes_per_s if hides else 0.0
            times *= updates_of(plan)
            exposed_s += times * (_left(exchange_s, behind_s if hides else 0.0, layers) + slowed_s)
            sent_bytes += times * sent
    if plan.zero and replicas > shared:  # what a group has summed, summed over the groups
        across, share = clock.group(replicas // shared, stride * shared), nbytes["gradients"] / shared
        exposed_s += across.exchange_s("all_reduce", share)
        sent_bytes += across.sent_bytes(share, "all_reduce")
    return DataExchange(exposed_s, sent_bytes)


def gathered(plan: ParallelPlan) -> int:
    """How often a step of ZeRO-3 makes a rank's weights whole: for every pass, or in a pipeline, where a rank keeps the
    chunks it will need next, as often as it turns to others."""
    if plan.pp == 1:
        return 2 * plan.accumulation
    if plan.chunks // plan.pp <= 1 + plan.prefetch:
        return 1
    return max(2, 2 * plan.accumulation // (plan.pp if plan.placement.name == LOOP else 1))


def _left(exchange_s: float, behind_s: float, layers: int) -> float:
    """What does not hide behind a pass: the excess, and always one layer's part, which has no computation beside it."""
    alone = exchange_s / layers
    return max(alone, exchange_s - behind_s * (layers - 1) / layers)


def host_step_s(
    measured: Mapping[str, float], model: ModelConfig, code: Code, layers: int, microbatches: int, exchanges: int = 0
) -> float:
    """Seconds of the host for a step that calls other ranks so often; 0 where its figures for this kind of layer and
    code were not measured."""
    name = f"{kind_of(model)}-{code}"
    try:
        passes_s = measured[f"{name}-passes-layer"] * layers + measured[f"{name}-passes"]
        update_s = measured[f"{name}-update-layer"] * layers + measured[f"{name}-update"]
    except KeyError:
        return 0.0
    return microbatches * passes_s + update_s + exchanges * measured.get("exchange-call", constants.EXCHANGE_HOST_S)


def kind_of(model: ModelConfig) -> str:
    """Which of the two kinds of layer that are measured this model's are most like: they launch different kernels."""
    return "llama" if model.activation == "swiglu" else "gpt"
