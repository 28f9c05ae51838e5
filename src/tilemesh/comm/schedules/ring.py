"""Everybody talks to the next in line: the fewest bytes, n-1 rounds a lap.

Reduce-scatter is one lap in which each chunk collects contributions on its way to its owner; all-gather is one lap in
which finished chunks are passed on; all-reduce is one after the other. In `segments`, each block travels in pieces, so
that one piece is on the wire while another is reduced. Broadcast and reduce are a pipeline along the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilemesh.comm.schedules.schedule import (
    DATA,
    INPUT,
    NOBODY,
    Round,
    RoundStep,
    Schedule,
    Shift,
    copy,
    recv,
    same,
    send,
    vector,
)


def all_reduce(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, ranks * segments)
        yield from lap(ranks, segments, first=-1, reduce=True)
        yield from lap(ranks, segments, first=0, reduce=False)

    return Schedule("all_reduce", name(segments), ranks, root, ranks * segments, rounds)


def reduce_scatter(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, ranks * segments)
        yield from lap(ranks, segments, first=-1, reduce=True)

    return Schedule("reduce_scatter", name(segments), ranks, root, ranks * segments, rounds)


def all_gather(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield own_block(ranks, segments)
        yield from lap(ranks, segments, first=0, reduce=False)

    return Schedule("all_gather", name(segments), ranks, root, ranks * segments, rounds)


def broadcast(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """Chunk c leaves the rank at distance d from the root in round c + d."""
    chunks = segments if segments > 1 else ranks

    def rounds() -> Iterator[Round]:
        yield root_input(ranks, root, chunks)
        for number in range(chunks + ranks - 2):
            yield tuple(_down_the_line(ranks, root, chunks, number))

    return Schedule("broadcast", name(segments), ranks, root, chunks, rounds)


def reduce(ranks: int, root: int = 0, segments: int = 1) -> Schedule:
    """The broadcast backwards: chunk c leaves the rank at distance d from the root in round c + (n-1-d)."""
    chunks = segments if segments > 1 else ranks

    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, chunks)
        for number in range(chunks + ranks - 2):
            chunk = vector(ranks, lambda r, k=number: k - (ranks - 1 - (r - root) % ranks))  # type: ignore[misc]
            to = _where(ranks, lambda r: r != root, chunk, chunks, -1)
            arrives = vector(ranks, lambda r, c=chunk: c[(r + 1) % ranks])  # type: ignore[misc]
            source = _where(ranks, lambda r: (r + 1) % ranks != root, arrives, chunks, 1)
            yield (send(to, chunk, same(ranks, 1)), recv(source, arrives, same(ranks, 1), reduce=True))

    return Schedule("reduce", name(segments), ranks, root, chunks, rounds)


def name(segments: int) -> str:
    return "ring" if segments == 1 else "ring_segmented"


def lap(ranks: int, segments: int, *, first: int, reduce: bool) -> Iterator[Round]:
    """n-1 rounds (times segments): the block at rank + first goes to the next rank, and so on with what arrived."""
    one = same(ranks, 1)
    for k in range(ranks - 1):
        for s in range(segments):
            leaves = Shift(ranks, first - k, segments, s)
            arrives = Shift(ranks, first - k - 1, segments, s)
            yield (send(Shift(ranks, 1), leaves, one), recv(Shift(ranks, -1), arrives, one, reduce=reduce))


# First rounds, which other algorithms share ------------------------------------------------------------------------


def whole_input(ranks: int, chunks: int) -> Round:
    """Every rank's input becomes its data."""
    zero = same(ranks, 0)
    return (copy(zero, INPUT, zero, DATA, zero, same(ranks, chunks)),)


def own_block(ranks: int, segments: int = 1) -> Round:
    """Every rank's input becomes its own block of the data."""
    zero = same(ranks, 0)
    return (copy(zero, INPUT, zero, DATA, Shift(ranks, 0, segments), same(ranks, segments)),)


def root_input(ranks: int, root: int, chunks: int) -> Round:
    zero = same(ranks, 0)
    return (copy(vector(ranks, lambda r: r if r == root else NOBODY), INPUT, zero, DATA, zero, same(ranks, chunks)),)


def _down_the_line(ranks: int, root: int, chunks: int, number: int) -> list[RoundStep]:
    leaves = vector(ranks, lambda r: number - (r - root) % ranks)
    arrives = vector(ranks, lambda r: leaves[(r - 1) % ranks])
    to = _where(ranks, lambda r: (r + 1) % ranks != root, leaves, chunks, 1)
    source = _where(ranks, lambda r: r != root, arrives, chunks, -1)
    one = same(ranks, 1)
    return [send(to, leaves, one), recv(source, arrives, one)]


def _where(
    ranks: int, takes_part: Callable[[int], bool], chunk: tuple[int, ...], chunks: int, step: int
) -> tuple[int, ...]:
    """The neighbour `step` further, for those who take part and whose chunk exists; NOBODY for the others."""
    return vector(ranks, lambda r: (r + step) % ranks if takes_part(r) and 0 <= chunk[r] < chunks else NOBODY)
