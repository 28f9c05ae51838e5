"""The binomial (minimum spanning) tree: ceil(log2 n) rounds in which the number of those who know doubles.

Counted from the root, rank v's parent is v without its lowest bit. Broadcast and scatter go down the tree, reduce and
gather up; the collectives without a root go up and then down. A subtree's blocks are neighbours except where the count
wraps around past the last rank: those go in a second message.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.comm.schedules.ring import own_block, root_input, whole_input
from tilemesh.comm.schedules.schedule import NOBODY, Round, RoundStep, Schedule, recv, same, send, vector


def broadcast(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield root_input(ranks, root, 1)
        yield from down(ranks, root, 1)

    return Schedule("broadcast", "tree", ranks, root, 1, rounds)


def reduce(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, 1)
        yield from up(ranks, root, 1)

    return Schedule("reduce", "tree", ranks, root, 1, rounds)


def scatter(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield root_input(ranks, root, ranks)
        yield from down(ranks, root, 0)

    return Schedule("scatter", "tree", ranks, root, ranks, rounds)


def gather(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield own_block(ranks)
        yield from up(ranks, root, 0)

    return Schedule("gather", "tree", ranks, root, ranks, rounds)


def all_reduce(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, 1)
        yield from up(ranks, 0, 1)
        yield from down(ranks, 0, 1)

    return Schedule("all_reduce", "tree", ranks, root, 1, rounds)


def barrier(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, 1)
        yield from up(ranks, 0, 1)
        yield from down(ranks, 0, 1)

    return Schedule("barrier", "tree", ranks, root, 1, rounds)


def all_gather(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield own_block(ranks)
        yield from up(ranks, 0, 0)
        yield from down(ranks, 0, ranks)

    return Schedule("all_gather", "tree", ranks, root, ranks, rounds)


def reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, ranks)
        yield from up(ranks, 0, ranks)
        yield from down(ranks, 0, 0)

    return Schedule("reduce_scatter", "tree", ranks, root, ranks, rounds)


def down(ranks: int, root: int, chunks: int) -> Iterator[Round]:
    """From the root outwards, the largest subtree first. `chunks`: the whole payload; 0: each subtree's own blocks."""
    for distance in reversed(_distances(ranks)):
        yield _level(ranks, root, distance, chunks, upwards=False)


def up(ranks: int, root: int, chunks: int) -> Iterator[Round]:
    """Towards the root, leaves first. `chunks`: the whole payload, reduced; 0: each subtree's own blocks, copied."""
    for distance in _distances(ranks):
        yield _level(ranks, root, distance, chunks, upwards=True)


def depth(ranks: int) -> int:
    """Levels of the tree: ceil(log2 n)."""
    return (ranks - 1).bit_length()


def _distances(ranks: int) -> list[int]:
    return [1 << k for k in range(depth(ranks))]


def _level(ranks: int, root: int, distance: int, chunks: int, *, upwards: bool) -> Round:
    """Parents at multiples of 2·distance from the root and their children `distance` further."""

    def child_of(rank: int) -> int:
        place = (rank - root) % ranks
        is_parent = place % (2 * distance) == 0 and place + distance < ranks
        return (rank + distance) % ranks if is_parent else NOBODY

    def parent_of(rank: int) -> int:
        return (rank - distance) % ranks if (rank - root) % ranks % (2 * distance) == distance else NOBODY

    children, parents = vector(ranks, child_of), vector(ranks, parent_of)
    to, source = (parents, children) if upwards else (children, parents)
    if chunks:
        zero, count = same(ranks, 0), same(ranks, chunks)
        return (send(to, zero, count), recv(source, zero, count, reduce=upwards))
    steps: list[RoundStep] = []
    for wrapped in (False, True):
        leaves = _subtree(ranks, root, distance, children if not upwards else vector(ranks, int), wrapped)
        arrives = _subtree(ranks, root, distance, children if upwards else vector(ranks, int), wrapped)
        if any(leaves[1]) or any(arrives[1]):
            steps += [send(to, *leaves), recv(source, *arrives)]
    return tuple(steps)


def _subtree(
    ranks: int, root: int, distance: int, heads: tuple[int, ...], wrapped: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(first block, how many) of the subtree of `distance` ranks under each head: up to the last rank, or past it."""
    at, count = [], []
    for head in heads:
        place = (head - root) % ranks
        size = min(distance, ranks - place) if head != NOBODY else 0
        before_wrap = min(size, ranks - head)
        at.append(0 if wrapped or head == NOBODY else head)
        count.append(size - before_wrap if wrapped else before_wrap)
    return tuple(at), tuple(count)
