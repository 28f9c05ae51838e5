"""A model laid on the stages of a pipeline: this rank's chunks, the step that runs them, and the whole as ever.

The one idea: to whoever trains it, it is a laid model like any other. Its parameters have the names of the whole model,
its gradients one protocol, its loss and logits the numbers of one process; only `passes`, which makes a step's forward
and backward passes, follows the list of the plan's schedule (`core/step/program.py`, run by `run.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.shard import Shard
from tilemesh.core.step.action import Action, Kind, Payload
from tilemesh.core.step.placement import ChunkPlacement
from tilemesh.core.step.program import PlannedStep
from tilemesh.model.cache import KeyValueCache
from tilemesh.model.config import ModelConfig
from tilemesh.model.deferral import defer
from tilemesh.model.part import TIED
from tilemesh.model.programs.program import TRAINING, Use
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.slices import slice_lengths
from tilemesh.parallel.buckets import Bucketed
from tilemesh.parallel.chunk import ModelChunk, StepData
from tilemesh.parallel.experts import ExpertElsewhere
from tilemesh.parallel.gradients import Gradients
from tilemesh.parallel.host import HostLink
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.offload import HostActivations, HostWeights, Place
from tilemesh.parallel.run import ChunkPasses, Service, Services, StepRunner
from tilemesh.parallel.shard import Held
from tilemesh.parallel.tensor import Seams
from tilemesh.parallel.whole import FreshWeights
from tilemesh.parallel.zero3 import ZeroWeights


class StageModule(nn.Module):
    """The modules of a rank's chunks under the names that they have in the whole model."""

    def __init__(self, chunks: Mapping[int, Transformer]) -> None:
        super().__init__()
        self.chunks = list(chunks.values())
        self.layers = nn.Module()
        for _, model in sorted(chunks.items()):
            for name, module in model.named_children():
                if name == "layers":
                    for index, layer in module.named_children():
                        self.layers.add_module(index, layer)
                elif name not in dict(self.named_children()):  # a tied table is in two chunks
                    self.add_module(name, module)

    def train(self, mode: bool = True) -> StageModule:
        for model in self.chunks:
            model.training = mode
        super().train(mode)
        return self


def holders_of(name: str, chunk: int, placement: ChunkPlacement, config: ModelConfig) -> tuple[int, ...]:
    """Places on pp whose ranks hold a parameter of a chunk: the chunk's, and of a tied table those of both ends."""
    stages = set(placement.holders[chunk])
    if name == TIED and config.tied:
        stages |= {*placement.holders[0], *placement.holders[-1]}
    return tuple(sorted(stages))


def holder_groups(mesh: Mesh, placement: ChunkPlacement, config: ModelConfig) -> dict[tuple[int, ...], Communicator]:
    """Communicators among stages that hold the same parameters. A collective call: every rank asks for all of them."""
    wanted = {holders_of("", chunk, placement, config) for chunk in range(placement.chunks)}
    wanted.add(holders_of(TIED, 0, placement, config))
    groups = {}
    for holders in sorted(holders for holders in wanted if len(holders) > 1):
        group = mesh.pp.comm.split(0 if mesh.pp.index in holders else None, key=mesh.pp.index, expected=holders)
        if group is not None:
            groups[holders] = group
    return groups


