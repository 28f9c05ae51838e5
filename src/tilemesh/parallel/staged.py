"""Placed modules as stages of a pipeline: each on ranks of its own, as many as it likes, run by any of our schedules.

    staged = stage([first, second], comm, [{"tp": 2}, {"dp": 3, "tp": 2}], microbatches, pins=[...], schedule="1f1b")
    loss = staged.step(microbatches)

The one idea: what passes between stages is whole on every rank of a stage, so that the first rank of each speaks for
it. These are the ranks of the pipeline whose list `StepRunner` does; the others of a stage make the same passes in the
same order, with what their first rank was sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, Payload, parts
from tilemesh.core.step.book import build
from tilemesh.core.step.passes import exchange
from tilemesh.graph.by_torch import dtype_of
from tilemesh.model.dropout import fold_seed
from tilemesh.parallel.agree import tell
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.placed import Pins, PlacedJoint, PlacedModule, place
from tilemesh.parallel.run import StepRunner
from tilemesh.parallel.whole import handed_around

Microbatch = tuple[Sequence[Tensor], Sequence[Tensor]]
"""What the first module is called with, and what the last one is called with besides."""
Joints = Callable[[nn.Module, Mesh, Pins, Sequence[Tensor]], PlacedJoint | None]
"""Where all tensors of a module lie that is called so, on a stage's mesh; None: they follow from the pins."""


