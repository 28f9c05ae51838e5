"""From a parallel plan to the whole list of actions of a step: what is planned, drawn, simulated and run is this list.

A plan with pp stages takes its schedule by name. Without a pipeline a step is a list for one rank: its microbatches one
after the other through one chunk, or, where weights are cut over replicas (ZeRO-3) or activations or weights go to
the host's memory, through one chunk per layer, so that gathers and moves have places to stand.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.core.step.action import Action, RoutedLayers, StepProgram
from tilemesh.core.step.passes import exchange, gather, offload, stow
from tilemesh.core.step.placement import ChunkPlacement


@dataclass(frozen=True)
class PlannedStep:
    """A step's lists, and the layers that they are about."""

    program: StepProgram
    layers: tuple[range, ...]
    """Of each chunk. The embedding is with the first, the head with the last."""

    @property
    def is_split(self) -> bool:
        """Whether backward passes are done in two halves, I and W."""
        return "I" in self.program.kinds


def chunk_layers(plan: ParallelPlan, layers: int) -> tuple[int, ...]:
    """How many layers each chunk has: as the plan says, or evenly, the chunks in the middle taking what is over.

    The first chunk has the embedding and the last the head, which are work too.
    """
    if plan.chunk_layers:
        if sum(plan.chunk_layers) != layers:
            raise UsageError(f"chunk_layers add up to {sum(plan.chunk_layers)} layers, the model has {layers}")
        if not _has_own_chunks(plan):
            return plan.chunk_layers
    chunks = plan.chunks
    if _has_own_chunks(plan):
        chunks = -(-layers // max(1, plan.stretch(layers)))
    if chunks > layers:
        raise UsageError(f"{plan.chunks_words} needs as many layers, the model has {layers}")
    base, over = divmod(layers, chunks)
    first = (chunks - over + 1) // 2  # of those in the middle that have one more
    return tuple(base + (first <= chunk < first + over) for chunk in range(chunks))


def settled(plan: ParallelPlan, layers: int) -> ParallelPlan:
    """The plan with the chunks it is run with, where it does not say them."""
    return plan if plan.pp == 1 else replace(plan, chunk_layers=chunk_layers(plan, layers))


def recomputed_layers(plan: ParallelPlan, counts: tuple[int, ...]) -> int:
    """Of the layers in these chunks, those that are computed again in backward passes."""
    if not plan.recompute_stages or plan.pp == 1:
        return sum(counts) if plan.recomputes(0) else 0
    stages = plan.placement.directions[0]
    return sum(count for stage, count in zip(stages, counts, strict=True) if plan.recomputes(stage))


def step_program(
    plan: ParallelPlan, layers: int, *, update: bool = False, experts: Collection[int] = ()
) -> PlannedStep:
    """The step of a plan for a model of so many layers, with all that moves data. `update`: the optimizer's step too.
    `experts`: the layers that have some.

    REDUCE is there where several ranks have parts of a gradient: replicas, or the two holders of a chunk.
    """
    counts = chunk_layers(plan, layers)
    ends = (0, *accumulate(counts))
    if plan.pp > 1:
        program = plan.pipeline.build(plan.pipe_shape)
    else:
        program = one_rank(len(counts), plan.accumulation)
    if "activations" in plan.offloads:
        program = offload(program, ahead=plan.prefetch)
    if "weights" in plan.offloads:
        program = stow(program, plan.prefetch)
    if plan.zero == 3:
        program = gather(program, plan.prefetch)
    has_two = any(len(holders) > 1 for holders in program.placement.holders)
    reduce = "" if plan.dp == 1 and not has_two else "microbatch" if plan.zero > 1 else "step"
    if plan.is_asynchronous:  # their updates, which sum over replicas themselves, are in the lists already
        reduce, update = "", False
    program = exchange(program, reduce=reduce, update=update)
    chunks = tuple(range(begin, end) for begin, end in pairwise(ends))
    return PlannedStep(routed(program, plan, chunks, experts), chunks)


def routed(program: StepProgram, plan: ParallelPlan, chunks: Sequence[range], experts: Collection[int]) -> StepProgram:
    """With what passes exchange where ranks share out the experts of these layers."""
    if plan.ep == 1:
        return program
    of_chunks = []
    for chunk, layers in enumerate(chunks):
        own = plan.on_stage(program.placement.holders[chunk][0])
        every = own.stretch(sum(map(len, chunks)) if plan.pp == 1 else len(layers))
        stretches = (layers[begin : begin + max(1, every)] for begin in range(0, len(layers), max(1, every)))
        with_experts = (tuple(layer for layer in stretch if layer in experts) for stretch in stretches)
        of_chunks.append(RoutedLayers(tuple(filter(None, with_experts)), own.repeats_exchanges))
    return replace(program, routed=tuple(of_chunks))


def one_rank(chunks: int, microbatches: int) -> StepProgram:
    """Every microbatch through all chunks and back, one after the other, on one rank."""
    actions: list[Action] = []
    for m in range(microbatches):
        actions += [Action("F", chunk, m) for chunk in range(chunks)]
        actions += [Action("B", chunk, m) for chunk in reversed(range(chunks))]
    return StepProgram("one rank", ChunkPlacement("one rank", 1, ((0,) * chunks,)), microbatches, (tuple(actions),))


def _has_own_chunks(plan: ParallelPlan) -> bool:
    """Whether a step on one stage has a chunk per layer, or per stretch of layers that are computed again together."""
    return plan.pp == 1 and plan.has_chunks