class Pipeline(Laid):
    """A laid model whose layers are shared out along pp. `chunks`: this rank's, by number, each cut like a model."""

    def __init__(
        self,
        chunks: Mapping[int, Transformer],
        mesh: Mesh,
        plan: ParallelPlan,
        step: PlannedStep,
        shards: Mapping[str, Shard],
        seams: Seams,
        gradients: Gradients,
        names: Iterable[str],
        use: Use = TRAINING,
        elsewhere: Mapping[str, ExpertElsewhere] = MappingProxyType({}),
    ) -> None:
        super().__init__(StageModule(chunks), mesh, plan, shards, seams, gradients, names, use, elsewhere)
        if not isinstance(gradients, Bucketed):
            raise UsageError(f"gradients of a pipeline by {type(gradients).__name__}: expected 'bucketed'")
        self.config, self.step, self.buckets = next(iter(chunks.values())).config, step, gradients
        lengths = functools.partial(slice_lengths, self.config, plan.pp, step.program.slices)
        self.data = StepData(count=self._count, slices=step.program.slices, lengths=lengths)
        self.parts = {
            number: Laid(model, mesh, plan, _own(model, shards), seams, gradients, use=use)
            for number, model in chunks.items()
        }
        self.gathers = gradients if isinstance(gradients, ZeroWeights) else None
        """Who makes weights whole that are cut over replicas."""
        self.host_activations: HostActivations | None = None
        self.host_weights: HostWeights | None = None
        link = HostLink(next(self.module.parameters()).device)
        if "activations" in plan.offloads:
            self.host_activations = HostActivations(link, (*self.module.parameters(), *self.module.buffers()))
        if "weights" in plan.offloads:
            reads = {number: list(part.module.parameters()) for number, part in self.parts.items()}
            self.host_weights = HostWeights(link, reads)
        self.passers = {
            number: ModelChunk(
                part, self.data, defer(part.module) if step.is_split else None, number, self.host_activations
            )
            for number, part in self.parts.items()
        }
        self.runner = StepRunner(
            step.program, mesh.pp.comm, self.passers, self._services(), self._note, ready=self._wait_for_weights
        )

    @property
    def has_head(self) -> bool:
        return any(part.has_head for part in self.parts.values())

    def _note(self, text: str) -> None:
        self.mesh.comm.watch.process.stage = text

    def _services(self) -> Services:
        """What the step's list may ask for beside passes and messages."""
        gradients, gathers, activations, weights = (
            self.buckets, self.gathers, self.host_activations, self.host_weights,
        )  # fmt: skip
        services: dict[tuple[Kind, Payload], Service] = {
            ("REDUCE", "gradient"): lambda action: gradients.reduce(action.chunk)
        }
        if gathers is not None:
            services["GATHER", "weights"] = lambda action: gathers.gather(action.chunk)
            services["FREE", "weights"] = lambda action: gathers.free(action.chunk)
        if activations is not None:
            services["OUT", "activation"] = lambda action: activations.out(_place(action))
            services["IN", "activation"] = lambda action: activations.into(_place(action))
        if weights is not None:
            services["OUT", "weights"] = lambda action: weights.out(action.chunk)
            services["IN", "weights"] = lambda action: weights.into(action.chunk)
        return services

    def _wait_for_weights(self, chunk: int) -> None:
        """Before a pass: until they are gathered, or back from the host."""
        for source in (self.gathers, self.host_weights):
            if source is not None:
                source.ready(chunk)

    def watch_actions(self, note: Callable[[str], None], around: Callable[[Action, Callable[[], None]], None]) -> None:
        """Let somebody know what a step is at: as `StepRunner` says."""
        self.runner.note, self.runner.around = note, around

    def run_by(self, chunks: Mapping[int, ChunkPasses], services: Services) -> None:
        """Let others do what the step's list says."""
        self.runner = StepRunner(self.step.program, self.mesh.pp.comm, chunks, services, self._note)

    def compile_passes(self) -> None:
        """Let the passes of a step call compiled code; those outside of it (held-out text, samples) do not."""
        for chunk in self.passers.values():
            chunk.compile()

    def takes(self, module: str, microbatch: int) -> bool:
        """Whether this rank passes a microbatch through a module of the model."""
        kind, _, rest = module.partition(".")
        ends = {"token_embedding": 0, "position_embedding": 0}
        chunk = ends.get(kind, self.step.program.chunks - 1)
        if kind == "layers":
            layer = int(rest.partition(".")[0])
            chunk = next(number for number, layers in enumerate(self.step.layers) if layer in layers)
        return self.step.program.placement.rank(chunk, microbatch) == self.mesh.pp.index

    # A step -------------------------------------------------------------------------------------------------------

    def passes(self, pieces: Any, *, dropout_seed: int | Tensor | None = None, scale: float = 1) -> None:
        if len(pieces) != self.step.program.microbatches:
            raise UsageError(
                f"{len(pieces)} microbatches and the plan has {self.step.program.microbatches}: give as many"
            )
        shortest = min(piece.tokens.shape[1] for piece in pieces)
        if shortest < self.data.slices:
            raise UsageError(
                f"slices is {self.data.slices} and a sequence has {shortest} tokens: expected at most as many"
            )
        self.data.pieces, self.data.dropout_seed, self.data.scale = pieces, dropout_seed, scale
        self.buckets.begin(scale)
        if self.host_weights is not None:
            self.host_weights.begin()
        self.runner()
        self.data.pieces = ()

    def _count(self, total: Tensor, count: Tensor) -> None:
        self.buckets.count(total, count, self.data.scale)

    def kept(self) -> Iterator[Tensor]:
        """What a step under way keeps for its backward passes beside what autograd does."""
        for chunk in self.passers.values():
            yield from chunk.put_off()
        if self.host_activations is not None:
            yield from self.host_activations.here()

    # Forward alone ------------------------------------------------------------------------------------------------

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Summed loss of these rows and how many targets counted, without gradients; zeros on ranks without the head.

        A collective call along pp. To train, call `passes`.
        """

        def run(part: Laid, x_BTD: Tensor | None) -> tuple[Tensor, Tensor] | Tensor:
            if part.has_head:
                return part.loss(tokens_BT, targets_BT, x_BTD=x_BTD, **options)
            return part.activations(tokens_BT, x_BTD=x_BTD, **options).x

        with torch.no_grad():
            counted = self._through(tokens_BT, run)
        zeros = torch.zeros(2, dtype=torch.float64, device=tokens_BT.device)
        return (zeros[0], zeros[1]) if counted is None else counted

    def logits(self, tokens_BT: Tensor, *, cache: KeyValueCache | None = None, x_BTD: Tensor | None = None) -> Tensor:
        """Whole logits on every rank, nothing dropped, at least float32. A cache holds the layers of its own rank."""
        if x_BTD is not None:
            raise UsageError("x_BTD given to a whole pipeline: it is for one part of a model")

        def run(part: Laid, x_BTD: Tensor | None) -> Tensor:
            return part.logits(tokens_BT, cache=cache, x_BTD=x_BTD)

        with torch.no_grad(), self.seams.whole_tokens():
            last_BTV = self._through(tokens_BT, run)
        wide = torch.promote_types(self.stream_dtype, torch.float32)
        logits_BTV = torch.empty((*tokens_BT.shape, self.config.vocabulary), dtype=wide, device=tokens_BT.device)
        if last_BTV is not None:
            logits_BTV.copy_(last_BTV)
        root = self.step.program.placement.directions[0][-1]
        everywhere_BTV: Tensor = self.mesh.pp.comm.broadcast(logits_BTV, root=root)
        return everywhere_BTV

    def stand_by(self) -> None:
        if self.plan.ep > 1:
            super().stand_by()
            return
        for chunk, rank in enumerate(self.step.program.placement.directions[0]):
            if self.gathers is not None and rank == self.mesh.pp.index:
                with self.gathers.whole(chunk):
                    pass

    def _through(self, tokens_BT: Tensor, run: Callable[[Laid, Tensor | None], Any]) -> Any:
        """One pass through all chunks in their order; what the last one gave, on the rank that has it."""
        ranks, comm = self.step.program.placement.directions[0], self.mesh.pp.comm
        x_BTD = None
        for chunk, rank in enumerate(ranks):
            if rank != comm.rank:
                continue
            part = self.parts[chunk]
            if chunk and ranks[chunk - 1] != rank:
                x_BTD = comm.recv(part.empty_stream(tokens_BT), ranks[chunk - 1], chunk)
            with nullcontext() if self.gathers is None else self.gathers.whole(chunk):
                result = run(part, x_BTD)
            if chunk == len(ranks) - 1:
                return result
            x_BTD = result.to(part.stream_dtype)
            if ranks[chunk + 1] != rank:
                comm.send(x_BTD.contiguous(), ranks[chunk + 1], chunk + 1)
        return None

    # The whole ----------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Held]:
        return super().weights() if self.gathers is None else dict(self.gathers.rows)

    def initialize(self, seed: int) -> None:
        self.load(FreshWeights(self.shards, seed, self.config.layers))


def _place(action: Action) -> Place:
    return action.chunk, action.microbatch, action.slice


def _own(model: nn.Module, shards: Mapping[str, Shard]) -> dict[str, Shard]:
    return {name: shards[name] for name, _ in model.named_parameters()}
