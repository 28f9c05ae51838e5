"""What a schedule sends: counted step by step, and as closed forms that must agree with the count.

A form is optional: without one, `traffic` counts. The forms are for payloads that divide evenly; `nbytes` is the whole
payload (for collectives with one block a rank: all blocks together). They are per rank, because in a tree or through a
root ranks do not do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from tilemesh.comm.schedules.book import build, is_shared
from tilemesh.comm.schedules.collectives import BLOCKED, Layout, cut, layout
from tilemesh.comm.schedules.recursive import below, distances
from tilemesh.comm.schedules.schedule import NOBODY, Schedule
from tilemesh.comm.schedules.topology import Wire
from tilemesh.comm.schedules.tree import depth
from tilemesh.core.errors import UsageError


@dataclass(frozen=True)
class Traffic:
    """What one rank sends."""

    messages: int = 0
    nbytes: float = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.nbytes + other.nbytes)


def count(schedule: Schedule, layout_of: Callable[[int], Layout], itemsize: int = 1) -> list[Traffic]:
    """What each rank sends, by adding up its steps. Messages without a byte are not sent."""
    messages, elements = [0] * schedule.ranks, [0] * schedule.ranks
    ends: dict[tuple[int, int], list[int]] = {}
    for steps in schedule.rounds():
        for step in steps:
            if step.kind != "send":
                continue
            for rank, peer in enumerate(step.peer):
                if peer == NOBODY or step.count[rank] <= 0:
                    continue
                key = (rank, step.space)
                if key not in ends:
                    ends[key] = [0, *accumulate(layout_of(rank).sizes(step.space, schedule.temp))]
                at = step.at[rank]
                length = ends[key][at + step.count[rank]] - ends[key][at]
                messages[rank] += length > 0
                elements[rank] += length
    return [Traffic(m, e * itemsize) for m, e in zip(messages, elements, strict=True)]


def traffic(
    collective: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    *,
    rank: int = 0,
    root: int = 0,
    segments: int = 4,
    node_size: int = 8,
) -> Traffic:
    """What one rank sends: by the algorithm's closed form, or counted where it has none."""
    if ranks == 1 or is_shared(algorithm):
        return Traffic()  # shared memory is read, not sent
    form = _FORMS.get(algorithm)
    if form is None:
        return _counted(collective, algorithm, ranks, nbytes, root, segments, node_size)[rank]
    return form(_Case(collective, ranks, nbytes, rank, root, segments, node_size))


def seconds(collective: str, algorithm: str, ranks: int, nbytes: float, wire: Wire) -> float:
    """Of a ring or a tree between ranks that each have a wire of their own, in closed form; `simulate` agrees.

    A ring's messages follow one another, and each is a block long; up a tree and down again, the whole buffer passes
    over as many wires as the tree is deep.
    """
    if ranks == 1:
        return 0.0
    if algorithm == "ring":
        return (2 if collective == "all_reduce" else 1) * (ranks - 1) * wire.seconds(nbytes / ranks)
    if (collective, algorithm) != ("all_reduce", "tree"):
        raise UsageError(f"{collective} by {algorithm} has no closed form of its time: simulate its schedule")
    return 2 * depth(ranks) * wire.seconds(nbytes)


@lru_cache(maxsize=64)  # asked for rank after rank
def _counted(
    collective: str, algorithm: str, ranks: int, nbytes: int, root: int, segments: int, node_size: int
) -> list[Traffic]:
    schedule = build(collective, algorithm, ranks, root, segments=segments, node_size=node_size)
    sizes = cut(nbytes, ranks) if collective in BLOCKED else (nbytes,)
    return count(schedule, lambda rank: layout(collective, rank, root, ranks, schedule.chunks, sizes, sizes))


@dataclass(frozen=True)
class _Case:
    collective: str
    ranks: int
    nbytes: int
    rank: int
    root: int
    segments: int = 1
    node_size: int = 8

    @property
    def block(self) -> float:
        return share(self.nbytes, 1, self.ranks)

    @property
    def place(self) -> int:
        """Distance from the root."""
        return (self.rank - self.root) % self.ranks


def share(nbytes: int, part: int, of: int) -> float:
    """nbytes · part / of, whole where it is."""
    return nbytes * part // of if nbytes * part % of == 0 else nbytes * part / of


