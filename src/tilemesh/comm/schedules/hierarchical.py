"""Two levels: within each node first, between nodes with one rank per node, then within the nodes again.

For machines whose links inside a node are much faster than those between nodes. Nodes are `node_size` neighbouring
ranks (the last may be smaller). Where all nodes are full, all_reduce lets every rank carry its share between nodes:
reduce-scatter inside, a ring between the ranks of equal place, all-gather inside; otherwise a leader carries it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tilemesh.comm.schedules import ring, tree
from tilemesh.comm.schedules.groups import GroupSchedule, in_groups, spans_of
from tilemesh.comm.schedules.ring import own_block, root_input, whole_input
from tilemesh.comm.schedules.schedule import Grid, Round, Schedule, recv, same, send

NODE_SIZE = 8


@dataclass(frozen=True)
class Nodes:
    """Ranks in nodes; the leader of the root's node is the root, of the others the first rank."""

    ranks: int
    node_size: int
    root: int = 0

    @property
    def members(self) -> list[range]:
        return [range(at, min(at + self.node_size, self.ranks)) for at in range(0, self.ranks, self.node_size)]

    @property
    def leaders(self) -> list[int]:
        return [self.root if self.root in node else node[0] for node in self.members]

    @property
    def roots_node(self) -> int:
        return self.root // self.node_size

    def inside(self, build: Callable[[int, int], Schedule], chunks: int, *, blocks: bool = False) -> Iterator[Round]:
        """A rooted schedule in every node, its root the leader. `blocks`: one block a rank; else the whole payload."""
        parts = []
        for node, leader in zip(self.members, self.leaders, strict=True):
            spans = [(rank, 1) for rank in node] if blocks else [(0, chunks)]
            parts.append(GroupSchedule(build(len(node), leader - node[0]), node, spans))
        return in_groups(self.ranks, parts)

    def between(self, schedule: Schedule, chunks: int, *, blocks: bool = False) -> Iterator[Round]:
        """A schedule among the leaders. `blocks`: chunk j stands for node j's blocks; else for a share of it all."""
        sizes = [len(node) for node in self.members] if blocks else _even(chunks, schedule.chunks)
        return in_groups(self.ranks, [GroupSchedule(schedule, self.leaders, spans_of(sizes))])


def all_reduce(ranks: int, root: int = 0, node_size: int = NODE_SIZE) -> Schedule:
    nodes = Nodes(ranks, node_size)
    count = len(nodes.members)
    size = len(nodes.members[0])
    if ranks % node_size:

        def by_leaders() -> Iterator[Round]:
            yield whole_input(ranks, count)
            yield from nodes.inside(tree.reduce, count)
            yield from nodes.between(ring.all_reduce(count), count)
            yield from nodes.inside(tree.broadcast, count)

        return Schedule("all_reduce", "hierarchical", ranks, root, count, by_leaders)

    chunks = size * count

    def by_all() -> Iterator[Round]:
        """Chunk p·count + j is node j's share of what the ranks at place p carry."""
        yield whole_input(ranks, chunks)
        yield from _inside(ranks, size, first=0, reduce=True)
        yield from _between(ranks, size, first=0, reduce=True)
        yield from _between(ranks, size, first=1, reduce=False)
        yield from _inside(ranks, size, first=1, reduce=False)

    return Schedule("all_reduce", "hierarchical", ranks, root, chunks, by_all)


def _inside(ranks: int, size: int, *, first: int, reduce: bool) -> Iterator[Round]:
    """A lap of the ring inside each node: the slice of the rank `first` places on goes to the next rank, and so on."""
    count = ranks // size
    length = same(ranks, count)
    to, source = (Grid(ranks, size, 1, step, size) for step in (1, -1))
    for k in range(size - 1):
        leaves, arrives = (Grid(ranks, size, count, first - k - later) for later in (0, 1))
        yield (send(to, leaves, length), recv(source, arrives, length, reduce=reduce))


def _between(ranks: int, size: int, *, first: int, reduce: bool) -> Iterator[Round]:
    """The same between the ranks of equal place: each carries its own slice, after the lap inside, round the nodes."""
    count = ranks // size
    one = same(ranks, 1)
    to, source = (Grid(ranks, size, 1, 0, size, step) for step in (1, -1))
    for k in range(count - 1):
        # After the lap inside a rank holds the slice of the place after its own.
        leaves, arrives = (Grid(ranks, size, count, 1, 1, first - k - later) for later in (0, 1))
        yield (send(to, leaves, one), recv(source, arrives, one, reduce=reduce))


def broadcast(ranks: int, root: int = 0, node_size: int = NODE_SIZE) -> Schedule:
    nodes = Nodes(ranks, node_size, root)

    def rounds() -> Iterator[Round]:
        yield root_input(ranks, root, 1)
        yield from nodes.between(tree.broadcast(len(nodes.members), nodes.roots_node), 1)
        yield from nodes.inside(tree.broadcast, 1)

    return Schedule("broadcast", "hierarchical", ranks, root, 1, rounds)


def reduce(ranks: int, root: int = 0, node_size: int = NODE_SIZE) -> Schedule:
    nodes = Nodes(ranks, node_size, root)

    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, 1)
        yield from nodes.inside(tree.reduce, 1)
        yield from nodes.between(tree.reduce(len(nodes.members), nodes.roots_node), 1)

    return Schedule("reduce", "hierarchical", ranks, root, 1, rounds)


def all_gather(ranks: int, root: int = 0, node_size: int = NODE_SIZE) -> Schedule:
    nodes = Nodes(ranks, node_size)

    def rounds() -> Iterator[Round]:
        yield own_block(ranks)
        yield from nodes.inside(tree.gather, ranks, blocks=True)
        yield from nodes.between(ring.all_gather(len(nodes.members)), ranks, blocks=True)
        yield from nodes.inside(tree.broadcast, ranks)

    return Schedule("all_gather", "hierarchical", ranks, root, ranks, rounds)


def reduce_scatter(ranks: int, root: int = 0, node_size: int = NODE_SIZE) -> Schedule:
    nodes = Nodes(ranks, node_size)

    def rounds() -> Iterator[Round]:
        yield whole_input(ranks, ranks)
        yield from nodes.inside(tree.reduce, ranks)
        yield from nodes.between(ring.reduce_scatter(len(nodes.members)), ranks, blocks=True)
        yield from nodes.inside(tree.scatter, ranks, blocks=True)

    return Schedule("reduce_scatter", "hierarchical", ranks, root, ranks, rounds)


def _even(chunks: int, parts: int) -> list[int]:
    return [chunks // parts] * parts


def largest_block(nodes: Sequence[int]) -> int:
    """The most neighbouring ranks that can be taken for a node, for ranks that lie on these nodes: none spans two."""
    first = next((at for at, node in enumerate(nodes) if node != nodes[0]), len(nodes))
    for size in range(first, 1, -1):
        if all(len(set(nodes[at : at + size])) == 1 for at in range(0, len(nodes), size)):
            return size
    return 1
