"""The first thing anybody writes: one rank in the middle, one message after another.

Simple to read and slow on purpose: the root moves n-1 times what the others do, and nobody else works meanwhile. The
line in a benchmark that shows what the other algorithms are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilemesh.comm.schedules.pairwise import own_to_own
from tilemesh.comm.schedules.ring import own_block, root_input, whole_input
from tilemesh.comm.schedules.schedule import INPUT, Round, Schedule, Sparse, recv, same, send


def all_reduce(ranks: int, root: int = 0) -> Schedule:
    return _through_root("all_reduce", ranks, root, 1, whole_input(ranks, 1), lambda: _there_and_back(ranks, 1))


def barrier(ranks: int, root: int = 0) -> Schedule:
    return _through_root("barrier", ranks, root, 1, whole_input(ranks, 1), lambda: _there_and_back(ranks, 1))


def reduce(ranks: int, root: int = 0) -> Schedule:
    return _through_root("reduce", ranks, root, 1, whole_input(ranks, 1), lambda: _collect(ranks, root, 1))


def broadcast(ranks: int, root: int = 0) -> Schedule:
    return _through_root("broadcast", ranks, root, 1, root_input(ranks, root, 1), lambda: _hand_out(ranks, root, 1))


def scatter(ranks: int, root: int = 0) -> Schedule:
    first = root_input(ranks, root, ranks)
    return _through_root("scatter", ranks, root, ranks, first, lambda: _hand_out(ranks, root, 0))


def gather(ranks: int, root: int = 0) -> Schedule:
    return _through_root("gather", ranks, root, ranks, own_block(ranks), lambda: _collect(ranks, root, 0))


def all_gather(ranks: int, root: int = 0) -> Schedule:
    def steps() -> Iterator[Round]:
        yield from _collect(ranks, 0, 0)
        yield from _hand_out(ranks, 0, ranks)

    return _through_root("all_gather", ranks, root, ranks, own_block(ranks), steps)


def reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    def steps() -> Iterator[Round]:
        yield from _collect(ranks, 0, ranks)
        yield from _hand_out(ranks, 0, 0)

    return _through_root("reduce_scatter", ranks, root, ranks, whole_input(ranks, ranks), steps)


def all_to_all(ranks: int, root: int = 0) -> Schedule:
    """Without anybody in the middle, but one message at a time in the whole world."""

    def steps() -> Iterator[Round]:
        for source in range(ranks):
            for target in range(ranks):
                if source != target:
                    yield _message(ranks, source, target, target, source, 1, space=INPUT)

    return _through_root("all_to_all", ranks, root, ranks, own_to_own(ranks), steps)


def _through_root(
    collective: str, ranks: int, root: int, chunks: int, first: Round, rest: Callable[[], Iterator[Round]]
) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield first
        yield from rest()

    return Schedule(collective, "naive", ranks, root, chunks, rounds)


def _there_and_back(ranks: int, chunks: int) -> Iterator[Round]:
    yield from _collect(ranks, 0, chunks)
    yield from _hand_out(ranks, 0, chunks)


def _collect(ranks: int, root: int, chunks: int) -> Iterator[Round]:
    """One rank after another sends to the root: all of the payload to be added, or (chunks 0) its own block."""
    for rank in range(ranks):
        if rank != root:
            at, count = (0, chunks) if chunks else (rank, 1)
            yield _message(ranks, rank, root, at, at, count, reduce=bool(chunks))


def _hand_out(ranks: int, root: int, chunks: int) -> Iterator[Round]:
    """The root sends to one rank after another: all of the payload, or (chunks 0) that rank's block."""
    for rank in range(ranks):
        if rank != root:
            at, count = (0, chunks) if chunks else (rank, 1)
            yield _message(ranks, root, rank, at, at, count)


def _message(
    ranks: int, source: int, target: int, leaves: int, arrives: int, count: int, *, reduce: bool = False, space: int = 1
) -> Round:
    length = same(ranks, count)
    return (
        send(Sparse(ranks, {source: target}), same(ranks, leaves), length, space=space),
        recv(Sparse(ranks, {target: source}), same(ranks, arrives), length, reduce=reduce),
    )
