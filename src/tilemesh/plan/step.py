"""Step time and memory of one layout: the pieces of the cost model put together.

The one idea: a step is the slowest stage's passes, the bubble around them, what of the gradient exchange does not hide
behind them, and the optimiser. `Estimator` answers for one model on one cluster. `rank` is its quick answer for the
search, in closed form; `predict` the full one, with the pipeline's schedule simulated and the stages cut by dynamic
programming: the embedding rides on the first chunk and the head on the last, so equal layers do not make equal chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster
from tilemesh.core.plan import REPLAY_ROOM, ParallelPlan
from tilemesh.core.ranges import Range
from tilemesh.core.step import pace
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.operations import hardware_flops, model_flops
from tilemesh.model.work.task import Code
from tilemesh.model.work.weights import why_not
from tilemesh.plan import constants
from tilemesh.plan.clock import Chunks, Clock, DataExchange, data_exchange, exchanged, host_step_s
from tilemesh.plan.memory import RankMemory, Room, usable_bytes
from tilemesh.plan.prediction import Prediction, Times
from tilemesh.plan.speed import speed_of

_HEADROOM = Range(0, 1, below=True)
MOST_PASSES = 60_000
"""Pipelines beyond this (deeper than about 70 stages) are timed in closed form: simulating ten would take seconds."""
MOST_CUTS = 20_000
"""Layers times chunks beyond which stages are cut the quick way, which is as good for equal layers."""


class Frame(NamedTuple):
    """What the quick and the full answer have in common: the layers' places and the passes' times."""

    counts: tuple[int, ...]
    stages: tuple[int, ...]
    chunks: Chunks
    most_parameters: int
    """Of any rank: it exchanges and updates longest."""


def predict(
    model: ModelConfig,
    cluster: Cluster,
    plan: ParallelPlan,
    context: int | None = None,
    *,
    rates: Rates | None = None,
    code: Code | None = None,
    graph: bool = True,
    chunked_loss: bool = False,
) -> Prediction:
    """One layout, its pipeline simulated.

    `context` is the tokens of a sequence, the model's if not given; `rates` what was measured of a device of the
    cluster (`Calibration.rates`), the datasheet's if not given; `code` what runs it (`model/work/task.py`); `graph`:
    whether a step becomes a CUDA graph where it can; `chunked_loss`: whether logits exist for some rows at a time.
    """
    return Estimator(model, cluster, context, rates, code, graph, chunked_loss).predict(plan)


class Estimator:
    """The cost model for one model on one cluster; `rates`, where measured, go before the datasheet's.

    `headroom`: the fraction of a device's memory that a plan leaves free.
    """

    def __init__(
        self,
        model: ModelConfig,
        cluster: Cluster,
        context: int | None = None,
        rates: Rates | None = None,
        code: Code | None = None,
        graph: bool = True,
        chunked_loss: bool = False,
        headroom: float = constants.HEADROOM,
    ) -> None:
        _HEADROOM.check("headroom", headroom)
        self.model = model
        self.cluster = cluster
        self.rates = rates
        self.code = code
        self.graph = graph
        self.context = model.context if context is None else context
        if self.context < 1:
            raise UsageError(f"context is {self.context}: expected at least 1 token")
        if model.positions == "learned" and self.context > model.context:
            raise UsageError(
                f"context {self.context} is longer than the model's {model.context} learned positions: "
                f"add --set model.context={self.context}"
            )
        self.clock = Clock(model, cluster, self.context, rates, code)
        self.room = Room(model, cluster, self.context, code, chunked_loss)
        self.headroom = headroom
        self.usable_bytes = usable_bytes(cluster, headroom)
        self._frames: dict[tuple[object, ...], Frame] = {}
        anywhere = next(iter(cluster.device.peak_flops_per_s))  # bandwidth does not depend on the dtype
        self._stream_bytes_per_s = speed_of(cluster.device, anywhere, rates).stream_bytes_per_s

    # ---- two answers -------------------------------------------------------------------------------------------

    def fits(self, plan: ParallelPlan) -> bool:
        return self.memory(plan).total_bytes <= self.usable_bytes

    def memory(self, plan: ParallelPlan) -> RankMemory:
        return self.room.fullest(plan, self._frame(plan).counts)

    def rank_s(self, plan: ParallelPlan) -> float:
        """Step time in closed form, quickly; the layout must be possible."""
        frame = self._frame(plan)
        device_s = (
            _closed_form_s(plan, frame.chunks)
            + self._exchange(plan, frame).exposed_s
            + self._optimizer_s(plan, frame.most_parameters)
        )
        return max(device_s, self._host_s(plan, max(frame.stages)))

    def predict(self, plan: ParallelPlan) -> Prediction:
        """The full answer; UsageError for a layout that cannot exist."""
        problem = why_not(self.model, plan, self.cluster.world)
        if problem:
            raise UsageError(problem)
        frame = self._frame(plan, exact=True)
        times = self._times(plan, frame)
        peak = self.cluster.device.peak(plan.compute_dtype) * plan.world
        return Prediction(
            plan=plan,
            step_time_s=times.total_s,
            tokens=plan.batch * self.context,
            model_flops=model_flops(self.model, plan.batch, self.context),
            hardware_flops=hardware_flops(self.model, plan.batch, self.context, plan.recompute),
            peak_flops_per_s=peak,
            memory=self.room.fullest(plan, frame.counts),
            usable_bytes=self.usable_bytes,
            times=times,
            traffic=self._traffic(plan, frame),
            bubble_fraction=pace.bubble_fraction(plan.schedule, plan.pp, plan.accumulation, plan.interleave),
            chunk_layers=frame.counts,
            exchanges=exchanged(self.model, plan, self.clock.task(plan), frame.stages[0]),
        )

    def chunk_times(self, plan: ParallelPlan) -> Chunks:
        """Seconds of each chunk's passes, as `predict` simulates them."""
        return self._frame(plan, exact=True).chunks

    def busiest_layers(self, plan: ParallelPlan) -> int:
        """Layers of the stage whose passes take longest."""
        frame = self._frame(plan, exact=True)
        return frame.stages[_busiest(frame.chunks, plan.pp)[0]]

    # ---- pieces ------------------------------------------------------------------------------------------------

    def _frame(self, plan: ParallelPlan, exact: bool = False) -> Frame:
        """What depends on neither ZeRO nor how many replicas share the batch, remembered."""
        near = plan.world <= self.cluster.node.count  # whether stages lie in one node
        key = (
            plan.tp, plan.pp, plan.sequence_parallel, plan.microbatch, plan.interleave, plan.recompute,
            plan.attention, plan.precision, plan.accumulation > 1, near, exact, plan.chunk_layers,
        )  # fmt: skip
        found = self._frames.get(key)
        if found is None:
            counts = self._counts(plan, exact)
            if plan.interleave > 1:
                stages = tuple(sum(counts[stage :: plan.pp]) for stage in range(plan.pp))
            else:
                stages = counts
            chunks = self.clock.chunks(plan, counts, self._accumulate_s(plan))
            shards = self.room.shards(plan.tp)
            ends = (shards.stage(stages[s], s == 0, s == plan.pp - 1) for s in (0, plan.pp - 1))
            found = self._frames[key] = Frame(counts, stages, chunks, max(*ends, max(stages) * shards.layer))
        return found

    def _counts(self, plan: ParallelPlan, exact: bool) -> tuple[int, ...]:
        """Layers of each chunk: as the plan says, or cut here."""
        if plan.chunk_layers:
            return plan.chunk_layers
        if plan.pp == 1:
            return (self.model.layers,)
        layer = self.clock.layer(plan)
        one = layer.forward_s + layer.backward_s + layer.exchange_s + layer.exchange_back_s
        one += layer.recompute_s(plan.recompute) + self._accumulate_s(plan)
        # Tenths of a layer are as fine as a cut can use, and few enough to be remembered.
        first = round((sum(layer.embedding_s) + layer.embedding_exchange_s) / one, 1)
        last = round((sum(layer.head_s) + sum(layer.head_exchange_s)) / one, 1)
        chunks = plan.pp * plan.interleave
        if exact and self.model.layers * chunks < MOST_CUTS:
            return cut((1.0,) * self.model.layers, chunks, first, last)
        return spread(self.model.layers, chunks, first, last)

    def _accumulate_s(self, plan: ParallelPlan) -> float:
        """Adding a microbatch's gradients of a layer to those before."""
        if plan.accumulation == 1:
            return 0.0
        nbytes = constants.ACCUMULATE_BYTES[plan.precision] * self.room.shards(plan.tp).layer
        return nbytes / self._stream_bytes_per_s

    def _exchange(self, plan: ParallelPlan, frame: Frame) -> DataExchange:
        if plan.dp == 1:
            return DataExchange(0.0, 0.0)
        forward_s, backward_s = sum(frame.chunks.forward_s[:: plan.pp]), sum(frame.chunks.backward_s[:: plan.pp])
        axis = self.clock.group(plan.dp, plan.tp)
        return data_exchange(plan, axis, frame.most_parameters, forward_s, backward_s, max(frame.stages))

    def _optimizer_s(self, plan: ParallelPlan, parameters: int) -> float:
        updated = -(-parameters // plan.zero_ranks)
        rate = self._stream_bytes_per_s
        if self._is_ours_on_a_gpu(plan):
            rate *= constants.MULTI_TENSOR_FRACTION
        return updated * self.optimizer_bytes(plan) / rate

    def optimizer_bytes(self, plan: ParallelPlan) -> int:
        """Bytes that clipping and the update move for a parameter."""
        usual = constants.OPTIMIZER_BYTES[plan.precision]
        if plan.world == 1 and self._is_ours_on_a_gpu(plan):
            return constants.DIVIDED_BYTES.get(plan.precision, usual)
        return usual

    def _is_ours_on_a_gpu(self, plan: ParallelPlan) -> bool:
        return self.cluster.device.kind == "gpu" and self.clock.code(plan) != "fused"

    def replays(self, plan: ParallelPlan) -> bool:
        """Whether `tilemesh train` launches a step of this layout at once, as a CUDA graph: `train/graph.py`."""
        if plan.world > 1 or plan.precision == "fp16" or not self._is_ours_on_a_gpu(plan):
            return False
        return self.graph and self.memory(plan).total_bytes <= REPLAY_ROOM * self.cluster.device.usable_bytes

    def host_s(self, plan: ParallelPlan) -> float:
        """What the host needs to launch a step of this layout; 0 where that was not measured."""
        return self._host_s(plan, max(self._frame(plan).stages))

    def _host_s(self, plan: ParallelPlan, layers: int) -> float:
        """What the host needs to launch a step of a stage with so many layers; 0 where that was not measured."""
        if self.replays(plan):
            return 0.0
        measured = {} if self.rates is None else self.rates.host_s
        return host_step_s(measured, self.model, self.clock.code(plan), layers, plan.accumulation)

    def _times(self, plan: ParallelPlan, frame: Frame) -> Times:
        """The step's seconds by what they went to, on the busiest stage; the rest of the pipeline's is bubble."""
        layer, m, chunks = self.clock.layer(plan), plan.accumulation, frame.chunks
        if pace.simulated_passes(plan.pp, m, plan.interleave) > MOST_PASSES:
            pipe_s = _closed_form_s(plan, chunks)
        else:
            times = (chunks.forward_s, chunks.backward_s)
            pipe_s = pace.simulated_s(plan.schedule, plan.pp, m, plan.interleave, *times)
        stage, busy_s = _busiest(chunks, plan.pp)
        first, last = stage == 0, stage == plan.pp - 1
        count = frame.stages[stage]
        compute = count * (layer.forward_s + layer.backward_s + self._accumulate_s(plan))
        exchange = count * (layer.exchange_s + layer.exchange_back_s)
        again = count * layer.recompute_s(plan.recompute)
        if plan.recompute == "full":  # repeated exchanges are exchanges
            again, exchange = again - count * layer.exchange_s, exchange + count * layer.exchange_s
        if first:
            compute, exchange = compute + sum(layer.embedding_s), exchange + layer.embedding_exchange_s
        if last:
            compute, exchange = compute + sum(layer.head_s), exchange + sum(layer.head_exchange_s)
        hops = 0 if plan.pp == 1 else 2 * plan.interleave - first - last
        found = Times(
            compute_s=m * compute,
            recompute_s=m * again,
            tp_s=m * exchange,
            pp_s=m * hops * chunks.hop_s,
            bubble_s=max(0.0, pipe_s - m * busy_s),
            dp_s=self._exchange(plan, frame).exposed_s,
            optimizer_s=self._optimizer_s(plan, frame.most_parameters),
        )
        late_s = self._host_s(plan, max(frame.stages)) - found.total_s
        return dataclasses.replace(found, host_s=late_s) if late_s > 0 else found

    def _traffic(self, plan: ParallelPlan, frame: Frame) -> dict[str, float]:
        """Bytes sent by a rank in the middle of the pipeline, where both neighbours are served."""
        forward, backward = self.clock.layer(plan).exchange_bytes
        if plan.recompute == "full":
            backward += forward
        # Two stages: each chunk has one neighbour less. More: all but the ends serve two.
        hops = 0 if plan.pp == 1 else 2 * plan.interleave - (1 if plan.pp == 2 else 0)
        return {
            "tp": plan.accumulation * max(frame.stages) * (forward + backward),
            "pp": plan.accumulation * hops * self.clock.stream_bytes(plan) / plan.tp,
            "dp": self._exchange(plan, frame).sent_bytes,
        }


def _closed_form_s(plan: ParallelPlan, chunks: Chunks) -> float:
    """All microbatches through the slowest stage, and once through a chunk of each of the others."""
    both = [f + b for f, b in zip(chunks.forward_s, chunks.backward_s, strict=True)]
    if plan.interleave > 1:
        both = [sum(both[stage :: plan.pp]) for stage in range(plan.pp)]
    slowest = max(both)
    return plan.accumulation * slowest + (sum(both) - slowest) / plan.interleave


def _busiest(chunks: Chunks, stages: int) -> tuple[int, float]:
    """The stage whose passes of one microbatch take longest, and how long."""
    busy = [sum(chunks.forward_s[stage::stages]) + sum(chunks.backward_s[stage::stages]) for stage in range(stages)]
    return busy.index(max(busy)), max(busy)


# ---- where a model is cut ------------------------------------------------------------------------------------------

_REACH = 2  # how far from the even share a chunk may lie, beside what head and embedding weigh


@functools.cache
def cut(layer_costs: tuple[float, ...], chunks: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each chunk: the least possible maximum of cost, and among those the most even, by dynamic programming.

    Of equals the one with less in front, where a pipeline holds the most microbatches. `first` and `last` are what the
    first and the last chunk cost besides their layers.
    """
    layers = len(layer_costs)
    before = [0.0]
    for cost in layer_costs:
        before.append(before[-1] + cost)
    mean = before[-1] / layers
    reach = _REACH + math.ceil(max(first, last) / mean) + math.ceil((max(layer_costs) - min(layer_costs)) / mean)
    least, most = max(1, layers // chunks - reach), -(-layers // chunks) + reach
    # best[i]: (maximum, sum of squares, layers of each chunk so far) of i layers in the chunks so far.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for chunk in range(chunks):
        extra = (first if chunk == 0 else 0.0) + (last if chunk == chunks - 1 else 0.0)
        left = chunks - chunk - 1
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (top, squares, counts) in best.items():
            for end in range(start + least, min(start + most, layers - left) + 1):
                if end + left * most < layers:
                    continue
                cost = before[end] - before[start] + extra
                candidate = (max(top, cost), squares + cost * cost, (*counts, end - start))
                if end not in reached or candidate < reached[end]:
                    reached[end] = candidate
        best = reached
    return best[layers][2]


@functools.cache
def spread(layers: int, chunks: int, first: float, last: float) -> tuple[int, ...]:
    """The same for layers that all cost 1: the smallest maximum under which all find room, then filled evenly."""
    if chunks == 1:
        return (layers,)
    share = layers // chunks
    wholes = range(share, share + 3)
    for top in sorted({w + extra for w in wholes for extra in (0.0, first, last)} | {share + math.ceil(last) + 1.0}):
        room = [_fits(top, first), *([math.floor(top)] * (chunks - 2)), _fits(top, last)]
        if min(room) >= 1 and sum(room) >= layers:
            break
    else:  # a head heavier than everything else: one layer beside it, the rest shared
        room = [share + 1] * (chunks - 1) + [1]
        while sum(room) < layers:
            room[room.index(min(room[:-1]))] += 1
    excess = sum(room) - layers
    extras = [first, *([0.0] * (chunks - 2)), last]
    while excess:
        # Take from the costliest that can give one; the first of equals, so that the same question has one answer.
        giver = max((i for i in range(chunks) if room[i] > 1), key=lambda i: (room[i] + extras[i], -i))
        room[giver] -= 1
        excess -= 1
    return tuple(room)


def _fits(top: float, extra: float) -> int:
    return math.floor(top - extra + 1e-9)
