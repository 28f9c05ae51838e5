"""Schedules that overlap a forward with a backward pass: DualPipe and DualPipeV.

DualPipe (DeepSeek-AI 2024) feeds microbatches from both ends of the pipeline; DualPipeV cuts it in half, so that each
rank has the two chunks of a V and weights are held once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilemesh.core.step.action import Action, Kind
from tilemesh.core.step.placement import two_ways, vee
from tilemesh.core.step.schedule import PipelineSchedule, PipeShape, RankLoad, even_stages


def both_ends(shape: PipeShape) -> Iterator[list[Action]]:
    """Both directions at once; ranks r and p-1-r hold the same two chunks."""
    ranks, microbatches, *_ = shape
    for rank in range(ranks):
        place = min(rank, ranks - 1 - rank)
        # The stream that begins nearer to this rank is its first: even microbatches in the upper half.
        own, other = (0, 1) if rank < ranks // 2 else (1, 0)
        streams = [
            [(ranks - 1 - rank if way else rank, m) for m in range(way, microbatches, 2)] for way in (own, other)
        ]
        yield _eight_phases(place, ranks // 2, streams)


def folded(shape: PipeShape) -> Iterator[list[Action]]:
    """DualPipe folded into a V: two chunks per rank and no second copy of the weights."""
    ranks, microbatches, *_ = shape
    for rank in range(ranks):
        streams = [[(chunk, m) for m in range(microbatches)] for chunk in (rank, 2 * ranks - 1 - rank)]
        yield _eight_phases(rank, ranks, streams)


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


def _waits_s(shape: PipeShape, load: RankLoad) -> float:
    return (load.forward_s + load.input_s - load.weight_s) * (shape.stages / 2 - 1) / (shape.stages - 1)


SCHEDULES = (
    PipelineSchedule(
        "dualpipe",
        "microbatches from both ends, forward passes of one way overlapped with backward passes of the other; weights "
        "are held twice",
        both_ends,
        two_ways,
        is_split=True,
        microbatches=lambda stages: (2 * stages, 2),
        refuses=even_stages("dualpipe"),
        waits_s=_waits_s,
    ),
    PipelineSchedule(
        "dualpipe-v",
        "DualPipe folded into a V: two chunks per stage, weights held once",
        folded,
        vee,
        is_split=True,
        microbatches=lambda stages: (2 * stages, 1),
        waits_s=lambda shape, load: max(load.forward_s, load.forward_s + load.input_s - load.weight_s),
    ),
)
