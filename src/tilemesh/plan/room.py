"""How much memory the fullest rank of a layout needs, and how many layers' activations a stage holds at once."""

from __future__ import annotations

from tilemesh.core.hardware import Cluster
from tilemesh.core.step import pace
from tilemesh.model.config import ModelConfig
from tilemesh.plan import constants, memory
from tilemesh.plan.layout import PlanFields
from tilemesh.plan.memory import RankMemory
from tilemesh.plan.passes import Code, default_code
from tilemesh.plan.shards import Shards, shard_parameters, stage_parameters


def usable_bytes(cluster: Cluster) -> int:
    """What a plan may use of a device."""
    return int(cluster.device.usable_bytes * constants.USABLE_FRACTION)


class Room:
    """Memory of layouts of one model; remembers what they share."""

    def __init__(self, model: ModelConfig, cluster: Cluster, context: int, code: Code | None = None) -> None:
        self.model = model
        self._device = cluster.device
        self._code = code
        self.context = context
        self._reserved = memory.reserved_bytes(cluster.device, cluster.world)
        self._shards: dict[int, Shards] = {}
        self._looked: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._activations: dict[tuple[object, ...], tuple[int, int]] = {}

    def shards(self, tp: int) -> Shards:
        if tp not in self._shards:
            self._shards[tp] = shard_parameters(self.model, tp)
        return self._shards[tp]

    def fullest(self, plan: PlanFields, counts: tuple[int, ...]) -> RankMemory:
        """Memory of the fullest rank, with so many layers in each chunk."""
        if plan.pp == 1:
            return self.stage(plan, 0, counts)
        terms = (self._terms(plan, stage, counts) for stage in self._worth_a_look(plan.pp, counts))
        return RankMemory(*max(terms, key=sum))  # what is taken off a sum is 0 in a pipeline

    def stage(self, plan: PlanFields, stage: int, counts: tuple[int, ...]) -> RankMemory:
        """Memory of a rank of one stage."""
        return RankMemory(*self._terms(plan, stage, counts))

    def _worth_a_look(self, pp: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Stages that can be the fullest: the ends, and of those with the same layers the first, which holds most."""
        found = self._looked.get((pp, counts))
        if found is None:
            first: dict[tuple[int, ...], int] = {}
            for stage in range(pp):
                first.setdefault(counts[stage::pp], stage)
            found = self._looked[pp, counts] = tuple(sorted({0, pp - 1, *first.values()}))
        return found

    def _terms(self, plan: PlanFields, stage: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The fields of `Memory`, in order: plain numbers, because a search asks for tens of thousands."""
        last = stage == plan.pp - 1
        layers = sum(counts[stage :: plan.pp]) if plan.interleave > 1 else counts[stage]
        shards = self.shards(plan.tp)
        parameters = stage_parameters(shards, layers, stage == 0, last)
        weights, gradients, optimizer = memory.state_bytes(parameters, plan.precision, plan.zero, plan.dp)
        kept, recomputed = self.layer(plan)
        activations = layers_in_flight(plan, stage, counts) * kept
        logits = self.logits_bytes(plan) if last else 0
        by = self.keeps(plan)
        looked_up = 0
        if by == "compiled" and stage == 0:
            looked_up = shards.embeddings - (shards.tied_head if last else 0)
        working = memory.working_bytes(plan, shards, parameters, recomputed, looked_up)
        if by == "plain":
            working += memory.backward_bytes(self.model, plan, self.context)
        later = 0
        if by == "compiled" and self._device.kind == "gpu":
            later = memory.later_bytes(plan, gradients, activations, logits)
        return weights, gradients, optimizer, activations, logits, working, self._reserved, later

    def keeps(self, plan: PlanFields) -> memory.Keeps:
        """By what a layer's tensors are kept: torch's own operators on a CPU keep more, a compiler its own choice."""
        code = self.code(plan)
        if code == "compiled":
            return "compiled"
        return "plain" if self._device.kind == "cpu" and code == "eager" else "fused"

    def code(self, plan: PlanFields) -> Code:
        return self._code or default_code(self._device, plan.precision)

    def logits_bytes(self, plan: PlanFields) -> int:
        """What the loss holds at its fullest moment."""
        code = self.code(plan)
        return memory.logits_bytes(self.model, plan, self.context, code)

    def layer(self, plan: PlanFields) -> tuple[int, int]:
        """Bytes a layer keeps of a microbatch, and bytes that come back while one is recomputed."""
        key = (plan.tp, plan.sequence_parallel, plan.microbatch, plan.attention, plan.precision, plan.recompute)
        found = self._activations.get(key)
        if found is None:
            found = self._activations[key] = (
                memory.layer_activation_bytes(self.model, plan, self.context, self.keeps(plan)),
                memory.recomputed_layer_bytes(self.model, plan, self.context, self.keeps(plan)),
            )
        return found


def layers_in_flight(plan: PlanFields, stage: int, counts: tuple[int, ...]) -> int:
    """Layers whose activations a stage holds at its fullest moment, each as often as microbatches are in it."""
    if plan.pp == 1:
        return counts[0]
    passes = pace.in_flight(plan.schedule, stage, plan.pp, plan.accumulation, plan.interleave)
    if plan.interleave == 1:
        return passes * counts[stage]
    # A stage's passes go through its chunks in groups of pp microbatches, from the first chunk on.
    own = counts[stage :: plan.pp]
    rounds, rest = divmod(passes, plan.pp * plan.interleave)
    held = rounds * plan.pp * sum(own)
    for layers in own:
        held += min(rest, plan.pp) * layers
        rest = max(0, rest - plan.pp)
    return held
