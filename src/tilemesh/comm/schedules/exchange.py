"""All-to-all in two levels: few, large messages between nodes, for twice the copies and one more trip inside the node.

What a node sends to the p-th rank of another node is collected by its own p-th rank first (modulo its size, where the
nodes differ) and then crosses in one message, straight to the rank it is meant for. With full nodes of s ranks that is
s-1 messages inside and n/s-1 between nodes, instead of n-1. Blocks travel packed in TEMP, whose slots are as large as
the largest block: in the first half what leaves, in the second what has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tilemesh.comm.schedules.hierarchical import NODE_SIZE, Nodes
from tilemesh.comm.schedules.schedule import (
    DATA,
    INPUT,
    TEMP,
    Round,
    RoundStep,
    Schedule,
    Sparse,
    copy,
    recv,
    same,
    send,
)


def all_to_all(ranks: int, root: int = 0, node_size: int = NODE_SIZE) -> Schedule:
    exchange = _Exchange(ranks, node_size)

    def rounds() -> Iterator[Round]:
        yield exchange.pack()
        yield from exchange.inside()
        yield exchange.repack()
        yield from exchange.between()
        yield exchange.unpack()

    return Schedule("all_to_all", "hierarchical", ranks, root, ranks, rounds, temp=2 * exchange.half)


@dataclass(frozen=True)
class _Exchange:
    ranks: int
    node_size: int

    @cached_property
    def nodes(self) -> list[range]:
        return Nodes(self.ranks, self.node_size).members

    @cached_property
    def home(self) -> list[range]:
        """The node of each rank."""
        return [node for node in self.nodes for _ in node]

    @cached_property
    def carried(self) -> list[list[int]]:
        """For whom each rank collects in its node: first itself, then those it serves in other nodes."""
        result = []
        for rank, node in enumerate(self.home):
            served = [other[place] for other in self.nodes if other != node for place in self._served(rank, other)]
            result.append([rank, *served])
        return result

    @cached_property
    def half(self) -> int:
        return max(self.ranks, *(len(node) * len(mine) for node, mine in zip(self.home, self.carried, strict=True)))

    def _served(self, rank: int, other: range) -> range:
        """The places in another node for which this rank carries."""
        node = self.home[rank]
        return range(rank - node[0], len(other), len(node))

    def _packed_at(self, rank: int, carrier: int) -> int:
        """Where a rank packs what that neighbour will carry."""
        node = self.home[rank]
        return sum(len(self.carried[before]) for before in node if before < carrier and before != rank)

    def _collected_at(self, carrier: int, place: int) -> int:
        """Where a rank keeps what it has collected from that place in its node."""
        return self.half + place * len(self.carried[carrier])

    def pack(self) -> Round:
        """INPUT by who will carry it: the neighbours' loads to be sent, one's own to where the rest of it will come."""
        moved = []
        for rank, node in enumerate(self.home):
            starts = {carrier: self._packed_at(rank, carrier) for carrier in node}
            starts[rank] = self._collected_at(rank, rank - node[0])
            moved.append([(to, starts[c] + i) for c in node for i, to in enumerate(self.carried[c])])
        zero, one = same(self.ranks, 0), same(self.ranks, 1)
        source, target = ([tuple(row[k][side] for row in moved) for k in range(self.ranks)] for side in (0, 1))
        return tuple(copy(zero, INPUT, here, TEMP, there, one) for here, there in zip(source, target, strict=True))

    def inside(self) -> Iterator[Round]:
        """In round k every rank gives the rank k further in its node what that one will carry."""
        for k in range(1, len(self.nodes[0])):
            leaves, arrives = {}, {}
            for rank, node in enumerate(self.home):
                if k < len(node):
                    place = rank - node[0]
                    to, source = node[(place + k) % len(node)], (place - k) % len(node)
                    leaves[rank] = (to, self._packed_at(rank, to), len(self.carried[to]))
                    arrives[rank] = (node[source], self._collected_at(rank, source), len(self.carried[rank]))
            yield (self._send(leaves), self._recv(arrives))

    def repack(self) -> Round:
        """What was collected, sorted by whom it is for: one's own node's blocks are there, the others' go on."""
        steps = []
        for place in range(len(self.nodes[0])):
            for index in range(max(len(mine) for mine in self.carried)):
                moved: dict[int, tuple[int, int, int]] = {}
                for rank, node in enumerate(self.home):
                    if place < len(node) and index < len(self.carried[rank]):
                        target = node[place] if index == 0 else (index - 1) * len(node) + place
                        moved[rank] = (self._collected_at(rank, place) + index, target, 1)
                steps.append(self._copy(moved, DATA if index == 0 else TEMP))
        return tuple(steps)

    def between(self) -> Iterator[Round]:
        """In round k every node sends to the node k further; what comes from rank s lands in place s."""
        count = len(self.nodes)
        for k in range(1, count):
            leaves: list[dict[int, tuple[int, int, int]]] = []
            arrives = {}
            for number, node in enumerate(self.nodes):
                to, source = self.nodes[(number + k) % count], self.nodes[(number - k) % count]
                for rank in node:
                    for turn, place in enumerate(self._served(rank, to)):
                        if turn == len(leaves):
                            leaves.append({})
                        at = (self.carried[rank].index(to[place]) - 1) * len(node)
                        leaves[turn][rank] = (to[place], at, len(node))
                    carrier = source[(rank - node[0]) % len(source)]
                    arrives[rank] = (carrier, self.half + source[0], len(source))
            yield (*map(self._send, leaves), self._recv(arrives))

    def unpack(self) -> Round:
        """What has come from the nodes before one's own, and after it."""
        before = {rank: (self.half, 0, node[0]) for rank, node in enumerate(self.home)}
        after = {
            rank: (self.half + node[-1] + 1, node[-1] + 1, self.ranks - node[-1] - 1)
            for rank, node in enumerate(self.home)
        }
        return (self._copy(before, DATA), self._copy(after, DATA))

    def _send(self, rows: Mapping[int, tuple[int, int, int]]) -> RoundStep:
        return send(*self._columns(rows), space=TEMP)

    def _recv(self, rows: Mapping[int, tuple[int, int, int]]) -> RoundStep:
        return recv(*self._columns(rows), space=TEMP)

    def _copy(self, rows: Mapping[int, tuple[int, int, int]], space: int) -> RoundStep:
        """Rows of (from TEMP slot, to slot of `space`, count)."""
        source, target, count = self._columns(rows)
        return copy(Sparse(self.ranks, dict.fromkeys(rows, 0)), TEMP, source, space, target, count)

    def _columns(self, rows: Mapping[int, tuple[int, int, int]]) -> tuple[Sparse, Sparse, Sparse]:
        first, second, third = (Sparse(self.ranks, {rank: row[i] for rank, row in rows.items()}) for i in range(3))
        return first, second, third
