"""Through memory that all ranks share: nobody sends, everybody reads what it needs from its neighbours' slots.

One sync before (the inputs are there) and one after (nobody reads them any more). `all_reduce` has two forms: every
rank adds up everything itself (small sizes: fewest syncs), or each reduces one slice and then reads the others' slices
(large sizes: every byte is read once for the sum and once for the result).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tilemesh.comm.schedules.schedule import (
    DATA,
    INPUT,
    NOBODY,
    Round,
    Schedule,
    Shift,
    Step,
    copy,
    read,
    same,
    sync,
    vector,
)


def all_reduce(ranks: int, root: int = 0) -> Schedule:
    """Everybody adds in the same order, 0 to n-1, so that all get the same bits."""
    zero, one = same(ranks, 0), same(ranks, 1)
    return _between_syncs(
        "all_reduce",
        ranks,
        root,
        1,
        lambda: [read(same(ranks, k), INPUT, zero, zero, one, reduce=k > 0) for k in range(ranks)],
    )


def all_reduce_slices(ranks: int, root: int = 0) -> Schedule:
    def rounds() -> Iterator[Round]:
        one, mine = same(ranks, 1), Shift(ranks)
        # Each slice is added up by one rank alone, so every rank may begin with its own input.
        yield _meet(ranks, [read(Shift(ranks, k), INPUT, mine, mine, one, reduce=k > 0) for k in range(ranks)])
        yield _meet(
            ranks, [read(Shift(ranks, k), DATA, Shift(ranks, k), Shift(ranks, k), one) for k in range(1, ranks)]
        )
        yield _meet(ranks, [])

    return Schedule("all_reduce", "flat_slices", ranks, root, ranks, rounds, shared=True)


def reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    one, mine = same(ranks, 1), Shift(ranks)
    return _between_syncs(
        "reduce_scatter",
        ranks,
        root,
        ranks,
        lambda: [read(Shift(ranks, k), INPUT, mine, mine, one, reduce=k > 0) for k in range(ranks)],
    )


def all_gather(ranks: int, root: int = 0) -> Schedule:
    zero, one = same(ranks, 0), same(ranks, 1)
    return _between_syncs(
        "all_gather",
        ranks,
        root,
        ranks,
        lambda: [read(Shift(ranks, k), INPUT, zero, Shift(ranks, k), one) for k in range(ranks)],
    )


def all_to_all(ranks: int, root: int = 0) -> Schedule:
    one, mine = same(ranks, 1), Shift(ranks)
    return _between_syncs(
        "all_to_all",
        ranks,
        root,
        ranks,
        lambda: [read(Shift(ranks, k), INPUT, mine, Shift(ranks, k), one) for k in range(ranks)],
    )


def broadcast(ranks: int, root: int = 0) -> Schedule:
    zero, one = same(ranks, 0), same(ranks, 1)
    return _between_syncs("broadcast", ranks, root, 1, lambda: [read(same(ranks, root), INPUT, zero, zero, one)])


def scatter(ranks: int, root: int = 0) -> Schedule:
    one, mine = same(ranks, 1), Shift(ranks)
    return _between_syncs("scatter", ranks, root, ranks, lambda: [read(same(ranks, root), INPUT, mine, mine, one)])


def reduce(ranks: int, root: int = 0) -> Schedule:
    zero, one = same(ranks, 0), same(ranks, 1)
    return _between_syncs(
        "reduce",
        ranks,
        root,
        1,
        lambda: [read(_only(ranks, root, k), INPUT, zero, zero, one, reduce=k > 0) for k in range(ranks)],
    )


def gather(ranks: int, root: int = 0) -> Schedule:
    zero, one = same(ranks, 0), same(ranks, 1)
    return _between_syncs(
        "gather",
        ranks,
        root,
        ranks,
        lambda: [read(_only(ranks, root, k), INPUT, zero, same(ranks, k), one) for k in range(ranks)],
    )


def _between_syncs(collective: str, ranks: int, root: int, chunks: int, steps: Callable[[], list[Step]]) -> Schedule:
    def rounds() -> Iterator[Round]:
        yield _meet(ranks, steps())
        yield _meet(ranks, [])

    return Schedule(collective, "flat", ranks, root, chunks, rounds, shared=True)


def _meet(ranks: int, steps: list[Step]) -> Round:
    """A sync, then the steps; what a rank would read from itself it copies."""
    if ranks == 1:  # nobody to meet
        return tuple(copy(step.peer, step.source, step.source_at, step.space, step.at, step.count) for step in steps)
    return (sync(same(ranks, 0)), *steps)


def _only(ranks: int, reader: int, whom: int) -> tuple[int, ...]:
    return vector(ranks, lambda r: whom if r == reader else NOBODY)