def _ring(c: _Case, segments: int = 1) -> Traffic:
    lap = Traffic((c.ranks - 1) * segments, share(c.nbytes, c.ranks - 1, c.ranks))
    if c.collective == "all_reduce":
        return lap + lap
    if c.collective in ("reduce_scatter", "all_gather"):
        return lap
    is_last = c.place == (c.ranks - 1 if c.collective == "broadcast" else 0)
    return Traffic() if is_last else Traffic(segments if segments > 1 else c.ranks, c.nbytes)


def _recursive_doubling(c: _Case) -> Traffic:
    power = below(c.ranks)
    if c.collective == "barrier":
        return Traffic(depth(c.ranks), depth(c.ranks) * c.nbytes)
    is_all_reduce = c.collective == "all_reduce"
    if c.rank >= power:
        return Traffic(1, c.nbytes if is_all_reduce else c.block)
    total = Traffic(1, c.nbytes) if c.rank + power < c.ranks else Traffic()
    for distance in distances(c.ranks):
        total += Traffic(1, c.nbytes) if is_all_reduce else _group(c, c.rank, distance)
    return total


def _recursive_halving(c: _Case) -> Traffic:
    power = below(c.ranks)
    if c.rank >= power:
        return Traffic(1, c.nbytes)
    total = Traffic(1, c.block) if c.rank + power < c.ranks else Traffic()
    for distance in distances(c.ranks):
        total += _group(c, c.rank ^ distance, distance)
    return total


def _group(c: _Case, rank: int, distance: int) -> Traffic:
    """The blocks of a rank's aligned group, and those folded onto it in a message of their own."""
    start = rank // distance * distance
    folded = max(0, min(distance, c.ranks - below(c.ranks) - start))
    return Traffic(1 + (folded > 0), (distance + folded) * c.block)


def _rabenseifner(c: _Case) -> Traffic:
    power = below(c.ranks)
    if c.rank >= power:
        return Traffic(1, c.nbytes)
    extra = Traffic(1, c.nbytes) if c.rank + power < c.ranks else Traffic()
    return extra + Traffic(2 * len(distances(c.ranks)), 2 * share(c.nbytes, power - 1, power))


def _tree(c: _Case) -> Traffic:
    down, up = _down(c.ranks, c.root, c.rank), _up(c.ranks, c.root, c.rank)
    if c.collective in ("all_gather", "reduce_scatter", "all_reduce", "barrier"):
        down, up = _down(c.ranks, 0, c.rank), _up(c.ranks, 0, c.rank)
    whole_down = Traffic(len(down), len(down) * c.nbytes)
    whole_up = Traffic(min(1, len(up)), c.nbytes if up else 0)
    blocks_down = Traffic(sum(wraps for _, wraps in down), sum(size for size, _ in down) * c.block)
    blocks_up = Traffic(sum(wraps for _, wraps in up), sum(size for size, _ in up) * c.block)
    return {
        "broadcast": whole_down,
        "reduce": whole_up,
        "scatter": blocks_down,
        "gather": blocks_up,
        "all_reduce": whole_up + whole_down,
        "barrier": whole_up + whole_down,
        "all_gather": blocks_up + whole_down,
        "reduce_scatter": whole_up + blocks_down,
    }[c.collective]


def _down(ranks: int, root: int, rank: int) -> list[tuple[int, int]]:
    """(size, messages) of each child's subtree."""
    place = (rank - root) % ranks
    children = [place + (1 << k) for k in range(depth(ranks)) if place % (2 << k) == 0 and place + (1 << k) < ranks]
    return [_subtree(ranks, root, child, child - place) for child in children]


def _up(ranks: int, root: int, rank: int) -> list[tuple[int, int]]:
    """(size, messages) of what goes to the parent: one's own subtree; nothing from the root."""
    place = (rank - root) % ranks
    return [_subtree(ranks, root, place, place & -place)] if place else []


def _subtree(ranks: int, root: int, place: int, distance: int) -> tuple[int, int]:
    size = min(distance, ranks - place)
    return size, 2 if (place + root) % ranks + size > ranks else 1


def _pairwise(c: _Case) -> Traffic:
    return Traffic(c.ranks - 1, share(c.nbytes, c.ranks - 1, c.ranks))


