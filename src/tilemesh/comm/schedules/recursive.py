"""Partners at distances 1, 2, 4, …: about log2(n) rounds.

Doubling: everybody exchanges all it has (all-reduce of small sizes, all-gather, barrier). Halving: partners split what
is left between them (reduce-scatter); halving then doubling is Rabenseifner's all-reduce, which also moves few bytes.
With p the largest power of two up to n, ranks p … n-1 first hand their part to rank - p and get the result in the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilemesh.comm.schedules.ring import own_block, whole_input
from tilemesh.comm.schedules.schedule import NOBODY, Round, RoundStep, Schedule, Shift, Vector, recv, same, send, vector


def all_reduce(ranks: int, root: int = 0) -> Schedule:
    """Recursive doubling of the whole vector."""

    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, 1)
        yield from fold_in(ranks, 1)
        for distance in distances(ranks):
            partner = _partner(ranks, distance)
            yield _swap(partner, same(ranks, 0), same(ranks, 0), same(ranks, 1), reduce=True)
        yield from hand_out(ranks, same(ranks, 0), same(ranks, 1))

    return Schedule("all_reduce", "recursive_doubling", ranks, root, 1, rounds)


def barrier(ranks: int, root: int = 0) -> Schedule:
    """Dissemination: in round k tell the rank 2^k further; after ceil(log2 n) rounds everybody has heard of all."""

    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, 1)
        zero, one = same(ranks, 0), same(ranks, 1)
        distance = 1
        while distance < ranks:
            yield (send(Shift(ranks, distance), zero, one), recv(Shift(ranks, -distance), zero, one, reduce=True))
            distance *= 2

    return Schedule("barrier", "recursive_doubling", ranks, root, 1, rounds)


def all_gather(ranks: int, root: int = 0) -> Schedule:
    """Doubling of what is held: blocks of an aligned group of ranks, and those of the ranks folded onto them."""
    power = below(ranks)

    def rounds() -> Iterator[Round]:
        yield own_block(ranks)
        if ranks > power:
            extra = vector(ranks, lambda r: r - power if r >= power else NOBODY)
            host = vector(ranks, lambda r: r + power if r + power < ranks else NOBODY)
            yield (
                send(extra, Shift(ranks), same(ranks, 1)),
                recv(host, vector(ranks, lambda r: r + power), same(ranks, 1)),
            )
        for distance in distances(ranks):
            yield _swap_groups(ranks, power, distance)
        yield from hand_out(ranks, same(ranks, 0), same(ranks, ranks))

    return Schedule("all_gather", "recursive_doubling", ranks, root, ranks, rounds)


def reduce_scatter(ranks: int, root: int = 0) -> Schedule:
    """Recursive halving; the rank that others were folded onto is responsible for two blocks."""
    power = below(ranks)

    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, ranks)
        yield from fold_in(ranks, ranks)
        for distance in reversed(distances(ranks)):
            yield _swap_groups(ranks, power, distance, halving=True)
        if ranks > power:
            to = vector(ranks, lambda r: r + power if r + power < ranks else NOBODY)
            source = vector(ranks, lambda r: r - power if r >= power else NOBODY)
            yield (
                send(to, vector(ranks, lambda r: r + power), same(ranks, 1)),
                recv(source, Shift(ranks), same(ranks, 1)),
            )

    return Schedule("reduce_scatter", "recursive_halving", ranks, root, ranks, rounds)


def halving_doubling(ranks: int, root: int = 0) -> Schedule:
    """Rabenseifner's all-reduce, over as many chunks as the largest power of two."""
    power = below(ranks)

    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, power)
        yield from fold_in(ranks, power)
        for distance in reversed(distances(ranks)):
            yield _swap_groups(ranks, power, distance, halving=True, chunks=power)
        for distance in distances(ranks):
            yield _swap_groups(ranks, power, distance, chunks=power)
        yield from hand_out(ranks, same(ranks, 0), same(ranks, power))

    return Schedule("all_reduce", "rabenseifner", ranks, root, power, rounds)


def below(ranks: int) -> int:
    """The largest power of two that is at most `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def distances(ranks: int) -> list[int]:
    return [1 << k for k in range(ranks.bit_length() - 1)]


def fold_in(ranks: int, chunks: int) -> Iterator[Round]:
    """Ranks beyond the power of two add all they have to rank - p."""
    power = below(ranks)
    if ranks > power:
        to = vector(ranks, lambda r: r - power if r >= power else NOBODY)
        source = vector(ranks, lambda r: r + power if r + power < ranks else NOBODY)
        zero, all_of_it = same(ranks, 0), same(ranks, chunks)
        yield (send(to, zero, all_of_it), recv(source, zero, all_of_it, reduce=True))


def hand_out(ranks: int, at: Vector, count: Vector) -> Iterator[Round]:
    """Ranks beyond the power of two get the result from rank - p."""
    power = below(ranks)
    if ranks > power:
        to = vector(ranks, lambda r: r + power if r + power < ranks else NOBODY)
        source = vector(ranks, lambda r: r - power if r >= power else NOBODY)
        yield (send(to, at, count), recv(source, at, count))


def _partner(ranks: int, distance: int) -> tuple[int, ...]:
    power = below(ranks)
    return vector(ranks, lambda r: r ^ distance if r < power else NOBODY)


def _swap(partner: Vector, mine: Vector, theirs: Vector, count: Vector, *, reduce: bool) -> tuple[RoundStep, RoundStep]:
    return (send(partner, mine, count), recv(partner, theirs, count, reduce=reduce))


def _swap_groups(ranks: int, power: int, distance: int, *, halving: bool = False, chunks: int = 0) -> Round:
    """Partners at `distance` exchange the chunks of one another's aligned group of `distance` ranks.

    Doubling sends one's own group's chunks, halving the partner's and reduces. Where each rank has a block, those of
    the folded ranks (p …) go in a message of their own, because they lie elsewhere.
    """
    partner = _partner(ranks, distance)
    own = vector(ranks, lambda r: r // distance * distance)
    other = vector(ranks, lambda r: (r ^ distance) // distance * distance)
    leaves, arrives = (other, own) if halving else (own, other)
    count = same(ranks, distance)
    steps = list(_sends(partner, leaves, arrives, count, count, halving))
    if not chunks and ranks > power:

        def further(at: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
            shifted = tuple(start + power for start in at)
            return shifted, tuple(max(0, min(distance, ranks - start)) for start in shifted)

        (leaves, how_many), (arrives, how_many_back) = further(leaves), further(arrives)
        steps += _sends(partner, leaves, arrives, how_many, how_many_back, halving)
    return tuple(steps)


def _sends(
    partner: Vector, leaves: Vector, arrives: Vector, count: Vector, count_back: Vector, reduce: bool
) -> tuple[RoundStep, RoundStep]:
    return (send(partner, leaves, count), recv(partner, arrives, count_back, reduce=reduce))
