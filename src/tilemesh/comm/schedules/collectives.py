"""What each collective promises: which slots a rank starts with, and what it must end with.

A slot's content is a label and the set of ranks whose contributions are in it. For all but all_to_all the label is
the chunk's number in the whole payload; there it is the chunk's number in what its sender sends, and the contributor is
that sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilemesh.core.errors import UsageError, unknown

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "scatter", "gather")
BLOCKED = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")  # one block a rank
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "barrier",
)


def require_collective(name: str) -> None:
    if name not in COLLECTIVES:
        raise unknown("collective", name, COLLECTIVES)


def cut(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` sizes of which no two differ by more than one, the larger ones first."""
    if parts < 1:
        raise UsageError(f"cannot cut {total} into {parts} parts: expected at least 1")
    base, more = divmod(total, parts)
    return (base + 1,) * more + (base,) * (parts - more)


def starts(collective: str, rank: int, root: int, ranks: int, chunks: int) -> list[tuple[int, int]]:
    """(label, contributor) of each INPUT slot of this rank."""
    segments = max(1, chunks // ranks)
    if collective in ("broadcast", "scatter"):
        return [(c, rank) for c in range(chunks)] if rank == root else []
    if collective in ("all_gather", "gather"):
        return [(rank * segments + s, rank) for s in range(segments)]
    return [(c, rank) for c in range(chunks)]


def ends(collective: str, rank: int, root: int, ranks: int, chunks: int) -> dict[int, tuple[int, frozenset[int]]]:
    """DATA slot -> (label, contributors) that this rank must hold in the end."""
    segments = max(1, chunks // ranks)
    everyone = frozenset(range(ranks))
    mine = range(rank * segments, (rank + 1) * segments)
    if collective in ("all_reduce", "barrier") or (collective == "reduce" and rank == root):
        return {c: (c, everyone) for c in range(chunks)}
    if collective == "broadcast":
        return {c: (c, frozenset({root})) for c in range(chunks)}
    if collective == "reduce_scatter":
        return {c: (c, everyone) for c in mine}
    if collective == "scatter":
        return {c: (c, frozenset({root})) for c in mine}
    if collective == "all_gather" or (collective == "gather" and rank == root):
        return {c: (c, frozenset({c // segments})) for c in range(chunks)}
    if collective == "all_to_all":
        return {c: (rank * segments + c % segments, frozenset({c // segments})) for c in range(chunks)}
    return {}


@dataclass(frozen=True)
class Layout:
    """How many elements each slot of one rank holds."""

    input: tuple[int, ...]
    data: tuple[int, ...]
    temp: int

    def sizes(self, space: int, temp_slots: int) -> tuple[int, ...]:
        return (self.input, self.data, (self.temp,) * temp_slots)[space]


def layout(
    collective: str, rank: int, root: int, ranks: int, chunks: int, sizes: Sequence[int], received: Sequence[int] = ()
) -> Layout:
    """Slot sizes from the payload's: `sizes` is (total,) or, where there is one block a rank, all blocks' sizes.

    For all_to_all `sizes` are the blocks this rank sends and `received` those it gets.
    """
    if collective == "all_to_all":
        pieces = max(1, chunks // ranks)
        sent, got = [tuple(size for block in blocks for size in cut(block, pieces)) for blocks in (sizes, received)]
        return Layout(sent, got, max((*sent, *got), default=0))
    if collective not in BLOCKED:
        data = cut(sizes[0], chunks)
        is_given = collective != "broadcast" or rank == root
        return Layout(data if is_given else (), data, max(data, default=0))
    segments = max(1, chunks // ranks)
    data = tuple(size for block in sizes for size in cut(block, segments))
    if collective in ("all_gather", "gather"):
        inputs = data[rank * segments : (rank + 1) * segments]
    else:
        inputs = data if collective == "reduce_scatter" or rank == root else ()
    return Layout(inputs, data, max(data, default=0))
