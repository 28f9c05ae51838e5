"""Step time and memory of one layout: the pieces of the cost model put together.

The one idea: a step is the slowest stage's passes, the bubble around them, what of the gradient exchange does not hide
behind them, and the optimiser. `Estimator` answers for one model on one cluster. `rank` is its quick answer for the
search, in closed form; `predict` the full one, with the pipeline's schedule simulated and its memory by liveness of the
same lists of actions (`core/step/`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from typing import NamedTuple

from tilemesh.core.calibration import Rates
from tilemesh.core.errors import UsageError
from tilemesh.core.hardware import Cluster
from tilemesh.core.plan import REPLAY_ROOM, ParallelPlan
from tilemesh.core.ranges import Range
from tilemesh.core.step import pace
from tilemesh.core.step.program import recomputed_layers
from tilemesh.core.step.schedule import RankLoad
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.exchanges import layer_exchanges
from tilemesh.model.work.operations import hardware_flops, model_flops
from tilemesh.model.work.slices import slice_shares
from tilemesh.model.work.step_exchanges import scatters_of, sent_bytes, step_exchanges
from tilemesh.model.work.task import STATE_BYTES, Code
from tilemesh.model.work.weights import RankParameters, why_not
from tilemesh.plan import constants
from tilemesh.plan.clock import Chunks, Clock, DataExchange, data_exchange, gathered, host_step_s
from tilemesh.plan.cut import spread, spread_uneven
from tilemesh.plan.memory import Room, rank_state_bytes, usable_bytes
from tilemesh.plan.offload import MovedBytes, RankPassTimes, host_rates, offload_s, on_device
from tilemesh.plan.prediction import Prediction, Times
from tilemesh.plan.speed import speed_of

_HEADROOM = Range(0, 1, below=True)
_IMBALANCE = Range(1, 1e6)
MOST_PASSES = 60_000
"""Pipelines beyond this (deeper than about 70 stages) are timed in closed form: simulating ten would take seconds."""


_ROUNDING = 1e-9
"""By how much sums of the same seconds in another order may differ."""


class Frame(NamedTuple):
    """What the quick and the full answer have in common: the layers' places and the passes' times."""

    counts: tuple[int, ...]
    """Layers of each chunk."""
    held: tuple[tuple[int, ...], ...]
    """Chunks of each rank of the pipeline."""
    ways: int
    """Directions in which microbatches pass: with two, a rank's chunks see half of them each."""
    layers: tuple[int, ...]
    """Of each rank of the pipeline."""
    dense: tuple[int, ...]
    """Of these, those without experts where others have some."""
    chunks: Chunks
    most_parameters: RankParameters
    """Of the rank with most: it exchanges and updates longest."""

    load: RankLoad
    """As `pace.closed_form_s` takes it."""

    def busy_s(self, rank: int) -> float:
        """A rank's passes for one microbatch."""
        return self.chunks.busy_s(self.held[rank]) / self.ways

    @property
    def busiest(self) -> int:
        return max(range(len(self.held)), key=self.busy_s)


