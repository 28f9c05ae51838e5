"""Schedules in one direction: which passes each rank does, in which order.

GPipe (Huang et al. 2019), 1F1B (PipeDream, Narayanan et al. 2019), interleaved 1F1B (Narayanan et al. 2021),
breadth-first (Lamy-Poirier 2023), and ZB-H1 and ZB-H2 (Qi et al. 2024), which split the backward pass and do weight
gradients where 1F1B waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ASYNCHRONOUS
from tilemesh.core.step.action import Action, StepProgram
from tilemesh.core.step.placement import ChunkPlacement, loop


def gpipe(ranks: int, microbatches: int) -> StepProgram:
    """All forward passes, then all backward passes. Keeps the activations of every microbatch."""
    lists = ([Action(kind, rank, m) for kind in ("F", "B") for m in range(microbatches)] for rank in range(ranks))
    return program("gpipe", loop(ranks), microbatches, lists)


def one_f_one_b(ranks: int, microbatches: int) -> StepProgram:
    """As few forward passes ahead as keep all ranks busy: rank r keeps at most p - r microbatches."""
    lists = (_alternating(rank, ranks, microbatches, 1) for rank in range(ranks))
    return program("1f1b", loop(ranks), microbatches, lists)


def interleaved(ranks: int, microbatches: int, per_rank: int) -> StepProgram:
    """1F1B over several chunks per rank, in groups of p microbatches: the bubble is `per_rank` times shorter."""
    if microbatches % ranks:
        raise UsageError(
            f"interleaved: {microbatches} microbatches are no multiple of {ranks} stages; the schedule takes them in "
            "groups of as many as there are stages"
        )
    lists = (_alternating(rank, ranks, microbatches, per_rank) for rank in range(ranks))
    return program("interleaved", loop(ranks, per_rank), microbatches, lists)


def warmup(name: str, rank: int, ranks: int, microbatches: int, per_rank: int = 1) -> int:
    """Forward passes a rank does before its first backward pass, the one that precedes it directly not counted."""
    if name == "gpipe":
        return microbatches - 1
    if name in ("1f1b", *ASYNCHRONOUS):
        return min(microbatches, ranks - rank) - 1
    # All chunks but the last for the first group, and twice the distance to the last rank: there and back.
    return min(microbatches * per_rank - 1, (per_rank - 1) * ranks + 2 * (ranks - 1 - rank))


def _alternating(rank: int, ranks: int, microbatches: int, per_rank: int) -> Iterator[Action]:
    """Warm-up, one forward and one backward in turn, the rest of the backward passes."""
    forwards, backwards = [], []
    for turn in range(microbatches * per_rank):
        group, within = divmod(turn, ranks * per_rank)
        local, m = within // ranks, group * ranks + within % ranks
        forwards.append(Action("F", local * ranks + rank, m))
        backwards.append(Action("B", (per_rank - 1 - local) * ranks + rank, m))
    ahead = warmup("1f1b" if per_rank == 1 else "interleaved", rank, ranks, microbatches, per_rank)
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def breadth_first(ranks: int, microbatches: int, per_rank: int) -> StepProgram:
    """All microbatches on one chunk before the next: a chunk's weights are gathered, and reduced, once per pass."""
    lists = []
    for rank in range(ranks):
        own = range(rank, ranks * per_rank, ranks)
        actions = [Action("F", chunk, m) for chunk in own for m in range(microbatches)]
        actions += [Action("B", chunk, m) for chunk in reversed(own) for m in range(microbatches)]
        lists.append(actions)
    return program("breadth-first", loop(ranks, per_rank), microbatches, lists)


def zb_h1(ranks: int, microbatches: int) -> StepProgram:
    """1F1B's memory, a third of its bubble: rank r puts off r weight gradients, to fill the end of the step."""
    lists = (_zero_bubble(rank, microbatches, ranks - rank, rank) for rank in range(ranks))
    return program("zb-h1", loop(ranks), microbatches, lists)


def zb_h2(ranks: int, microbatches: int) -> StepProgram:
    """No bubble but in the beginning and the end, which shift into those of the neighbouring steps; about twice
    1F1B's memory."""
    lists = (_zero_bubble(rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks))
    return program("zb-h2", loop(ranks), microbatches, lists)


def _zero_bubble(rank: int, microbatches: int, in_flight: int, late: int) -> Iterator[Action]:
    """1F1B with `in_flight` microbatches and the weight gradient `late` microbatches behind the input gradient.

    After the last forward pass, gradients of inputs come first: the rank before waits for them.
    """
    ahead = min(in_flight, microbatches)
    forwards = inputs = weights = 0
    while weights < microbatches:
        if forwards < microbatches and forwards - inputs < ahead:
            yield Action("F", rank, forwards)
            forwards += 1
            continue
        if inputs < microbatches:
            yield Action("I", rank, inputs)
            inputs += 1
        if inputs - weights > late or inputs == microbatches or forwards == microbatches:
            yield Action("W", rank, weights)
            weights += 1


def program(name: str, placement: ChunkPlacement, microbatches: int, lists: Iterable[Iterable[Action]]) -> StepProgram:
    """A program of lists of any kind."""
    return StepProgram(name, placement, microbatches, tuple(tuple(actions) for actions in lists))