def _bruck(c: _Case) -> Traffic:
    if c.collective == "all_gather":
        return Traffic(depth(c.ranks), share(c.nbytes, c.ranks - 1, c.ranks))
    travelling = 0  # blocks whose distance to go has this bit
    for bit in (1 << k for k in range(depth(c.ranks))):
        travelling += c.ranks // (2 * bit) * bit + max(0, c.ranks % (2 * bit) - bit)
    return Traffic(depth(c.ranks), share(c.nbytes, travelling, c.ranks))


def _naive(c: _Case) -> Traffic:
    if c.collective == "all_to_all":
        return _pairwise(c)
    is_rooted = c.collective in ("broadcast", "reduce", "scatter", "gather")
    in_the_middle = c.rank == (c.root if is_rooted else 0)
    collected = {"reduce": c.nbytes, "all_reduce": c.nbytes, "barrier": c.nbytes, "reduce_scatter": c.nbytes}
    handed_out = {"broadcast": c.nbytes, "all_reduce": c.nbytes, "barrier": c.nbytes, "all_gather": c.nbytes}
    if in_the_middle:
        each = 0 if c.collective in ("reduce", "gather") else handed_out.get(c.collective, c.block)
        return Traffic((c.ranks - 1) * (each > 0), (c.ranks - 1) * each)
    return Traffic() if c.collective in ("broadcast", "scatter") else Traffic(1, collected.get(c.collective, c.block))


def _hierarchical(c: _Case) -> Traffic:
    size = min(c.node_size, c.ranks)
    first = c.rank // size * size
    here, nodes, node = min(size, c.ranks - first), -(-c.ranks // size), c.rank // size
    if c.collective == "all_to_all":
        return _two_level_exchange(c, size, here, c.rank - first)
    root_node = c.root // size
    is_rooted = c.collective in ("broadcast", "reduce")
    leader = c.root - first if is_rooted and node == root_node else 0
    is_leader = c.rank - first == leader

    def inside(collective: str, nbytes: float) -> Traffic:
        return _tree(_Case(collective, here, int(nbytes), c.rank - first, leader)) if here > 1 else Traffic()

    if c.collective in ("broadcast", "reduce"):
        between = _tree(_Case(c.collective, nodes, c.nbytes, node, root_node)) if nodes > 1 and is_leader else Traffic()
        return between + inside(c.collective, c.nbytes)
    if c.collective == "all_reduce" and c.ranks % c.node_size == 0:
        lap = Traffic(size - 1, share(c.nbytes, size - 1, size))
        rail = Traffic(nodes - 1, share(c.nbytes, nodes - 1, size * nodes))
        return lap + lap + rail + rail
    if c.collective == "all_reduce":
        between = _ring(_Case("all_reduce", nodes, c.nbytes, node, 0)) if is_leader and nodes > 1 else Traffic()
        return inside("reduce", c.nbytes) + between + inside("broadcast", c.nbytes)
    # One block a rank: among the leaders everything but one node's blocks goes round.
    is_gather = c.collective == "all_gather"
    spared = (node + 1) % nodes if is_gather else node
    spared_ranks = min(size, c.ranks - spared * size)
    between = Traffic(nodes - 1, (c.ranks - spared_ranks) * c.block) if is_leader and nodes > 1 else Traffic()
    own = here * c.block
    if is_gather:
        return inside("gather", own) + between + inside("broadcast", c.nbytes)
    return inside("reduce", c.nbytes) + between + inside("scatter", own)


def _two_level_exchange(c: _Case, size: int, here: int, place: int) -> Traffic:
    """One block of each rank for whom a neighbour carries; then all the node's blocks for each that one carries for."""
    last = c.ranks % size or size
    in_a_full_node, in_the_last = (max(0, -(-(length - place) // here)) for length in (size, last))
    carried = (c.ranks - last) // size * in_a_full_node + in_the_last  # oneself included
    return Traffic(here - 1 + carried - 1, (c.ranks - carried + here * (carried - 1)) * c.block)


_FORMS: dict[str, Callable[[_Case], Traffic]] = {
    "ring": _ring,
    "ring_segmented": lambda c: _ring(c, c.segments),
    "recursive_doubling": _recursive_doubling,
    "recursive_halving": _recursive_halving,
    "rabenseifner": _rabenseifner,
    "tree": _tree,
    "pairwise": _pairwise,
    "bruck": _bruck,
    "naive": _naive,
    "hierarchical": _hierarchical,
}
