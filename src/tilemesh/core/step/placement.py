"""Which rank runs which chunk: in a loop, in a V, or in two directions at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilemesh.core.errors import UsageError

LOOP, TWO_WAYS = "loop", "two-way"
"""Names of placements whose fullest ranks are known without looking at all."""


@dataclass(frozen=True)
class ChunkPlacement:
    """Ranks of the chunks, once for each direction in which microbatches pass through them.

    With two directions every chunk is held by two ranks; even microbatches go down the first table, odd ones the
    second.
    """

    name: str
    ranks: int
    directions: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        for table in self.directions:
            if len(table) != len(self.directions[0]) or not set(table) <= set(range(self.ranks)):
                raise UsageError(f"placement {self.name}: chunks on ranks {table}, expected ranks below {self.ranks}")

    @property
    def chunks(self) -> int:
        return len(self.directions[0])

    def rank(self, chunk: int, microbatch: int) -> int:
        return self.directions[microbatch % len(self.directions)][chunk]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each chunk's weights."""
        return tuple(tuple(sorted({table[chunk] for table in self.directions})) for chunk in range(self.chunks))

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of each rank."""
        return tuple(
            tuple(chunk for chunk in range(self.chunks) if rank in self.holders[chunk]) for rank in range(self.ranks)
        )


def loop(ranks: int, per_rank: int = 1) -> ChunkPlacement:
    """Chunk c on rank c mod p: after the last rank the chunks begin again at the first."""
    return ChunkPlacement(LOOP, ranks, (tuple(chunk % ranks for chunk in range(ranks * per_rank)),))


def vee(ranks: int) -> ChunkPlacement:
    """Two chunks per rank, down the ranks and up again: the first rank has the first chunk and the last."""
    return ChunkPlacement("v", ranks, ((*range(ranks), *reversed(range(ranks))),))


def two_ways(ranks: int) -> ChunkPlacement:
    """As many chunks as ranks, in both directions: each rank has one chunk of the way down and one of the way up."""
    return ChunkPlacement(TWO_WAYS, ranks, (tuple(range(ranks)), tuple(reversed(range(ranks)))))
