"""Schedules in two directions or in a V that overlap a forward with a backward pass: DualPipe, DualPipeV and Chimera.

DualPipe (DeepSeek-AI 2024) feeds microbatches from both ends of the pipeline; DualPipeV cuts it in half, so that each
rank has the two chunks of a V and weights are held once. Chimera (Li and Hoefler 2021) merges two pipelines, one from
either end, whose passes never fall on the same slot.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.errors import UsageError
from tilemesh.core.step.action import Action, Kind, StepProgram
from tilemesh.core.step.placement import two_ways, vee


def dual_pipe(ranks: int, microbatches: int) -> StepProgram:
    """Both directions at once; ranks r and p-1-r hold the same two chunks."""
    if ranks % 2 or microbatches % 2:
        raise UsageError(f"dualpipe: {ranks} stages and {microbatches} microbatches, expected even numbers of both")
    _require_microbatches("dualpipe", microbatches, 2 * ranks)
    lists = []
    for rank in range(ranks):
        place = min(rank, ranks - 1 - rank)
        # The stream that begins nearer to this rank is its first: even microbatches in the upper half.
        own, other = (0, 1) if rank < ranks // 2 else (1, 0)
        streams = [
            [(ranks - 1 - rank if way else rank, m) for m in range(way, microbatches, 2)] for way in (own, other)
        ]
        lists.append(tuple(_eight_phases(place, ranks // 2, streams)))
    return StepProgram("dualpipe", two_ways(ranks), microbatches, tuple(lists))


def dual_pipe_v(ranks: int, microbatches: int) -> StepProgram:
    """DualPipe folded into a V: two chunks per rank and no second copy of the weights."""
    _require_microbatches("dualpipe-v", microbatches, 2 * ranks)
    lists = []
    for rank in range(ranks):
        streams = [[(chunk, m) for m in range(microbatches)] for chunk in (rank, 2 * ranks - 1 - rank)]
        lists.append(tuple(_eight_phases(rank, ranks, streams)))
    return StepProgram("dualpipe-v", vee(ranks), microbatches, tuple(lists))


def _require_microbatches(name: str, microbatches: int, least: int) -> None:
    if microbatches < least:
        raise UsageError(f"{name}: {microbatches} microbatches, expected at least {least}, two for every stage")


class _Writer:
    """A rank's list under way: passes of two streams, each in the order of its microbatches."""

    def __init__(self, streams: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.streams = streams
        self.done = {(kind, stream): 0 for kind in "FB" for stream in (0, 1)}
        self.late: list[Action] = []
        self.actions: list[Action] = []

    def take(self, kind: str, stream: int, written: Kind) -> Action:
        chunk, microbatch = self.streams[stream][self.done[kind, stream]]
        self.done[kind, stream] += 1
        return Action(written, chunk, microbatch)

    def forward(self, stream: int) -> None:
        self.actions.append(self.take("F", stream, "F"))

    def backward(self, stream: int, split: bool = False) -> None:
        action = self.take("B", stream, "I" if split else "B")
        self.actions.append(action)
        if split:
            self.late.append(action._replace(kind="W"))

    def both(self, stream: int) -> None:
        """A forward pass of one stream and a backward pass of the other, overlapped."""
        backward = self.take("B", 1 - stream, "B")
        self.actions.append(self.take("F", stream, "FB")._replace(pair=backward))

    def weight(self) -> None:
        if self.late:
            self.actions.append(self.late.pop(0))


def _eight_phases(place: int, places: int, streams: Sequence[Sequence[tuple[int, int]]]) -> list[Action]:
    """The phases of DualPipe for the rank at `place` of `places` from its end of the pipeline to the middle."""
    inside = places - 1 - place
    count = len(streams[0])
    out = _Writer(streams)
    for _ in range(2 * inside):
        out.forward(0)
    for _ in range(place + 1):
        out.forward(0)
        out.forward(1)
    for _ in range(inside):
        out.backward(1, split=True)
        out.weight()
        out.forward(1)
    for turn in range(count - 2 * places + place + 1):
        if turn == 0 and not inside:  # in the middle, overlapping these two would only delay the first
            out.forward(0)
            out.backward(1)
        else:
            out.both(0)
        out.both(1)
    for _ in range(inside):
        out.backward(1)
        out.both(1)
    for turn in range(2 * (place + 1)):  # the later half leaves its weight gradients for the end
        out.backward(1 - turn % 2, split=turn >= place + 1)
    for _ in range(inside):
        out.weight()
        out.backward(0, split=True)
    while out.late:
        out.weight()
    return out.actions


def chimera(ranks: int, microbatches: int) -> StepProgram:
    """Two 1F1B pipelines from either end, p microbatches at a time, each pass on a slot of its own.

    Slots are those of equally long passes. On the way down, F of the k-th microbatch of a round is on rank r at slot
    r + 2k and B at 2p - 1 - r + 2k; on the way up r counts from the other end. p being even, the two never meet.
    """
    if ranks % 2 or microbatches % 2:
        raise UsageError(f"chimera: {ranks} stages and {microbatches} microbatches, expected even numbers of both")
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for m in range(microbatches):
        turn, within = divmod(m, ranks)
        way, k = within % 2, within // 2
        for chunk in range(ranks):
            rank = ranks - 1 - chunk if way else chunk
            begin = 2 * ranks * turn + 2 * k
            slots[rank].append((begin + chunk, Action("F", chunk, m)))
            slots[rank].append((begin + 2 * ranks - 1 - chunk, Action("B", chunk, m)))
    lists = tuple(tuple(action for _, action in sorted(mine)) for mine in slots)
    return StepProgram("chimera", two_ways(ranks), microbatches, lists)
