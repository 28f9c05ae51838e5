"""The arithmetic of a mesh: a rank as a place on named axes, and the ranks that stand along some of them.

The one idea: a rank is a number written in mixed radix, the axis of most traffic first. Neighbours in tensor
parallelism are then neighbours in rank (and on a node), and every group follows from (rank, axes) alone. Plain values;
`parallel/mesh.py` adds communicators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from tilemesh.core.errors import UsageError

ORDER = ("tp", "cp", "dp", "pp")
"""Fastest first. Axes of other names come after these, in the order in which they were given."""

BATCH = ("dp", "cp")
"""Axes along which ranks take different rows or tokens of the batch: losses and gradients are sums over them."""

Axes = tuple[tuple[str, int], ...]
"""(name, size) of every axis, the one along which rank numbers vary fastest first."""
Blocks = tuple[tuple[str, int], ...]
"""(name of an axis, how many consecutive ranks along it): what a group of ranks spans. With "dp/2" for a name, so many
of which each stands two places after the one before."""


def ordered(sizes: Mapping[str, int]) -> Axes:
    """The axes of a mesh in their order; sizes must be whole numbers of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"{name} is {size!r}: expected a whole number of at least 1")
    known = [name for name in ORDER if name in sizes]
    return tuple((name, sizes[name]) for name in (*known, *(name for name in sizes if name not in ORDER)))


def ranks_of(axes: Axes) -> int:
    """How many ranks the mesh has."""
    return math.prod(size for _, size in axes)


def size_of(axes: Axes, name: str) -> int:
    """Of one axis; 1 where the mesh has none of this name."""
    return dict(axes).get(name, 1)


def coordinates(rank: int, axes: Axes) -> dict[str, int]:
    """Where a rank stands on each axis."""
    place = {}
    for name, size in axes:
        rank, place[name] = divmod(rank, size)
    return place


def place_among(rank: int, blocks: Blocks, axes: Axes) -> int:
    """Which of the ranks in one block this one is, in order of rank where the blocks' axes are in their order."""
    place, among, stride = coordinates(rank, axes), 0, 1
    for name, count in blocks:
        among, stride = among + place.get(name, 0) % count * stride, stride * count
    return among


def strided(name: str) -> tuple[str, int]:
    """The axis that a block's name is of, and how far apart its ranks stand."""
    axis, _, every = name.partition("/")
    return axis, int(every or 1)


def block_name(axis: str, every: int) -> str:
    """Of ranks so far apart along an axis."""
    return axis if every == 1 else f"{axis}/{every}"


def rank_at(place: Mapping[str, int], axes: Axes) -> int:
    """The rank that stands there: the inverse of `coordinates`."""
    rank = 0
    for name, size in reversed(axes):
        rank = rank * size + place[name]
    return rank


def members(rank: int, blocks: Blocks, axes: Axes) -> tuple[int, ...]:
    """The ranks that stand in one block with this one, in order of rank.

    A block of the axis' size is all of the axis; a smaller one is consecutive ranks along it.
    """
    place = coordinates(rank, axes)
    names = [strided(name)[0] for name, _ in blocks]
    stretches = []
    for name, count in blocks:
        axis, every = strided(name)
        length = count * every
        first = place[axis] // length * length + place[axis] % every
        stretches.append(range(first, first + length, every))
    return tuple(
        sorted(rank_at(place | dict(zip(names, there, strict=True)), axes) for there in itertools.product(*stretches))
    )
