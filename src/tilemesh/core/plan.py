"""How a model is laid on ranks and a step is cut in time: one parallel plan, as data.

The one idea: the planner makes it, a file keeps it, training runs it, and none of them knows the others. It has two
halves, where things lie (`ModelPlacement`) and how a step is computed (`StepSettings`), and shows the fields of both as
its own. It is checked for what holds for any model (a combination that cannot be); what depends on a model (heads
divisible by tp, pp at most the layers) is checked where the model is known: `why_not` in `model/work/weights.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tilemesh.core import config
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.ranges import Range
from tilemesh.core.step.book import LIST_WORDS, find, is_listed
from tilemesh.core.step.placement import ChunkPlacement
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape

LISTED = "listed"
"""What a schedule is called that no name stands for: the plan holds its lists of passes."""
Recompute = Literal["none", "selective", "operators", "full"]
"""What a backward pass computes again, from the least to the most."""
Attention = Literal["fused", "materialized"]
ContextExchange = Literal["ring", "gather", "heads", "heads-ring"]
Precision = Literal["fp32", "bf16", "bf16-master", "fp16", "fp64", "fp8"]
Fp8Scales = Literal["tensor", "row", "block"]
MASTERED = ("bf16-master", "fp8")
"""Precisions with 16-bit weights and gradients, and float32 copies of the weights that are stepped."""
OFFLOADS = ("optimizer", "activations", "weights")
"""What may be moved to the host's memory while it is not needed."""
OFFLOAD_PART_BYTES = 256 << 20
"""Of optimizer states that are on the host, what is brought to the device at a time, about."""
OFFLOAD_PARTS = 3
"""Such parts that are on the device at once: one comes in, one is stepped, one goes out."""

Count = Annotated[int, Range(1, 2**31 - 1)]
"""Of ranks along an axis, of sequences, of microbatches: what an array's length may be, and far more than any run."""
CountOrNone = Annotated[int, Range(0, 2**31 - 1)]
COMPUTE_DTYPE = {"fp32": "fp32", "bf16": "bf16", "bf16-master": "bf16", "fp16": "fp16", "fp64": "fp64", "fp8": "bf16"}
"""Of what a product takes and gives; in fp8 its operands are cast on their way in."""


REPLAY_ROOM = 0.75
"""Of a GPU's memory, what the steps of one rank may take and still become a CUDA graph (`train/graph.py`): what a graph
holds is lost to held-out text and samples."""


