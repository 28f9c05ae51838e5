"""Bytes the fullest rank of a layout needs, by what they are for: states (with ZeRO), activations, and the rest.

What a layer keeps is counted in `model/work/kept.py`; a stage holds that of so many layers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from tilemesh.core.hardware import DTYPE_BYTES, Cluster, Device
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step import pace
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.kept import kept_bytes, kept_tensors, loss_tensors
from tilemesh.model.work.task import AUTOCAST, Code, Task, default_code
from tilemesh.model.work.weights import Shards, shard_parameters
from tilemesh.plan import constants

# Bytes a parameter by precision: weights, gradients, optimiser (Adam's two moments, and a master copy).
STATE_BYTES = {
    "fp32": (4, 4, 8),
    "bf16": (4, 4, 8),
    "fp16": (4, 4, 8),
    "bf16-master": (2, 2, 12),
    "fp64": (8, 8, 16),
}


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
    """The device's context and the libraries' buffers."""
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


# ---- what lives for moments --------------------------------------------------------------------------------------


def later_bytes(plan: ParallelPlan, gradients: int, activations: int, logits: int) -> int:
    """Gradients that are not there when the loss is: alone and with one microbatch, a step begins without any.

    They come as activations go, so what the end of the backward pass holds is a bound.
    """
    if plan.dp * plan.tp * plan.pp > 1 or plan.accumulation > 1:
        return 0
    return min(gradients, activations + logits)


def working_bytes(
    plan: ParallelPlan, shards: Shards, parameters: int, recomputed_bytes: int, looked_up: int = 0
) -> int:
    """What lives for moments: the recomputed layer, gathered weights, cast copies.

    `looked_up`: parameters of tables from which rows are only taken, so that nobody casts them.
    """
    total = recomputed_bytes
    if plan.precision in AUTOCAST:
        total += 2 * (parameters - looked_up)  # kept from forward to backward beside the fp32 weights
    weights, gradients, _ = STATE_BYTES[plan.precision]
    if plan.zero == 3:
        # The layer at work and the one fetched ahead, and the gradients of the one at work before they are scattered.
        total += (2 * weights + gradients) * shards.layer
    elif plan.zero == 2:
        total += gradients * shards.layer
    return total


def backward_bytes(model: ModelConfig, plan: ParallelPlan, context: int) -> int:
    """Gradients alive at once where torch goes back through an MLP, operation by operation: of the product, of each of
    its factors, and of what goes into the activation."""
    hidden = plan.microbatch * context * model.mlp_width // plan.tp
    return 2 * model.mlp_inputs * hidden * DTYPE_BYTES[plan.compute_dtype]


def reserved_bytes(device: Device, ranks: int, compiler: bool) -> int:
    """What a process takes beside its tensors; `compiler`: whether torch's is loaded."""
    known = constants.RESERVED_BYTES
    if device.kind != "cpu":
        return known[device.kind]
    return known["cpu"] + known["ranks"] * (ranks > 1) + known["compiler"] * compiler


def kv_cache_bytes(model: ModelConfig, context: int, element_bytes: int = 2) -> int:
    """Keys and values of one whole sequence, all layers: what serving keeps of it."""
    return 2 * model.layers * model.kv_width * context * element_bytes


# ---- a layout ----------------------------------------------------------------------------------------------------


def usable_bytes(cluster: Cluster, headroom: float = constants.HEADROOM) -> int:
    """What a plan may use of a device."""
    return int(cluster.device.usable_bytes * (1 - headroom))


class Room:
    """Memory of layouts of one model; remembers what they share."""

    def __init__(
        self,
        model: ModelConfig,
        cluster: Cluster,
        context: int,
        code: Code | None = None,
        chunked_loss: bool = False,
    ) -> None:
        self.model = model
        self._device = cluster.device
        self._code, self._chunked_loss = code, chunked_loss
        self.context = context
        self._reserved = [reserved_bytes(cluster.device, cluster.world, compiler) for compiler in (False, True)]
        self._looked: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self._activations: dict[tuple[object, ...], tuple[int, int]] = {}
        self._logits: dict[tuple[object, ...], int] = {}
        self._shards: dict[int, Shards] = {}

    def shards(self, tp: int) -> Shards:
        if tp not in self._shards:
            self._shards[tp] = shard_parameters(self.model, tp)
        return self._shards[tp]

    def fullest(self, plan: ParallelPlan, counts: tuple[int, ...]) -> RankMemory:
        """Memory of the fullest rank, with so many layers in each chunk."""
        if plan.pp == 1:
            return self.stage(plan, 0, counts)
        terms = (self._terms(plan, stage, counts) for stage in self._worth_a_look(plan.pp, counts))
        return RankMemory(*max(terms, key=sum))  # what is taken off a sum is 0 in a pipeline

    def stage(self, plan: ParallelPlan, stage: int, counts: tuple[int, ...]) -> RankMemory:
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

    def _terms(self, plan: ParallelPlan, stage: int, counts: tuple[int, ...]) -> tuple[int, ...]:
        """The fields of `Memory`, in order: plain numbers, because a search asks for tens of thousands."""
        last = stage == plan.pp - 1
        layers = sum(counts[stage :: plan.pp]) if plan.interleave > 1 else counts[stage]
        shards = self.shards(plan.tp)
        parameters = shards.stage(layers, stage == 0, last)
        weights, gradients, optimizer = state_bytes(parameters, plan.precision, plan.zero, plan.zero_ranks)
        kept, recomputed = self.layer(plan)
        activations = layers_in_flight(plan, stage, counts) * kept
        stretch = plan.stretch(layers)
        if stretch > 1:  # one activation is kept for so many layers, which come back together
            activations, recomputed = -(-activations // kept // stretch) * kept, stretch * recomputed
        logits = self.logits_bytes(plan) if last else 0
        code, is_gpu = self.code(plan), self._device.kind == "gpu"
        looked_up = 0
        if code == "compiled" and stage == 0:
            looked_up = shards.embeddings - (shards.tied_head if last else 0)
        working = working_bytes(plan, shards, parameters, recomputed, looked_up)
        if code == "eager" and not is_gpu:
            working += backward_bytes(self.model, plan, self.context)
        reserved = self._reserved[code == "compiled" or plan.recompute != "none"]
        later = later_bytes(plan, gradients, activations, logits) if code == "compiled" and is_gpu else 0
        return weights, gradients, optimizer, activations, logits, working, reserved, later

    def task(self, plan: ParallelPlan) -> Task:
        """One microbatch of this layout."""
        return Task.of(plan, self.context, self.code(plan), self._device.kind == "gpu", self._chunked_loss)

    def code(self, plan: ParallelPlan) -> Code:
        return self._code or default_code(self._device, plan.precision)

    def logits_bytes(self, plan: ParallelPlan) -> int:
        """What the loss holds at its fullest moment, on the last stage."""
        key = (plan.tp, plan.microbatch, plan.precision)
        if key not in self._logits:
            self._logits[key] = sum(one.nbytes for one in loss_tensors(self.model, self.task(plan)))
        return self._logits[key]

    def layer(self, plan: ParallelPlan) -> tuple[int, int]:
        """Bytes a layer keeps of a microbatch, and bytes that come back while one is recomputed."""
        key = (plan.tp, plan.sequence_parallel, plan.microbatch, plan.attention, plan.precision, plan.recompute)
        found = self._activations.get(key)
        if found is None:
            found = self._activations[key] = kept_bytes(kept_tensors(self.model, self.task(plan)), plan.recompute)
        return found


def layers_in_flight(plan: ParallelPlan, stage: int, counts: tuple[int, ...]) -> int:
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
