"""Bytes the fullest rank of a layout needs, by what they are for: states (with ZeRO), activations, and the rest.

What a layer keeps is counted in `model/work/kept.py`; a stage holds that of so many layers at once.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from tilemesh.core.hardware import Cluster, Device
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step import pace
from tilemesh.core.step.action import StepProgram
from tilemesh.core.step.memory import StepBytes, away_peaks, memory_peaks
from tilemesh.core.step.passes import offload
from tilemesh.core.step.placement import LOOP, TWO_WAYS, ChunkPlacement
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.routing import hidden_elements, imbalance
from tilemesh.model.work.task import AUTOCAST, STATE_BYTES, Code, Task, default_code, is_by_layers
from tilemesh.model.work.weights import RankParameters, Shards, shard_parameters
from tilemesh.plan import constants
from tilemesh.plan.microbatch import MicrobatchBytes
from tilemesh.plan.offload import on_device, optimizer_on_device


@dataclass(frozen=True)
class RankMemory:
    """Peak of one rank, in bytes."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Kept by the layers in flight."""
    logits_bytes: int
    """Logits and what the loss keeps, on the last stage."""
    working_bytes: int
    """The layer being recomputed, weights gathered by ZeRO-3, 16-bit copies of autocast."""
    reserved_bytes: int
    """The device's context, the libraries' buffers, and blocks that torch's allocator keeps of tensors that are gone:
    what a process takes of a device beyond its tensors."""
    later_bytes: int = 0
    """Of the gradients, what is not there yet at the fullest moment, the loss: taken off the sum."""

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.logits_bytes
            + self.working_bytes
            + self.reserved_bytes
            - self.later_bytes
        )

    def seen_bytes(self, kind: str) -> int:
        """What a run can measure of it: on a GPU what torch allocates, which the context and the libraries are not; on
        a CPU all that the process grows by."""
        return self.total_bytes - (self.reserved_bytes if kind == "gpu" else 0)

    @property
    def dominant(self) -> str:
        """The name of the largest term, without its unit."""
        added = (field.name for field in fields(self) if field.name != "later_bytes")
        return max(added, key=lambda name: getattr(self, name)).removesuffix("_bytes")


# ---- states ----------------------------------------------------------------------------------------------------


