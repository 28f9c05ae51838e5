"""In round k everybody sends to the rank k further and receives from the rank k back: each pair talks once, directly.

The way to exchange large blocks: every byte crosses once and no rank is anybody's bottleneck. The same pattern serves
reduce-scatter (what arrives is added at once) and all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.comm.schedules.ring import own_block, whole_input
from tilemesh.comm.schedules.schedule import DATA, INPUT, Round, Schedule, Shift, copy, recv, same, send


def all_to_all(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        one = same(ranks, 1)
        yield own_to_own(ranks)
        for k in range(1, ranks):
            # The block for rank d is input slot d; what comes from rank s belongs into data slot s.
            yield (
                send(Shift(ranks, k), Shift(ranks, k), one, space=INPUT),
                recv(Shift(ranks, -k), Shift(ranks, -k), one),
            )

    return Schedule("all_to_all", "pairwise", ranks, root, ranks, rounds)


def reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        one = same(ranks, 1)
        yield whole_input(ranks, ranks)
        for k in range(1, ranks):
            yield (
                send(Shift(ranks, k), Shift(ranks, k), one),
                recv(Shift(ranks, -k), Shift(ranks), one, reduce=True),
            )

    return Schedule("reduce_scatter", "pairwise", ranks, root, ranks, rounds)


def all_gather(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        one = same(ranks, 1)
        yield own_block(ranks)
        for k in range(1, ranks):
            yield (send(Shift(ranks, k), Shift(ranks), one), recv(Shift(ranks, -k), Shift(ranks, -k), one))

    return Schedule("all_gather", "pairwise", ranks, root, ranks, rounds)


def own_to_own(ranks: int) -> Round:
    """The block that each rank sends to itself."""
    return (copy(same(ranks, 0), INPUT, Shift(ranks), DATA, Shift(ranks), same(ranks, 1)),)