class QuickTime(NamedTuple):
    """Step time in closed form, and what it is the sum of beside the passes."""

    step_s: float
    frame: Frame
    others_s: tuple[float, float, float]
    """Exchange over replicas, optimizer, moving to the host and back."""
    host_s: float
    """A step takes no less."""


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
    imbalance: float = 0.0,
) -> Prediction:
    """One layout, its pipeline simulated.

    `context` is the tokens of a sequence, the model's if not given; `rates` what was measured of a device of the
    cluster (`Calibration.rates`), the datasheet's if not given; `code` what runs it (`model/work/task.py`); `graph`:
    whether a step becomes a CUDA graph where it can; `chunked_loss`: whether logits exist for some rows at a time;
    `imbalance`: rows that come to the busiest of ranks that share out experts over the mean, expected if 0.
    """
    return Estimator(model, cluster, context, rates, code, graph, chunked_loss, imbalance=imbalance).predict(plan)


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
        imbalance: float = 0.0,
        beside: int = 0,
    ) -> None:
        _HEADROOM.check("headroom", headroom)
        if imbalance:
            _IMBALANCE.check("imbalance", imbalance)
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
        self.imbalance = imbalance
        self.clock = Clock(model, cluster, self.context, rates, code, imbalance)
        self.room = Room(model, cluster, self.context, code, chunked_loss, imbalance, beside)
        self.headroom = headroom
        self.usable_bytes = usable_bytes(cluster, headroom)
        self._frames: dict[tuple[object, ...], Frame] = {}
        self._costs: dict[tuple[object, ...], tuple[float, float, float]] = {}
        """In layers with experts: what comes before the first layer, what after the last, and a dense one."""
        anywhere = next(iter(cluster.device.peak_flops_per_s))  # bandwidth does not depend on the dtype
        self._stream_bytes_per_s = speed_of(cluster.device, anywhere, rates).stream_bytes_per_s

    # ---- two answers -------------------------------------------------------------------------------------------

    def fits(self, plan: ParallelPlan) -> bool:
        return self.total_bytes(plan, self.usable_bytes) <= self.usable_bytes

    def total_bytes(self, plan: ParallelPlan, limit: float = math.inf) -> int:
        """Of the fullest rank; beyond `limit` perhaps less, but beyond it too, and quicker."""
        return self.room.total_bytes(plan, self._counts(plan), limit)

    def rank(self, plan: ParallelPlan) -> QuickTime:
        """Step time in closed form, quickly; the layout must be possible."""
        frame = self._frame(plan)
        others_s = (
            self._exchange(plan, frame).exposed_s,
            self._optimizer_s(plan, frame.most_parameters),
            self._offload_s(plan, frame),
        )
        host_s = self._host_s(plan, max(frame.layers))
        return QuickTime(_step_s(_closed_form_s(plan, frame), others_s, host_s), frame, others_s, host_s)

    def least_s(self, plan: ParallelPlan, quick: QuickTime) -> float:
        """What the layout's step is no shorter than, quickly."""
        pipe_s = self._least_pipe_s(plan, quick.frame)
        return _step_s(pipe_s, quick.others_s, quick.host_s) * (1 - _ROUNDING)

    def step_s(self, plan: ParallelPlan) -> float:
        """Step time with the pipeline simulated: that of `predict`."""
        frame = self._frame(plan)
        return self._times(plan, frame).total_s

    def predict(self, plan: ParallelPlan) -> Prediction:
        """The full answer; UsageError for a layout that cannot exist. Where the plan does not say how its layers are
        cut into chunks, they are cut as even in time as they can be (`Prediction.settled_plan`)."""
        problem = why_not(self.model, plan, self.cluster.world)
        if problem:
            raise UsageError(problem)
        frame = self._frame(plan)
        times = self._times(plan, frame)
        repeated = recomputed_layers(plan, frame.counts) / self.model.layers
        peak = self.cluster.device.peak(plan.peak_dtype) * plan.world
        return Prediction(
            plan=plan,
            step_time_s=times.total_s,
            tokens=plan.batch * self.context,
            model_flops=model_flops(self.model, plan.batch, self.context),
            hardware_flops=hardware_flops(self.model, plan.batch, self.context, plan.repeated, repeated),
            peak_flops_per_s=peak,
            memory=self.room.fullest(plan, frame.counts),
            usable_bytes=self.usable_bytes,
            times=times,
            traffic=self._traffic(plan, frame),
            bubble_fraction=pace.bubble_fraction(plan.schedule, plan.pp, plan.accumulation, plan.interleave),
            chunk_layers=frame.counts,
            exchanges=step_exchanges(self.model, plan, self.room.task(plan), frame.counts),
            passes=self._step_times(plan, frame) if plan.pp > 1 else None,
            kept=self.room.step_bytes(plan, frame.counts) if plan.pp > 1 else None,
        )

    def chunk_times(self, plan: ParallelPlan) -> Chunks:
        """Seconds of each chunk's passes and of a message."""
        return self._frame(plan).chunks

    def step_times(self, plan: ParallelPlan) -> StepTimes:
        """Seconds of a step's passes, as `predict` simulates them."""
        return self._step_times(plan, self._frame(plan))

    def _step_times(self, plan: ParallelPlan, frame: Frame) -> StepTimes:
        times = frame.chunks.step_times
        if plan.slices == 1:
            return times
        shares = slice_shares(self.model, plan.pp, plan.slices, self.context)
        return dataclasses.replace(times, slice_shares=shares)

    def busiest_stage(self, plan: ParallelPlan) -> int:
        """The one whose passes take longest."""
        return self._frame(plan).busiest

    def busiest_layers(self, plan: ParallelPlan) -> tuple[int, int]:
        """Layers of that stage, and how many of them are dense."""
        frame, stage = self._frame(plan), self.busiest_stage(plan)
        return frame.layers[stage], frame.dense[stage]

    # ---- pieces ------------------------------------------------------------------------------------------------

    def _frame(self, plan: ParallelPlan) -> Frame:
        """What depends on neither ZeRO nor how many replicas share the batch, remembered."""
        near = plan.world <= self.cluster.node.count  # whether stages lie in one node
        placement = plan.placement
        splits = plan.pipeline.is_split
        key = (
            plan.tp, plan.pp, plan.sequence_parallel, plan.microbatch, placement, splits,
            plan.recompute, plan.recompute_stages, plan.attention, plan.precision, plan.accumulation > 1, near,
            plan.chunk_layers, self.clock.is_by_layers(plan), plan.cp, plan.cp_exchange, plan.ep, plan.expert_tp,
            plan.fp8_scales,
        )  # fmt: skip
        frame = self._frames.get(key)
        if frame is None:
            counts = self._counts(plan)
            chunks = self.clock.chunks(plan, counts, functools.partial(self._accumulate_s, plan))
            held = placement.held if plan.pp > 1 else ((0,),)
            layers, dense = (
                tuple(sum(each[chunk] for chunk in mine) for mine in held)
                for each in (counts, self.model.dense_of(counts))
            )
            shards, last = self.room.shards(plan), len(counts) - 1
            ranks = (
                shards.held(count, 0 in mine, last in mine, without)
                for count, without, mine in zip(layers, dense, held, strict=True)
            )
            most = max(ranks, key=lambda rank: rank.total)
            ways = len(placement.directions) if plan.pp > 1 else 1
            load = RankLoad.of(held, chunks.step_times, ways)
            frame = self._frames[key] = Frame(counts, held, ways, layers, dense, chunks, most, load)
        return frame

    def _counts(self, plan: ParallelPlan) -> tuple[int, ...]:
        """Layers of each chunk: as the plan says, or as even in time as can be."""
        if plan.chunk_layers:
            return plan.chunk_layers
        if plan.pp == 1:
            return (self.model.layers,)
        key = (
            plan.tp, plan.sequence_parallel, plan.microbatch, plan.recompute, plan.attention, plan.precision,
            plan.accumulation > 1, self.clock.is_by_layers(plan), plan.cp, plan.cp_exchange, plan.ep, plan.expert_tp,
            plan.fp8_scales,
        )  # fmt: skip
        costs = self._costs.get(key)
        if costs is None:
            layer, layer_s, dense_s = self.clock.layers(plan), self._layer_s(plan), self._layer_s(plan, 1)
            # Tenths of a layer are as fine as a cut can use, and few enough to be remembered.
            first = round((sum(layer.embedding_s) + layer.embedding_exchange_s) / layer_s, 1)
            last = round((sum(layer.head_s) + sum(layer.head_exchange_s)) / layer_s, 1)
            costs = self._costs[key] = (first, last, round(dense_s / layer_s, 1))
        first, last, dense = costs
        if not self.model.dense_layers:
            return spread(self.model.layers, plan.chunks, first, last)
        each = [dense if layer in self.model.dense_layers else 1.0 for layer in range(self.model.layers)]
        return spread_uneven((first + each[0], *each[1:-1], each[-1] + last), plan.chunks)

    def _layer_s(self, plan: ParallelPlan, dense: int = 0) -> float:
        """All passes of a microbatch through a layer, or through a dense one."""
        layer = self.clock.layers(plan, 1, dense)
        passes_s = layer.forward_s + layer.backward_s + layer.exchange_s + layer.exchange_back_s()
        return passes_s + layer.recompute_s(plan.repeated) + self._accumulate_s(plan, 1, dense)

    def _accumulate_s(self, plan: ParallelPlan, layers: int, dense: int) -> float:
        """Adding a microbatch's gradients of so many layers to those before."""
        if plan.accumulation == 1:
            return 0.0
        nbytes = constants.ACCUMULATE_BYTES[plan.precision] * self.room.shards(plan).stage(layers, False, False, dense)
        return nbytes / self._stream_bytes_per_s

    def _exchange(self, plan: ParallelPlan, frame: Frame) -> DataExchange:
        """Over replicas, and between stages that hold the same weights: the two of a chunk where microbatches pass in
        two directions, and those of both ends where the table is tied."""
        exchanged = DataExchange(0.0, 0.0)
        if plan.replicas > 1:
            chunks, mine = frame.chunks, frame.held[0]
            passes_s = (
                sum(chunks.forward_s[chunk] for chunk in mine) / frame.ways,
                sum(chunks.input_s[chunk] + chunks.weight_s[chunk] for chunk in mine) / frame.ways,
            )
            exchanged = data_exchange(plan, self.clock, frame.most_parameters, passes_s, max(frame.layers))
        shared = frame.most_parameters.stored(plan) if frame.ways > 1 else 0
        if not shared and plan.pp > 1 and len(frame.counts) - 1 not in frame.held[0]:
            shared = -(-self.room.shards(plan).tied_head // plan.zero_ranks)
        if shared:
            nbytes = STATE_BYTES[plan.precision][1] * shared
            pair = self.clock.group(2, plan.tp * plan.replicas)
            exposed_s = exchanged.exposed_s + pair.exchange_s("all_reduce", nbytes)
            exchanged = DataExchange(exposed_s, exchanged.sent_bytes + pair.sent_bytes(nbytes, "all_reduce"))
        return exchanged

    def data_exchange(self, plan: ParallelPlan) -> DataExchange:
        """Of a step's gradients, over replicas and what they are made of."""
        return self._exchange(plan, self._frame(plan))

    def updated_parameters(self, plan: ParallelPlan) -> int:
        """Of the rank that updates most."""
        return self._frame(plan).most_parameters.stored(plan)

    def _optimizer_s(self, plan: ParallelPlan, parameters: RankParameters) -> float:
        updated = parameters.stored(plan)
        rate = self._stream_bytes_per_s
        if self._is_ours_on_a_gpu(plan):
            rate *= constants.MULTI_TENSOR_FRACTION
        return updated * self.optimizer_bytes(plan) / rate

    def _offload_s(self, plan: ParallelPlan, frame: Frame) -> float:
        if not plan.offload:
            return 0.0
        weights, _, optimizer = rank_state_bytes(plan, frame.most_parameters)
        chunks, rank = frame.chunks, frame.busiest
        own = plan.on_stage(rank)
        dense = self.model.dense_of(frame.counts)
        kept = sum(self.room.chunk(own, frame.counts[chunk], dense[chunk])[0] for chunk in frame.held[rank])
        forward_s = sum(chunks.forward_s[chunk] for chunk in frame.held[rank])
        backward_s = chunks.busy_s(frame.held[rank]) - forward_s
        away = 1.0 - on_device(plan, frame.layers[rank])
        times = RankPassTimes(forward_s, backward_s, self._optimizer_s(plan, frame.most_parameters))
        if self.cluster.device.kind == "cpu":
            optimizer, times = 0, RankPassTimes(0.0, 0.0, 0.0)
        moved = MovedBytes(optimizer, int(kept * away), int(weights * away))
        return offload_s(plan, host_rates(self.cluster.device, self.rates), moved, times)

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
        return self.graph and self.total_bytes(plan) <= REPLAY_ROOM * self.cluster.device.usable_bytes

    def host_s(self, plan: ParallelPlan) -> float:
        """What the host needs to launch a step of this layout; 0 where that was not measured."""
        return self._host_s(plan, max(self._frame(plan).layers))

    def _host_s(self, plan: ParallelPlan, layers: int) -> float:
        """What the host needs to launch a step of a stage with so many layers; 0 where that was not measured."""
        if self.replays(plan):
            return 0.0
        measured = {} if self.rates is None else self.rates.host_s
        if not measured:
            return 0.0
        calls = plan.accumulation * sum(1 for _ in layer_exchanges(self.model, self.clock.task(plan)))
        calls += (gathered(plan) + scatters_of(plan)) * (plan.zero == 3)
        return host_step_s(measured, self.model, self.clock.code(plan), layers, plan.accumulation, layers * calls)

    def _times(self, plan: ParallelPlan, frame: Frame) -> Times:
        """The step's seconds by what they went to, on the busiest rank; the rest of the pipeline's is bubble."""
        chunks, rank = frame.chunks, frame.busiest
        mine = (frame.layers[rank], frame.dense[rank])
        layers, m = self.clock.layers(plan, *mine), plan.accumulation / frame.ways
        pipe_s = self._pipe_s(plan, frame)
        first, last = 0 in frame.held[rank], len(frame.counts) - 1 in frame.held[rank]
        splits = plan.pp > 1 and plan.pipeline.is_split
        compute = layers.forward_s + layers.backward_s + self._accumulate_s(plan, *mine)
        own = plan.on_stage(rank)
        again = layers.recompute_s(own.repeated)
        exchange = dict.fromkeys(("tp", "cp", "ep"), 0.0)
        for name, axis in layers.axes.items():
            exchange[name] = axis.forward_s + (axis.split_s if splits else axis.back_s)
            if own.repeats_exchanges:  # repeated exchanges are exchanges
                again, exchange[name] = again - axis.again_s, exchange[name] + axis.again_s
        if first:
            compute, exchange["tp"] = compute + sum(layers.embedding_s), exchange["tp"] + layers.embedding_exchange_s
        if last:
            compute, exchange["tp"] = compute + sum(layers.head_s), exchange["tp"] + sum(layers.head_exchange_s)
        hops = 2 * len(frame.held[rank]) - first - last if plan.pp > 1 and chunks.sender_waits else 0
        times = Times(
            compute_s=m * compute,
            recompute_s=m * again,
            tp_s=m * exchange["tp"],
            cp_s=m * exchange["cp"],
            ep_s=m * exchange["ep"],
            pp_s=m * hops * chunks.hop_s,
            bubble_s=max(0.0, pipe_s - plan.accumulation * frame.busy_s(rank)),
            dp_s=self._exchange(plan, frame).exposed_s,
            optimizer_s=self._optimizer_s(plan, frame.most_parameters),
            offload_s=self._offload_s(plan, frame),
        )
        late_s = self._host_s(plan, max(frame.layers)) - times.total_s
        return dataclasses.replace(times, host_s=late_s) if late_s > 0 else times

    def _pipe_s(self, plan: ParallelPlan, frame: Frame) -> float:
        """All passes of a step: simulated, but for pipelines that would take seconds to simulate.

        Where ranks take turns on a core, passes are as long as while all ranks compute. A stage that waits leaves its
        core to the others, so a step takes as long as all stages compute on their share of the cores, or as the
        schedule takes with a core for every rank, whichever is more; a little longer where for a moment fewer ranks
        compute than there are cores.
        """
        turns = self.cluster.device.ranks_per_core
        if not self._is_simulated(plan, frame):
            pipe_s = _closed_form_s(plan, frame)
        elif plan.slices > 1:
            pipe_s = simulate(plan.pipeline.build(plan.pipe_shape), self._step_times(plan, frame)).total_s
        else:
            shape = (plan.schedule, plan.pp, plan.accumulation, plan.interleave)
            pipe_s = pace.simulated_s(*shape, frame.chunks.step_times)
        if plan.pp == 1 or turns == 1.0:
            return pipe_s
        busy_s = plan.accumulation * statistics.fmean(frame.busy_s(rank) for rank in range(plan.pp))
        return max(pipe_s / turns, busy_s)

    def _is_simulated(self, plan: ParallelPlan, frame: Frame) -> bool:
        passes = pace.simulated_passes(plan.pp, plan.accumulation, len(frame.held[0])) * plan.slices
        return plan.pp > 1 and passes <= MOST_PASSES

    def _least_pipe_s(self, plan: ParallelPlan, frame: Frame) -> float:
        """What `_pipe_s` is no less than."""
        if not self._is_simulated(plan, frame):
            return self._pipe_s(plan, frame)
        busy_s = [plan.accumulation * frame.busy_s(rank) for rank in range(plan.pp)]
        pipe_s, turns = max(busy_s), self.cluster.device.ranks_per_core
        if plan.slices == 1:
            shape = (plan.schedule, plan.pp, plan.accumulation, plan.interleave)
            pipe_s = max(pipe_s, pace.least_s(*shape, frame.chunks.step_times))
        return pipe_s if turns == 1.0 else max(pipe_s / turns, statistics.fmean(busy_s))

    def _traffic(self, plan: ParallelPlan, frame: Frame) -> dict[str, float]:
        """Bytes sent by a rank in the middle of the pipeline, where both neighbours are served."""
        most = max(zip(frame.layers, frame.dense, strict=True), key=lambda layers: layers[0] - layers[1])
        times = plan.accumulation / frame.ways
        layers = {
            name: times * (axis.nbytes[0] + axis.nbytes[1] + axis.nbytes[2] * plan.repeats_exchanges)
            for name, axis in self.clock.layers(plan, *most).axes.items()
        }
        # Two stages: each chunk has one neighbour less. More: all but the ends serve two.
        hops = 0 if plan.pp == 1 else (2 * len(frame.held[0]) - (1 if plan.pp == 2 else 0)) / frame.ways
        return {
            **layers,
            "pp": plan.accumulation * hops * sent_bytes(self.model, self.clock.task(plan)),
            "dp": self._exchange(plan, frame).sent_bytes,
        }


def _step_s(pipe_s: float, others_s: tuple[float, float, float], host_s: float) -> float:
    """All passes, and what comes before and after them."""
    exchange_s, optimizer_s, offload_s = others_s
    return max(pipe_s + exchange_s + optimizer_s + offload_s, host_s)


def _closed_form_s(plan: ParallelPlan, frame: Frame) -> float:
    """All microbatches through the slowest stage, and the schedule's bubble."""
    if plan.pp == 1:
        return plan.accumulation * frame.busy_s(0)
    shape = (plan.schedule, plan.pp, plan.accumulation, plan.interleave)
    return pace.closed_form_s(*shape, frame.load)