def state_bytes(parameters: int, precision: str, zero: int = 0, dp: int = 1) -> tuple[int, int, int]:
    """Weights, gradients and optimiser of one rank that holds so many parameters; ZeRO shards over dp.

    With 2 + 2 + 12 bytes and M parameters: 16M, 4M + 12M/N, 2M + 14M/N, 16M/N (Rajbhandari et al. 2020).
    """
    weights, gradients, optimizer = STATE_BYTES[precision]
    shard = -(-parameters // dp)
    return (
        weights * (shard if zero >= 3 else parameters),
        gradients * (shard if zero >= 2 else parameters),
        optimizer * (shard if zero >= 1 else parameters),
    )


def rank_state_bytes(plan: ParallelPlan, held: RankParameters) -> tuple[int, int, int]:
    """The same of a rank of a layout: of experts that replicas share out, ZeRO cuts over what is left of these."""
    weights, gradients, optimizer = STATE_BYTES[plan.precision]
    stored, every = held.stored(plan), held.total
    return (
        weights * (stored if plan.zero >= 3 else every),
        gradients * (stored if plan.zero >= 2 else every),
        optimizer * (stored if plan.zero >= 1 else every),
    )


# ---- what lives for moments --------------------------------------------------------------------------------------


def backward_bytes(model: ModelConfig, task: Task) -> int:
    """Gradients alive at once where torch goes back through an MLP, operation by operation: of the product, of each of
    its factors, and of what goes into the activation."""
    return 2 * model.mlp_inputs * hidden_elements(model, task) // task.tp * task.size


def visiting_bytes(model: ModelConfig, task: Task) -> int:
    """Of attention where ranks share sequences, backward: keys and values here and on their way, and the same of their
    gradients, beside this rank's own; gathered, those of all ranks and their gradients, as attention takes and as the
    exchange sends them; by heads, what came and what goes back."""
    kv = 2 * task.tokens * max(1, model.kv_heads // task.tp) * model.head_width
    if task.cp_exchange == "gather":
        return kv * task.cp * (task.size + 2 * task.wide)
    by_heads = 2 * (kv + task.tokens * model.query_width // task.tp) * task.size
    ring = kv * (2 * task.size + 3 * task.wide)
    near = task.sharing_heads(model)
    return by_heads * (near > 1) + ring * (near < task.cp)


def reserved_bytes(device: Device, ranks: int, compiler: bool, stages: int = 1) -> int:
    """What a process takes beside its tensors; `compiler`: whether torch's is loaded."""
    known, (beside, between, _) = constants.RESERVED_BYTES, constants.BESIDE[device.heap]
    if device.kind != "cpu":
        return known[device.kind]
    others = (beside + between * (stages > 1)) * (ranks > 1)
    return known[device.heap or "cpu"] + others + known["compiler"] * compiler


def slack_share(device: Device, ranks: int) -> float:
    """Of what a pass has, what the allocator of a CPU holds more beside other ranks."""
    return constants.BESIDE[device.heap][2] if device.kind == "cpu" and ranks > 1 else 0.0


def kv_cache_bytes(model: ModelConfig, context: int, element_bytes: int = 2) -> int:
    """Keys and values of one whole sequence, all layers: what serving keeps of it."""
    return 2 * model.layers * model.kv_width * context * element_bytes


# ---- a layout ----------------------------------------------------------------------------------------------------


def usable_bytes(cluster: Cluster, headroom: float = constants.HEADROOM) -> int:
    """What a plan may use of a device."""
    return int(cluster.device.usable_bytes * (1 - headroom))


class _RankNeeds(NamedTuple):
    """What one rank of a pipeline needs, whatever ZeRO cuts."""

    parameters: RankParameters
    activations: int
    logits: int
    brief: int
    """Recomputed layers, cast copies, gradients within a layer."""
    layers: int
    at_work: tuple[int, ...]
    """Parameters of the chunks whose weights ZeRO-3 holds whole at once, the one at work first."""
    reserved: int
    copies: int = 1
    """Of the weights: versions of an asynchronous pipeline."""


def _left_on_device(
    plan: ParallelPlan, rank: _RankNeeds, weights: int, optimizer: int, is_counted: bool = False
) -> tuple[_RankNeeds, int, int]:
    """What is left at the fullest moment where some of it lies in the host's memory.

    Weights have come back when activations are gone, and states come, part by part, only then. `is_counted`: the
    activations are those of the step's list, which says what is moved.
    """
    share = on_device(plan, rank.layers)
    if "activations" in plan.offloads and not is_counted:
        rank = rank._replace(activations=int(rank.activations * share))
    passing = rank.activations + rank.logits
    if "weights" in plan.offloads:
        weights = max(int(weights * share), weights - passing)
    if "optimizer" in plan.offloads:
        optimizer = max(0, optimizer_on_device(optimizer, STATE_BYTES[plan.precision][2] * rank.at_work[0]) - passing)
    return rank, weights, optimizer


def _in_one_memory(
    plan: ParallelPlan, rank: _RankNeeds, weights: int, is_counted: bool = False
) -> tuple[_RankNeeds, int]:
    """What a CPU holds at the fullest moment, where what is moved lies in the same memory.

    Optimizer states do not move. Activations that come back have two copies for a moment. Of the weights a copy stays
    on the host: beside the layers at work when activations are most, and beside all of them at the end of a step.
    """
    share = on_device(plan, rank.layers)
    if "activations" in plan.offloads and not is_counted:
        twice = max(0.0, share - 1 / max(1, rank.layers))  # the last layer's do not leave
        rank = rank._replace(activations=int(rank.activations * (1 + twice)))
    if "weights" in plan.offloads:
        weights = max(int(weights * (1 + share)), 2 * weights - rank.activations - rank.logits)
    return rank, weights


def _each_rank(plan: ParallelPlan) -> tuple[tuple[int, ...], ...]:
    """All ranks of a pipeline, each a group of its own."""
    return tuple((rank,) for rank in range(plan.pp))


class Room:
    """Memory of layouts of one model; remembers what they share."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: Cluster,
        context: int,
        code: Code | None = None,
        chunked_loss: bool = False,
        imbalance: float = 0.0,
        beside: int = 0,
    ) -> None:
        """`beside`: ranks of the same job that have other models."""
        self.model = model
        self._device = cluster.device
        self._is_one_memory = cluster.device.kind == "cpu"
        """Whether the host's memory is the device's: what is moved there stays."""
        self._code, self._imbalance = code, imbalance
        self._chunked_loss = chunked_loss and not model.logit_cap
        self.context = context
        self._world = cluster.world + beside
        self._slack = slack_share(self._device, self._world)
        self._ranks: dict[tuple[object, ...], list[_RankNeeds]] = {}
        self._peaks: dict[tuple[object, ...], list[int]] = {}
        self._looked: dict[tuple[ChunkPlacement, tuple[int, ...], bool], tuple[tuple[int, ...], ...]] = {}
        self._microbatches: dict[tuple[object, ...], MicrobatchBytes] = {}
        self._shards: dict[tuple[int, int, int], Shards] = {}

    def shards(self, plan: ParallelPlan) -> Shards:
        key = (plan.tp, plan.ep, plan.expert_tp)
        if key not in self._shards:
            self._shards[key] = shard_parameters(self.model, *key)
        return self._shards[key]

    def fullest(self, plan: ParallelPlan, counts: tuple[int, ...]) -> RankMemory:
        """Memory of the fullest rank, with so many layers in each chunk."""
        ranks = tuple(rank for group in self._worth_a_look(plan, counts) for rank in group)
        return max(self.stages(plan, counts, ranks), key=lambda stage: stage.total_bytes)

    def stages(
        self, plan: ParallelPlan, counts: tuple[int, ...], ranks: tuple[int, ...] | None = None
    ) -> list[RankMemory]:
        """Memory of these ranks of the pipeline, or of all: activations by liveness of the step's actions."""
        each = _each_rank(plan) if ranks is None else tuple((rank,) for rank in ranks)
        rests, peaks = self._rests(plan, counts, each), self._peaks_beside(plan, counts, each)
        full = [needs._replace(activations=peak) for needs, peak in zip(rests, peaks, strict=True)]
        return [RankMemory(*self._parts(plan, needs)) for needs in full]

    def total_bytes(self, plan: ParallelPlan, counts: tuple[int, ...], limit: float = math.inf) -> int:
        """Of the fullest rank. Beyond `limit` it may be less, but is beyond it too, and quicker.

        Activations only add to the rest, those of one microbatch at least. Where the host holds some of that, they take
        at most the room of what has left by then: where weights and optimizer states have, weights alone are sure to be
        there at some moment.
        """
        if self._begins_empty(plan):  # gradients come as activations go
            return self.fullest(plan, counts).total_bytes
        sure = self._sure_bytes(plan)
        if not plan.offload and not self.model.dense_layers:  # at a glance: some rank has so many layers, with states
            layers = -(-self.model.layers // plan.pp)
            least = sum(rank_state_bytes(plan, self.shards(plan).held(layers, False, False))) + layers * sure
            if least > limit:
                return least
        groups = self._worth_a_look(plan, counts)
        rests = self._rests(plan, counts, groups)
        both = "optimizer" in plan.offload and "weights" in plan.offload
        bare = [self._parts(plan, needs) for needs in rests]
        nbytes = [sum(parts) - (parts[2] if both else 0) for parts in bare]  # nothing is later where ranks are several
        least = max([rest + needs.layers * sure for rest, needs in zip(nbytes, rests, strict=True)])
        if least > limit:
            return least
        if plan.offload:
            return self.fullest(plan, counts).total_bytes
        peaks = self._peaks_beside(plan, counts, groups)
        slack = self._slack_of(plan)
        return max([rest + peak + int(slack * peak) for rest, peak in zip(nbytes, peaks, strict=True)])

    def _sure_bytes(self, plan: ParallelPlan) -> int:
        """What every layer of a rank keeps of a microbatch when its backward pass begins there: in one direction all of
        the rank's chunks have seen it. 0 where layers keep different amounts."""
        if plan.offload or plan.recompute_stages or plan.recompute_every != 1 or plan.slices > 1:
            return 0
        return min(kept for kept, _ in self.layers(plan)) if len(plan.placement.directions) == 1 else 0

    def _peaks_beside(
        self, plan: ParallelPlan, counts: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
    ) -> list[int]:
        """The most activations that a rank of each group holds, beside the microbatch whose loss is in the logits."""
        key = (
            plan.schedule, plan.pp, plan.accumulation, plan.interleave, plan.slices, self.microbatch(plan),
            plan.recompute, plan.recompute_every, plan.recompute_stages, plan.prefetch, plan.offload, counts, groups,
        )  # fmt: skip
        peaks = self._peaks.get(key)
        if peaks is None:
            own = self.microbatch(plan).loss_kept if plan.pp > 1 else 0
            peaks = [
                peak - (own if needs.logits else 0)
                for needs, peak in zip(
                    self._rests(plan, counts, groups), self.activation_peaks(plan, counts, groups), strict=True
                )
            ]
            self._peaks[key] = peaks
        return peaks

    def _rests(
        self, plan: ParallelPlan, counts: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
    ) -> list[_RankNeeds]:
        """What the ranks of each group need beside their activations."""
        versions = (plan.schedule, plan.accumulation) if plan.is_asynchronous else None
        key = (
            plan.placement, plan.pp, self.microbatch(plan), plan.recompute, plan.recompute_every,
            plan.recompute_stages, plan.prefetch, counts, groups, versions,
        )  # fmt: skip
        rest = self._ranks.get(key)
        if rest is None:
            rest = self._ranks[key] = [self._rank(plan, group[0], counts) for group in groups]
        return rest

    def _parts(self, plan: ParallelPlan, needs: _RankNeeds) -> tuple[int, ...]:
        """The fields of a `RankMemory`."""
        weights, gradients, optimizer = rank_state_bytes(plan, needs.parameters)
        weights *= needs.copies
        if plan.offload and self._is_one_memory:
            needs, weights = _in_one_memory(plan, needs, weights, plan.pp > 1)
        elif plan.offload:
            needs, weights, optimizer = _left_on_device(plan, needs, weights, optimizer, plan.pp > 1)
        working = needs.brief + self._zero_bytes(plan, needs)
        later = self._later_bytes(plan, needs)
        slack = self._slack_of(plan)
        reserved = needs.reserved + int(slack * needs.activations) + int(slack * (needs.logits + working))
        return weights, gradients, optimizer, needs.activations, needs.logits, working, reserved, later

    def _slack_of(self, plan: ParallelPlan) -> float:
        """Of what a pass has, what the allocator holds more: glibc of a pass as it is before tp cuts it."""
        if not self._slack or not self._device.heap or plan.tp == 1:
            return self._slack
        uncut = replace(plan, tp=1, sequence_parallel=False, expert_tp=0)
        cut_bytes, uncut_bytes = (max(kept for kept, _ in self.layers(each)) for each in (plan, uncut))
        return self._slack * uncut_bytes / cut_bytes

    def _zero_bytes(self, plan: ParallelPlan, rank: _RankNeeds) -> int:
        """What ZeRO holds beside a rank's states: whole for moments the weights of the chunk at work and of those
        fetched ahead, and the gradients of the largest before they are scattered, which a loss by rows has made itself;
        at level 1, in our code, a sum of its own rows beside the gradients."""
        weights, gradients, _ = STATE_BYTES[plan.precision]
        if plan.zero == 1:
            return gradients * rank.parameters.stored(plan) if self.code(plan) != "fused" else 0
        gathered = weights * sum(rank.at_work) if plan.zero == 3 else 0
        is_made = self.microbatch(plan).task.chunked_loss and rank.logits > 0
        return gathered + (gradients * max(rank.at_work) if plan.zero >= 2 and not is_made else 0)

    def step_bytes(self, plan: ParallelPlan, counts: tuple[int, ...]) -> StepBytes:
        """What the actions of a step make and give back, by chunk: activations, until I and from there to W."""
        owners = plan.placement.directions[0] if plan.pp > 1 else (0,) * len(counts)
        stages = {stage: plan.on_stage(stage) if plan.recompute_stages else plan for stage in {*owners}}
        owners = owners if plan.recompute_stages else (0,) * len(counts)
        owned = list(zip(owners, counts, self.model.dense_of(counts), strict=True))
        sizes = {(stage, *layers): self.chunk(stages[stage], *layers) for stage, *layers in {*owned}}
        kept, late = zip(*[sizes[key] for key in owned], strict=True)
        first, other = self.microbatch(plan).beside_layers
        beside = [first] + [other] * (len(counts) - 1)
        beside[-1] += self.microbatch(plan).loss_kept
        return StepBytes(kept=[layers + more for layers, more in zip(kept, beside, strict=True)], kept_for_weights=late)

    def activation_peaks(
        self, plan: ParallelPlan, counts: tuple[int, ...], groups: tuple[tuple[int, ...], ...] | None = None
    ) -> list[int]:
        """The most activations that a rank of each group holds between two actions of a pipeline; on a CPU with those
        moved. The ranks of a group have chunks of the same layers; if not given, each rank is one."""
        groups = _each_rank(plan) if groups is None else groups
        if plan.pp == 1:
            return [self.chunk(plan, counts[0], *self.model.dense_of(counts))[0] for _ in groups]
        sizes = self.step_bytes(plan, counts)
        if "activations" in plan.offloads:
            program = offload(self.program(plan), ahead=plan.prefetch)
            peaks = memory_peaks(program, sizes)
            if self._is_one_memory:  # and one chunk's twice, while it comes back
                peaks = [peak + away for peak, away in zip(peaks, away_peaks(program, sizes), strict=True)]
            return [max(round(peaks[rank]) for rank in group) for group in groups]
        shape = (plan.pp, plan.accumulation, plan.interleave, plan.slices)
        both, held = list(zip(sizes.kept, sizes.kept_for_weights, strict=True)), plan.placement.held
        most = []
        for group in groups:
            each = [nbytes for chunk in held[group[0]] for nbytes in both[chunk]]
            moments = pace.moments_for_memory(plan.schedule, group, *shape)
            most.append(round(max([sum(map(operator.mul, moment, each)) for moment in moments])))
        return most

    def host_bytes(self, plan: ParallelPlan, counts: tuple[int, ...]) -> list[int]:
        """What each rank of a pipeline has in the memory of its host, where that is not the device's own."""
        ranks = self._rests(plan, counts, _each_rank(plan))
        away = [0] * plan.pp
        if "activations" in plan.offloads and plan.pp > 1:
            moved = offload(self.program(plan), ahead=plan.prefetch)
            away = [round(peak) for peak in away_peaks(moved, self.step_bytes(plan, counts))]
        elif "activations" in plan.offloads:
            away = [self.activation_peaks(plan, counts)[0] * (ranks[0].layers - 1) // ranks[0].layers]
        by_rank = []
        for rank, activations in zip(ranks, away, strict=True):
            weights, _, optimizer = rank_state_bytes(plan, rank.parameters)
            states = optimizer * ("optimizer" in plan.offloads) + weights * ("weights" in plan.offloads)
            by_rank.append(states + activations)
        return by_rank

    @staticmethod
    def program(plan: ParallelPlan) -> StepProgram:
        """The passes of a step, or of a shorter one that holds as much."""
        return pace.program_for_memory(plan.schedule, plan.pp, plan.accumulation, plan.interleave, plan.slices)

    def chunk(self, plan: ParallelPlan, layers: int, dense: int = 0) -> tuple[int, int]:
        """Bytes that a pass through so many layers keeps, of which so many are dense, and that its backward pass leaves
        for weight gradients."""
        late = self.microbatch(plan).late if plan.pipeline.is_split else (0, 0)
        kinds = [*zip((layers - dense, dense), self.layers(plan), late, strict=False)]
        kept = sum(count * each for count, (each, _), _ in kinds)
        if plan.recompute_every != 1:  # one activation for so many layers, which are computed again together
            kept = -(-layers // plan.stretch(layers)) * kept // max(1, layers)
        slices = plan.slices if plan.pp > 1 else 1  # of a sequence share what is kept
        return kept // slices, sum(count * each for count, _, each in kinds) // slices

    def _worth_a_look(self, plan: ParallelPlan, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Ranks that can be the fullest, in groups that need the same beside their activations. Where chunks lie in a
        loop or in two directions: the ends, the middle, and of those with the same layers the first and the last
        (where weight gradients wait, a later rank may hold more of those). Elsewhere all."""
        if plan.pp == 1:
            return ((0,),)
        placement, is_apart = plan.placement, bool(plan.recompute_stages) or plan.is_asynchronous
        groups = self._looked.get((placement, counts, is_apart))
        if groups is None:
            alike: dict[tuple[object, ...], list[int]] = {}
            is_known, dense = placement.name in (LOOP, TWO_WAYS), self.model.dense_of(counts)
            for rank, held in enumerate(placement.held):
                ends = () if is_known else (held[0] == 0, held[-1] == len(counts) - 1)
                alike.setdefault((*ends, *((counts[chunk], dense[chunk]) for chunk in held)), []).append(rank)
            if is_apart:  # they keep different amounts, or copies of weights
                groups = _each_rank(plan)
            elif is_known:
                middle = (plan.pp // 2,) if placement.name == TWO_WAYS else ()
                looked = {
                    0,
                    plan.pp - 1,
                    *middle,
                    *(rank for ranks in alike.values() for rank in (ranks[0], ranks[-1])),
                }
                groups = tuple((rank,) for rank in sorted(looked))
            else:
                groups = tuple(map(tuple, alike.values()))
            self._looked[placement, counts, is_apart] = groups
        return groups

    def _rank(self, plan: ParallelPlan, rank: int, counts: tuple[int, ...]) -> _RankNeeds:
        """What a rank of the pipeline needs beside its activations, whatever ZeRO cuts."""
        plan = plan.on_stage(rank)
        held = plan.placement.held[rank] if plan.pp > 1 else (0,)
        has_embedding, has_head = held[0] == 0, held[-1] == len(counts) - 1
        shards, code, is_cpu = self.shards(plan), self.code(plan), self._device.kind == "cpu"
        layers, dense = (sum(each[chunk] for chunk in held) for each in (counts, self.model.dense_of(counts)))
        parameters = shards.held(layers, has_embedding, has_head, dense)
        microbatch = self.microbatch(plan)
        brief = max(again for _, again in self.layers(plan)) * max(1, plan.stretch(max(counts)))
        brief += microbatch.messages if plan.pp > 1 else 0
        if plan.precision in AUTOCAST:  # kept from forward to backward beside the fp32 weights
            looked_up = 0  # tables from which rows are only taken, which torch does not cast
            if code != "fused" and not is_cpu and has_embedding:
                looked_up = shards.embeddings - (shards.tied_head if has_head else 0)
            brief += 2 * (parameters.total - looked_up)
        if plan.cp > 1:
            brief += visiting_bytes(self.model, microbatch.task)
        if code == "eager" and is_cpu:
            brief += max(backward_bytes(kind, microbatch.task) for kind in self.model.kinds)
        return _RankNeeds(
            parameters,
            0,
            microbatch.logits if has_head else 0,
            brief,
            layers,
            self._at_work(plan, held, counts),
            reserved_bytes(
                self._device, self._world, code == "compiled" or plan.repeated in ("operators", "full"), plan.pp
            )
            + (microbatch.outlived if has_head else 0),
            pace.copies_of_weights(plan.schedule, rank, plan.pp, plan.accumulation) if plan.pp > 1 else 1,
        )

    def _begins_empty(self, plan: ParallelPlan) -> bool:
        """Whether a step begins without gradients: one of torch's with one microbatch, where no buffers stay."""
        is_alone = plan.world == 1 and not plan.has_chunks and plan.precision != "fp16"
        is_one = plan.accumulation == plan.pp == 1 and (plan.zero == 1 or is_alone)
        return is_one and self._device.kind == "gpu" and self.code(plan) != "fused"

    def _later_bytes(self, plan: ParallelPlan, rank: _RankNeeds) -> int:
        """Gradients that are not there when the loss is. They come as activations go, so what the end of the backward
        pass holds is a bound."""
        if not self._begins_empty(plan):
            return 0
        return min(rank_state_bytes(plan, rank.parameters)[1], rank.activations + rank.logits)

    def _at_work(self, plan: ParallelPlan, held: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
        """Parameters of what ZeRO gathers or scatters at once: layer by layer, in a pipeline chunk by chunk. The
        fullest moment is the loss, where the head is there beside its layer."""
        shards, last, dense = self.shards(plan), len(counts) - 1, self.model.dense_of(counts)
        if plan.pp == 1:
            layer = max(shards.layer, shards.dense_layer)
            return (*(layer,) * min(1 + plan.prefetch, counts[0]), shards.stage(0, False, True))
        sizes = [shards.stage(counts[chunk], chunk == 0, chunk == last, dense[chunk]) for chunk in held]
        return tuple(sorted(sizes, reverse=True)[: 1 + plan.prefetch])

    def task(self, plan: ParallelPlan) -> Task:
        """One microbatch of this layout. The busiest rank of one layer is not that of the next, so of all rows that a
        rank keeps the excess is smaller by the root of its layers."""
        is_gpu = self._device.kind == "gpu"
        task = Task.of(plan, self.context, self.code(plan), is_gpu, self._chunked_loss, self._imbalance)
        if plan.ep == 1:
            return task
        layers = max(1, len(self.model.expert_layers) // plan.pp)
        return replace(task, imbalance=1 + (imbalance(self.model, task) - 1) / math.sqrt(layers))

    def code(self, plan: ParallelPlan) -> Code:
        return self._code or default_code(self._device, plan.precision)

    def microbatch(self, plan: ParallelPlan) -> MicrobatchBytes:
        """Of one microbatch of this layout: the same for all layouts that compute it alike."""
        by_layers = plan.zero == 3 and is_by_layers(plan, self.code(plan))
        key = (
            plan.tp, plan.sequence_parallel, plan.microbatch, plan.attention, plan.precision, by_layers, plan.cp,
            plan.cp_exchange, plan.ep, plan.expert_tp, plan.pp if plan.ep > 1 else 1,
        )  # fmt: skip
        microbatch = self._microbatches.get(key)
        if microbatch is None:
            microbatch = self._microbatches[key] = MicrobatchBytes(self.model, self.task(plan))
        return microbatch

    def pass_bytes(self, plan: ParallelPlan) -> int:
        """What a microbatch needs at least, whatever is recomputed: one layer's activations, and on the last stage,
        at another moment, the logits."""
        return max(*(kept for kept, _ in self.layers(plan)), self.microbatch(plan).logits)

    def layers(self, plan: ParallelPlan) -> tuple[tuple[int, int], ...]:
        """Bytes a layer of each kind keeps of a microbatch, and bytes that come back while one is recomputed."""
        return self.microbatch(plan).layers(plan.repeated)
