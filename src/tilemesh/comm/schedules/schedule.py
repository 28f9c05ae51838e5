"""What a schedule is: lazy rounds, in which each step says for all ranks at once who does what with which slots.

Every rank owns three rows of slots: INPUT (what the caller gave; never written), DATA (where the result grows) and
TEMP. A round is carried out by each rank in this order:

1. `sync`: meet the others of one's group; what they wrote before is visible after.
2. `copy` and `read`, in the order they stand: from one's own slots, or from a neighbour's on the same node.
3. `send` and `recv`, all at once: every message of a round is received in that same round. A receive that reduces
   combines what arrives with what the slot holds, after all messages of the round are through.

So nobody ever waits for something that another does in a later round, and a circle of waiting cannot form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal, Protocol, TypeAlias

NOBODY = -1

INPUT, DATA, TEMP = 0, 1, 2
SPACES = ("input", "data", "temp")

Kind: TypeAlias = Literal["send", "recv", "copy", "read", "sync"]


class Vector(Protocol):
    """One whole number a rank. A tuple is one; the two below compute theirs when asked."""

    def __getitem__(self, rank: int, /) -> int: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


@dataclass(frozen=True, slots=True)
class Shift:
    """`offset + scale * ((rank + by) mod ranks)`: a ring of any length without a table; scale 0 is a constant."""

    ranks: int
    by: int = 0
    scale: int = 1
    offset: int = 0

    def __getitem__(self, rank: int, /) -> int:
        return self.offset + self.scale * ((rank + self.by) % self.ranks)

    def __len__(self) -> int:
        return self.ranks

    def __iter__(self) -> Iterator[int]:
        if self.scale == 0:
            return repeat(self.offset, self.ranks)
        n, by, scale, offset = self.ranks, self.by % self.ranks, self.scale, self.offset
        return chain(range(offset + scale * by, offset + scale * n, scale), range(offset, offset + scale * by, scale))


@dataclass(frozen=True, slots=True)
class Grid:
    """Ranks in rows of `size`: `offset + across · ((column + right) mod size) + down · ((row + below) mod rows)`.

    What Shift is to a ring, this is to nodes of equal size: rings inside them and rings between them, without a table.
    """

    ranks: int
    size: int
    across: int = 1
    right: int = 0
    down: int = 0
    below: int = 0
    offset: int = 0

    def __getitem__(self, rank: int, /) -> int:
        row, column = divmod(rank, self.size)
        at = self.offset + self.across * ((column + self.right) % self.size)
        return at + self.down * ((row + self.below) % (self.ranks // self.size))

    def __len__(self) -> int:
        return self.ranks

    def __iter__(self) -> Iterator[int]:
        return (self[rank] for rank in range(self.ranks))


@dataclass(frozen=True, slots=True)
class Sparse:
    """A few ranks have a value, all others NOBODY."""

    ranks: int
    values: Mapping[int, int]

    def __getitem__(self, rank: int, /) -> int:
        return self.values.get(rank, NOBODY)

    def __len__(self) -> int:
        return self.ranks

    def __iter__(self) -> Iterator[int]:
        return (self[rank] for rank in range(self.ranks))


@dataclass(frozen=True, slots=True)
class RoundStep:
    """One thing that ranks do in a round. `count` slots from `at` on, in `space`; peer NOBODY sits it out.

    `peer`: whom to send to, receive or read from; for a copy any rank number takes part; for a sync the group.
    `source`, `source_at`: where a copy or a read takes from (a read: the neighbour's slots).
    """

    kind: Kind
    peer: Vector
    at: Vector
    count: Vector
    space: int = DATA
    reduce: bool = False
    source: int = DATA
    source_at: Vector = ()

    def __post_init__(self) -> None:
        if not len(self.source_at):
            object.__setattr__(self, "source_at", self.at)


Round: TypeAlias = tuple[RoundStep, ...]


@dataclass(frozen=True)
class Schedule:
    """One algorithm for one collective and rank count. `make` starts the rounds from the beginning each time.

    `chunks`: into how many DATA is cut (for the collectives with one block a rank, a multiple of the ranks).
    `temp`: how many TEMP slots, each as large as the largest chunk. `shared`: the spaces in which neighbours read.
    """

    collective: str
    algorithm: str
    ranks: int
    root: int
    chunks: int
    make: Callable[[], Iterator[Round]]
    temp: int = 0
    shared: frozenset[int] = frozenset()

    def rounds(self) -> Iterator[Round]:
        return self.make()

    @property
    def segments(self) -> int:
        """Chunks a block, for the collectives that have one block a rank."""
        return max(1, self.chunks // self.ranks)


@dataclass(frozen=True, slots=True)
class Move:
    """One rank's part in a step, in plain numbers."""

    kind: Kind
    peer: int
    space: int
    at: int
    count: int
    reduce: bool
    source: int
    source_at: int


def moves(round_: Round, rank: int) -> list[Move]:
    """What one rank does in a round; steps it sits out, and those of no slots, are left out."""
    result = []
    for step in round_:
        peer = step.peer[rank]
        if peer == NOBODY:
            continue
        count = step.count[rank]
        if count <= 0 and step.kind != "sync":
            continue
        result.append(
            Move(step.kind, peer, step.space, step.at[rank], count, step.reduce, step.source, step.source_at[rank])
        )
    return result


# Making steps -----------------------------------------------------------------------------------------------------


def same(ranks: int, value: int) -> Shift:
    """The same number for every rank."""
    return Shift(ranks, scale=0, offset=value)


def vector(ranks: int, of: Callable[[int], int]) -> tuple[int, ...]:
    return tuple(of(rank) for rank in range(ranks))


def send(to: Vector, at: Vector, count: Vector, space: int = DATA) -> RoundStep:
    return RoundStep("send", to, at, count, space)


def recv(source: Vector, at: Vector, count: Vector, *, reduce: bool = False, space: int = DATA) -> RoundStep:
    return RoundStep("recv", source, at, count, space, reduce)


def copy(who: Vector, source: int, source_at: Vector, space: int, at: Vector, count: Vector) -> RoundStep:
    return RoundStep("copy", who, at, count, space, False, source, source_at)


def read(
    whom: Vector, source: int, source_at: Vector, at: Vector, count: Vector, *, reduce: bool = False, space: int = DATA
) -> RoundStep:
    return RoundStep("read", whom, at, count, space, reduce, source, source_at)


def sync(group: Vector) -> RoundStep:
    nothing = same(len(group), 0)
    return RoundStep("sync", group, nothing, nothing)