@dataclass(frozen=True, order=True)
class ModelPlacement:
    """Where a model and its states lie: the axes of the mesh, and what is cut along each."""

    dp: Count = 1
    """Data parallelism: replicas of the model, each with its part of the batch."""
    tp: Count = 1
    """Tensor parallelism: ranks that share each layer's matrices."""
    pp: Count = 1
    """Pipeline parallelism: stages, each with a part of the layers."""
    ep: Count = 1
    """Expert parallelism: so many of the dp x cp replicas, neighbours, share out the experts of every layer among
    them; with expert_tp=1 of the dp x cp x tp ranks."""
    expert_tp: CountOrNone = 0
    """Ranks of tp that share each expert's matrices; 0: all, as of any other matrix. 1: none; each rank routes its own
    tokens (sequence_parallel), and replicas and ranks of tp together share out the experts. Others: predicted."""
    cp: Count = 1
    """Context parallelism: ranks that share each sequence, of whose tokens each has an early and a late part."""
    cp_exchange: ContextExchange = "ring"
    """How attention gets at the tokens of other ranks of cp: their keys and values come round (ring), or are gathered
    at once (gather); or each rank gets all tokens of a part of the heads (heads), for which tp x cp must divide the KV
    heads; or neighbours do so, as many as the KV heads allow, and keys and values go round between them (heads-ring).
    """
    sequence_parallel: bool = False
    """The parts of a layer that tp does not split (norms, dropout, residuals) are split along the sequence."""
    zero: Annotated[int, Range(0, 3)] = 0
    """Sharded over dp and cp: 1 optimiser states, 2 gradients as well, 3 weights as well."""
    zero_group: CountOrNone = 0
    """Replicas that share what ZeRO shards, neighbours along dp such as those of one node; every such group holds all
    of it. 0: all replicas are one group."""
    interleave: Count = 1
    """Model chunks a stage holds, for the schedules that leave it open, such as interleaved."""
    chunk_layers: tuple[Count, ...] = ()
    """Layers of each of the plan's chunks, in the model's order; the schedule says on which stage a chunk lies. Empty:
    cut by whoever runs it, as even as the layers allow."""

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes and their sizes: dp and tp always, others where they have more than one rank."""
        others = {name: size for name, size in (("cp", self.cp), ("pp", self.pp)) if size > 1}
        return {"dp": self.dp, "tp": self.tp} | others

    @property
    def zero_ranks(self) -> int:
        """Ranks over which ZeRO cuts: 1 where it cuts nothing."""
        return (self.zero_group or self.dp) * self.cp if self.zero else 1

    @property
    def ranks_per_expert(self) -> int:
        """Ranks of tp that share each expert's matrices."""
        return self.expert_tp or self.tp

    @property
    def routes_apart(self) -> bool:
        """Whether ranks of tp route tokens of their own, to experts that tp does not cut as it does other matrices."""
        return self.ranks_per_expert < self.tp

    @property
    def expert_spread(self) -> tuple[tuple[str, int], ...]:
        """Along which axes, and among how many ranks, experts are shared out: tp and cp first, whose ranks are
        nearer."""
        blocks, left = [], self.ep
        for name, size in (("tp", self.tp // self.ranks_per_expert), ("cp", self.cp), ("dp", self.dp)):
            count = math.gcd(left, size)
            left //= count
            blocks.append((name, count))
        return tuple(block for block in blocks if block[1] > 1)

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return max(1, self.replicas * self.tp // (self.ranks_per_expert * self.ep))

    @property
    def expert_zero_ranks(self) -> int:
        """Of those, ranks over which ZeRO cuts: what is left of `zero_ranks`."""
        along_tp = math.gcd(self.ep, self.tp // self.ranks_per_expert)
        return max(1, self.zero_ranks * along_tp // self.ep) if self.zero else 1

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model and take other rows or tokens of the batch."""
        return self.dp * self.cp

    @property
    def world(self) -> int:
        """Ranks it needs."""
        return self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, order=True)
class StepSettings:
    """How one step is computed: `accumulation` microbatches of `microbatch` sequences on every replica."""

    microbatch: Count = 1
    """Sequences in one forward pass of one replica."""
    accumulation: Count = 1
    """Microbatches of one replica in a step; with pp > 1 these are what fills the pipeline."""
    schedule: str = "1f1b"
    """Order of forward and backward passes over the stages; says nothing when pp is 1. A name (`tilemesh config
    --reference` ends with all of them), or a schedule of your own: a line of passes per stage, as 0F0,0F1,0B0,0B1, or
    the name of a .csv file with such lines, which `tilemesh plan draw search --csv FILE` and torch's pipelining
    write."""
    slices: Count = 1
    """Pieces of each sequence that pass through the stages one after the other: for terapipe. How long each is, is
    found by dynamic programming: later ones attend to more tokens and are shorter."""
    recompute: Recompute = "none"
    """Activations that are computed again in the backward pass to save memory: none; attention's scores (selective;
    fused attention always does so, and keeps none); all within a layer but the results of attention and of every second
    matrix product (operators); or all within a layer (full)."""
    recompute_every: Count | Literal["sqrt"] = 1
    """With full recomputation, layers between two activations that are kept, which are computed again together; sqrt:
    the square root of the number of layers that a rank passes at once."""
    recompute_stages: tuple[CountOrNone, ...] = ()
    """Stages of a pipeline that recompute, counted from 0: under 1f1b the first ones keep the most microbatches. Empty:
    all."""
    prefetch: CountOrNone = 1
    """Layers ahead of their use for which ZeRO-3 gathers weights, and offloading fetches what it moved out."""
    offload: str = ""
    """Moved to the host's memory while not needed: some of optimizer, activations, weights, as optimizer+weights."""
    attention: Attention = "fused"
    """Whether attention's scores are written to memory (materialized) or not (fused)."""
    precision: Precision = "bf16"
    """fp32; bf16 and fp16: float32 weights with autocast (fp16 with loss scaling); bf16-master: 16-bit weights and
    gradients with float32 master weights; fp64 for tests; fp8: bf16-master with the layers' products in 8 bits."""
    fp8_scales: Fp8Scales = "tensor"
    """With precision fp8, what of a product's operand has a scale of its own: all of it (tensor); every token and every
    output (row); or 128 columns of a token and 128 x 128 weights (block). Outliers harm less from one to the next; with
    row and block a weight's gradient is multiplied in 16 bits."""

    @property
    def offloads(self) -> tuple[str, ...]:
        """What is moved to the host's memory, in the order of `OFFLOADS`; a word that is none of them comes last."""
        if not self.offload:  # asked for tens of thousands of layouts
            return ()
        # A comma ends a setting on the command line, so a plus joins too.
        names = dict.fromkeys(name.strip() for name in self.offload.replace("+", ",").split(",") if name.strip())
        return tuple(sorted(names, key=lambda name: OFFLOADS.index(name) if name in OFFLOADS else len(OFFLOADS)))

    @property
    def schedule_name(self) -> str:
        """For people: that of a list of passes does not hold the list."""
        return LISTED if is_listed(self.schedule) else self.schedule

    def stretch(self, layers: int) -> int:
        """Of so many layers passed at once, how many are computed again together; 0: none are."""
        if self.recompute != "full":
            return 0
        return max(1, round(math.sqrt(layers))) if self.recompute_every == "sqrt" else self.recompute_every

    @property
    def repeated(self) -> Recompute:
        """What is computed again beyond what attention does by itself: fused attention keeps no scores and makes them
        anew in its backward pass, so there selective recomputation is none."""
        return "none" if self.recompute == "selective" and self.attention == "fused" else self.recompute

    @property
    def repeats_exchanges(self) -> bool:
        """Whether a layer's forward pass is gone through again, and with it what its ranks exchange."""
        return self.recompute in ("operators", "full")

    def recomputes(self, stage: int) -> bool:
        """Whether a stage computes anything again."""
        return self.repeated != "none" and (not self.recompute_stages or stage in self.recompute_stages)

    @property
    def compute_dtype(self) -> str:
        """The dtype of what matmuls take, by the names of `core.hardware`."""
        return COMPUTE_DTYPE[self.precision]

    @property
    def peak_dtype(self) -> str:
        """The dtype whose peak utilisation is measured by."""
        return "fp8" if self.precision == "fp8" else self.compute_dtype


@dataclass(frozen=True, order=True)
class ParallelPlan(StepSettings, ModelPlacement):
    """How the model is laid out over ranks and how a step is cut into microbatches; `tilemesh plan` finds one."""

    def __post_init__(self) -> None:
        config.check_fields(self)
        if self.sequence_parallel and self.tp == 1:
            raise UsageError(
                "sequence_parallel splits the sequence over tp ranks and tp is 1: set tp above 1 or leave it off"
            )
        if not isinstance(self.offload, str):
            raise UsageError(f"offload is {self.offload!r}: expected some of {', '.join(OFFLOADS)}, joined by +")
        for name in self.offloads:
            if name not in OFFLOADS:
                raise unknown("offload", name, OFFLOADS)
        if self.interleave > 1 and not self.pipeline.interleaves:
            raise UsageError(
                f"interleave is {self.interleave} and schedule is {self.schedule_name}: set schedule=interleaved"
            )
        if self.pipeline.interleaves and self.interleave == 1:
            raise UsageError(
                f"schedule is {self.schedule} and interleave is 1: set interleave to 2 or more, or use 1f1b"
            )
        if self.slices > 1 and not self.pipeline.cuts_sequences:
            raise UsageError(f"slices is {self.slices} and schedule is {self.schedule_name}: set schedule=terapipe")
        if self.chunk_layers and self.pp > 1 and len(self.chunk_layers) != self.chunks:
            raise UsageError(
                f"chunk_layers has {len(self.chunk_layers)} number{'s' * (len(self.chunk_layers) > 1)} and "
                f"{self.chunks_words} is {self.chunks} chunk{'s' * (self.chunks > 1)}: give one for each, or leave it "
                "empty"
            )

    @classmethod
    def unchecked(cls, **fields: Any) -> ParallelPlan:
        """A plan that is right by construction. A search makes tens of thousands, and checking is most of the work."""
        plan = object.__new__(cls)
        plan.__dict__.update(fields)
        return plan

    def on_stage(self, stage: int) -> ParallelPlan:
        """The plan as one stage runs it: without recomputation where that is for others."""
        if self.recompute == "none" or self.recomputes(stage):
            return self
        return dataclasses.replace(self, recompute="none", recompute_every=1, recompute_stages=())

    @property
    def pipeline(self) -> PipelineSchedule:
        """The schedule that the plan names or lists."""
        return find(self.schedule)

    @property
    def pipe_shape(self) -> PipeShape:
        """What its lists are made for."""
        return PipeShape(self.pp, self.accumulation, self.interleave, self.slices)

    @property
    def placement(self) -> ChunkPlacement:
        """Which stage has which chunk."""
        return self.pipeline.placement(self.pp, self.interleave)

    @property
    def is_asynchronous(self) -> bool:
        """Whether weights are updated while microbatches are under way."""
        return self.pp > 1 and self.pipeline.updates is not None

    @property
    def chunks(self) -> int:
        """Parts that the layers are cut into: one for each stage, or as many as the schedule has there."""
        return 1 if self.pp == 1 else self.placement.chunks

    @property
    def has_chunks(self) -> bool:
        """Whether a step runs by its list of actions, chunk by chunk, and not by whole passes."""
        return self.pp > 1 or self.layer_by_layer

    @property
    def layer_by_layer(self) -> bool:
        """Whether weights or activations come and go while a step runs: ZeRO-3, or kept on the host."""
        return self.zero == 3 or bool({"activations", "weights"} & {*self.offloads})

    @property
    def chunks_words(self) -> str:
        """What makes so many chunks, in words."""
        if self.pp > 1 and is_listed(self.schedule):
            return LIST_WORDS
        if self.interleave == 1 and self.chunks > self.pp:
            return f"pp {self.pp} x {self.chunks // self.pp} chunks of {self.schedule}"
        return f"pp {self.pp}" + (f" x interleave {self.interleave}" if self.interleave > 1 else "")

    @property
    def batch(self) -> int:
        """Sequences in a step, over all replicas."""
        return self.dp * self.microbatch * self.accumulation

    @property
    def mesh_words(self) -> str:
        """The mesh in words: an axis that few plans have is named where it has more than one rank."""
        return f"dp {self.dp} x tp {self.tp} x pp {self.pp}" + (f" x cp {self.cp}" if self.cp > 1 else "")

    def short(self) -> str:
        """In a few words: the mesh and what sets it apart."""
        sharing = [*self._ep(), *self._sharing()]
        return ", ".join(
            [self.mesh_words, *sharing, *self._schedule(), f"microbatch {self.microbatch}", *self._memory()]
        )

    def describe(self, servers: int = 0) -> str:
        """One line for people; what is off or has no effect is left out. `servers`: ranks beside those of the plan."""
        parts = [f"{self.mesh_words} = {self.world} rank{'s' * (self.world > 1)}"]
        if servers:
            each = "" if self.world == self.dp else f" of tp {self.tp} x pp {self.pp}"
            workers = f"{self.dp} worker{'s' * (self.dp > 1)} (dp){each}"
            parts = [f"{workers} + {servers} server{'s' * (servers > 1)} = {self.world + servers} ranks"]
        parts += self._ep()
        if self.cp > 1 and self.cp_exchange != "ring":
            parts.append(f"cp by {self.cp_exchange}")
        parts += [*self._sharing(), f"batch {self.batch} ({self.accumulation} x {self.microbatch} per replica)"]
        parts += self._schedule()
        if len(set(self.chunk_layers)) > 1:
            parts.append(f"layers {'+'.join(map(str, self.chunk_layers))}")
        return ", ".join([*parts, *self._memory(), f"{self.attention} attention", self.precision])

    def _ep(self) -> Iterator[str]:
        if self.ep > 1:
            yield f"ep {self.ep}" + f" of expert_tp {self.expert_tp}" * self.routes_apart

    def _sharing(self) -> Iterator[str]:
        if self.sequence_parallel:
            yield "sequence parallel"
        if self.zero:
            yield f"ZeRO-{self.zero}" + (f" within {self.zero_group} replicas" if self.zero_group else "")

    def _schedule(self) -> Iterator[str]:
        if self.pp > 1:
            yield self.schedule_name + (f" {self.interleave}" if self.interleave > 1 else "")

    def _memory(self) -> Iterator[str]:
        """Recomputation and offload."""
        if self.recompute != "none":
            yield self._recomputation()
        if self.offload:
            yield f"{' and '.join(self.offloads)} on the host"

    def _recomputation(self) -> str:
        every = "" if self.recompute_every == 1 else f" every {self.recompute_every} layers"
        stages = f" on stages {', '.join(map(str, self.recompute_stages))}" if self.recompute_stages else ""
        return f"{self.recompute} recomputation{every}{stages}"

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, JSON values only."""
        return config.to_dict(self)

    def to_toml(self) -> str:
        """The plan as a TOML file's text."""
        return config.dump_toml(self)

    @classmethod
    def from_toml(cls, text: str, source: str = "plan") -> ParallelPlan:
        """The plan in a TOML text; `source` names it in errors. From a file: `config.load(ParallelPlan, file=path)`."""
        return config.from_dict(cls, config.parse_toml(text, source), source)