class Chained(nn.Module):
    """Modules in a row, by their numbers: the first is called with the first input, the last with what the one before
    gives and all other inputs."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.chunks = nn.ModuleDict(modules)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        x, *more = (*inputs, *named.values())
        *before, last = self.chunks.values()
        for module in before:
            x = module(x)
        result: Tensor = last(x, *more)
        return result


@dataclass
class _StepState:
    """What the chunks of a rank share of a step."""

    microbatches: Sequence[Microbatch] = ()
    losses: list[Tensor] = field(default_factory=list)


@dataclass
class PlacedChunk:
    """Passes of one placed module of a pipeline: a `ChunkPasses`."""

    placed: PlacedModule
    is_first: bool
    is_last: bool
    ranks: Communicator
    """Of its stage."""
    enters: Tensor
    leaves: Tensor
    """Empty ones, as what it is given and what it gives."""
    state: _StepState
    _graphs: dict[int, tuple[Tensor | None, Tensor]] = field(default_factory=dict)
    _later: dict[int, list[Callable[[], tuple[Tensor, ...]]]] = field(default_factory=dict)
    """By microbatch, what computes the gradients of weights that I put off."""

    def forward(self, microbatch: int, piece: int, x: Tensor | None, *, keeps: bool) -> Tensor | None:
        first, more = self.state.microbatches[microbatch]
        entered = None
        if not self.is_first:
            entered = self.ranks.broadcast(torch.empty_like(self.enters) if x is None else x).detach().requires_grad_()
        result = self.placed(*(first if entered is None else (entered,)), *(more if self.is_last else ()))
        if self.is_last:
            self.state.losses.append(result.detach())
            result = result / len(self.state.microbatches)
        self._graphs[microbatch] = entered, result
        return None if self.is_last else result.detach()

    def backward(self, microbatch: int, piece: int, gradient: Tensor | None, *, splits: bool) -> Tensor | None:
        entered, result = self._graphs.pop(microbatch)
        run = next(iter(self.placed.programs.values()))
        run.later = self._later.setdefault(microbatch, []) if splits else None
        if self.is_last:
            torch.autograd.backward(result)
        else:
            arrived = torch.empty_like(self.leaves) if gradient is None else gradient
            torch.autograd.backward(result, self.ranks.broadcast(arrived.contiguous()))
        if entered is None:
            return None
        assert entered.grad is not None
        return self.placed.whole_gradient(entered, "input0")

    def recompute(self, microbatch: int, piece: int) -> None:
        raise UsageError("a placed module keeps what its backward pass reads: choose a schedule without recomputation")

    def weights(self, microbatch: int, piece: int) -> None:
        own, trace = dict(self.placed.named_parameters()), next(iter(self.placed.programs.values())).trace
        [compute] = self._later.pop(microbatch)
        for name, gradient in zip(trace.gradients, compute(), strict=False):  # those of inputs are none of these
            before = own[name].grad
            own[name].grad = gradient if before is None else before + gradient

    def landing(self, microbatch: int, piece: int, of: Payload) -> Tensor:
        return torch.empty_like(self.enters if of == "activation" else self.leaves)


class StagedModule(nn.Module):
    """This rank's chunks, by their numbers, and the step that runs them. See `stage`."""

    def __init__(
        self, comm: Communicator, chunks: Mapping[int, PlacedChunk], run: Callable[[], None], leads: Sequence[int]
    ) -> None:
        super().__init__()
        self.comm, self.run, self.leads = comm, run, leads
        """Leads: of each chunk the rank that speaks for it."""
        self.passers = dict(chunks)
        self.chunks = nn.ModuleDict({str(number): chunk.placed for number, chunk in chunks.items()})

    def step(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Forward and backward passes of a step (a collective call): gradients are those of the mean of the
        microbatches' losses, which is returned, on every rank. The same microbatches on every rank."""
        state = next(iter(self.passers.values())).state
        state.microbatches, state.losses = microbatches, []
        self.run()
        mean = torch.stack(state.losses).mean() if state.losses else torch.zeros((), dtype=torch.float64)
        shared = self.comm.broadcast(mean.double().reshape(1).cpu(), root=self.leads[-1])
        return torch.as_tensor(shared).reshape(())

    @torch.no_grad()
    def evaluate(self, first: Sequence[Tensor], more: Sequence[Tensor]) -> Tensor:
        """The loss of a forward pass, on every rank (a collective call)."""
        entering = first
        for number, lead in enumerate(self.leads):
            result = None
            if number in self.passers:
                chunk = self.passers[number]
                result = {"x": chunk.placed(*entering, *(more if chunk.is_last else ()))}
            entering = [dict(handed_around(self.comm, result if self.comm.rank == lead else None, lead))["x"]]
        return entering[0]

    def gather(self) -> dict[str, Tensor] | None:
        """Whole tensors on rank 0, None on the others (a collective call): by chunk and name, as `1.weight`."""
        wholes: dict[str, Tensor] = {}
        for number, lead in enumerate(self.leads):
            mine = self.passers[number].placed.gather() if number in self.passers else None
            state = {f"{number}.{name}": value for name, value in mine.items()} if mine is not None else None
            wholes |= dict(handed_around(self.comm, state, lead))
        return wholes if self.comm.rank == 0 else None


def stage(
    modules: Sequence[nn.Module],
    comm: Communicator,
    meshes: Sequence[Mapping[str, int]],
    microbatches: Sequence[Microbatch],
    *,
    pins: Sequence[Pins] = (),
    schedule: str = "1f1b",
    joints: Joints = lambda *of: None,
) -> StagedModule:
    """Modules on the stages of a pipeline (a collective call): each but the first is called with what the one before
    gives, one tensor, and the last, with what a microbatch has for it besides, gives the loss.

    `meshes`: of each stage the sizes of its axes; ranks are taken in order. `microbatches`: a step's, as an example.
    `pins`: of each module. Schedules with several chunks on a rank take as many modules as they have chunks.
    """
    sizes = [math.prod(axes.values()) for axes in meshes]
    if sum(sizes) != comm.size:
        raise UsageError(f"stages of {' + '.join(map(str, sizes))} ranks and there are {comm.size}: make them agree")
    per_stage, uneven = divmod(len(modules), len(meshes))
    if uneven or not modules:
        raise UsageError(f"{len(modules)} modules on {len(meshes)} stages: give as many to each")
    _require_apart(modules)
    program = exchange(build(schedule, len(meshes), len(microbatches), per_stage if per_stage > 1 else None))
    own = next(at for at in range(len(sizes)) if comm.rank < sum(sizes[: at + 1]))
    ranks = comm.split(own)
    leads = comm.split(0 if comm.rank == sum(sizes[:own]) else None)
    assert ranks is not None
    mesh, state = Mesh(ranks, **meshes[own]), _StepState()
    chunks: dict[int, PlacedChunk] = {}
    example: Sequence[Tensor] = microbatches[0][0]
    stages = [program.placement.rank(number, 0) for number in range(len(modules))]
    for number, module in enumerate(modules):
        is_last, words = number == len(modules) - 1, ""
        if stages[number] == own:
            called = [*example, *(microbatches[0][1] if is_last else ())]
            own_pins: Pins = pins[number] if pins else MappingProxyType({})
            placed = place(module, mesh, own_pins, called, joint=joints(module, mesh, own_pins, called))
            placed.generator.manual_seed(fold_seed(placed.generator.initial_seed(), number))  # its own, in dropout too
            trace = next(iter(placed.programs.values())).trace
            [given, *others] = trace.graph.outputs[: trace.results]
            if others:
                raise UsageError(f"module {number} of a pipeline gives {1 + len(others)} tensors: expected one")
            leaves = torch.empty(given.shape, dtype=dtype_of(given.dtype), device=example[0].device)
            chunks[number] = PlacedChunk(placed, number == 0, is_last, ranks, example[0], leaves, state)
            words = json.dumps([list(leaves.shape), given.dtype])
        shape, dtype = json.loads(tell(comm, words, sum(sizes[: stages[number]])))
        example = [torch.empty(shape, dtype=dtype_of(dtype), device=example[0].device, requires_grad=True)]
    run = StepRunner(program, leads, chunks) if leads is not None else partial(_follow, program.actions[own], chunks)
    return StagedModule(comm, chunks, run, [sum(sizes[:at]) for at in stages])


def _require_apart(modules: Sequence[nn.Module]) -> None:
    owners: dict[int, str] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            own = f"{name} of module {number}"
            owner = owners.setdefault(id(parameter), own)
            if owner != own and parameter.requires_grad:
                raise UsageError(
                    f"{own} of a pipeline is {owner}, and each would train a copy by its own part of the gradient: "
                    "give each module its own, or train them as one stage"
                )


def _follow(actions: Sequence[Action], chunks: Mapping[int, PlacedChunk]) -> None:
    """The passes of a list, by a rank that its stage's first one gives what it was sent."""
    for part in (part for action in actions for part in parts(action)):
        chunk, place = chunks[part.chunk], (part.microbatch, part.slice)
        if part.kind == "F":
            chunk.forward(*place, None, keeps=True)
        elif part.kind == "W":
            chunk.weights(*place)
        else:
            chunk.backward(*place, None, splits=part.kind == "I")
