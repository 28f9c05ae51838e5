"""The mesh: every rank's place on named axes, and a communicator along each of them.

The one idea: a rank is a number written in mixed radix, the axis of most traffic first. So `tp_index = rank % tp`,
`dp_index = rank // tp`, neighbours in tensor parallelism are neighbours in rank (and on a node), and every group
follows from (rank, shape) alone. A further axis is one more name in `AXES`. An axis of size 1 exchanges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.errors import UsageError
from tilemesh.parallel.agree import agree

AXES = ("tp", "dp")  # fastest first


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it: itself and the ranks that differ from it along this axis alone."""

    name: str
    size: int
    index: int
    members: tuple[int, ...]
    """Their ranks in the mesh, in order of index."""
    comm: Communicator


def coordinates(rank: int, shape: Mapping[str, int]) -> dict[str, int]:
    """Where a rank stands on each axis."""
    place = {}
    for name in AXES:
        rank, place[name] = divmod(rank, shape[name])
    return place


def rank_at(place: Mapping[str, int], shape: Mapping[str, int]) -> int:
    """The rank that stands there: the inverse of `coordinates`."""
    rank = 0
    for name in reversed(AXES):
        rank = rank * shape[name] + place[name]
    return rank


def members(rank: int, name: str, shape: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks along an axis through this one, in order of index."""
    place = coordinates(rank, shape)
    return tuple(rank_at(place | {name: index}, shape) for index in range(shape[name]))


class Mesh:
    """Ranks of a communicator on a grid. A collective call: every rank of `comm` makes the same mesh."""

    def __init__(self, comm: Communicator, *, dp: int = 1, tp: int = 1) -> None:
        self.comm = comm
        self.shape = {"tp": tp, "dp": dp}
        # Ranks that make different groups would wait for one another for ever.
        agree(comm, {f"mesh.{name}": size for name, size in self.shape.items()})
        for name, size in self.shape.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UsageError(f"{name} is {size!r}: expected a whole number of at least 1")
        if math.prod(self.shape.values()) != comm.size:
            raise UsageError(
                f"a mesh of {self} needs {math.prod(self.shape.values())} ranks and there are {comm.size}: "
                "start as many, or change the sizes"
            )
        self.axes = {name: self._axis(name) for name in AXES}
        self._copies: dict[int, Communicator] = {}

    def _axis(self, name: str) -> Axis:
        place = coordinates(self.comm.rank, self.shape)
        group = members(self.comm.rank, name, self.shape)
        comm = None
        # A group of its own even where it is all ranks: calls along an axis then never mix with those on `comm`.
        if len(group) > 1:
            comm = self.comm.split(group[0], key=place[name])
        return Axis(name, len(group), place[name], group, connect("alone") if comm is None else comm)

    @property
    def tp(self) -> Axis:
        """The ranks that share each matrix."""
        return self.axes["tp"]

    @property
    def dp(self) -> Axis:
        """The ranks that hold the same part of the model and take different rows of the batch."""
        return self.axes["dp"]

    def copies(self, count: int) -> Communicator:
        """The ranks of tp that hold the same when a part is held by `count` of them: consecutive ones (collective)."""
        if count == self.tp.size:
            return self.tp.comm
        if count not in self._copies:
            group = self.tp.comm.split(self.tp.index // count, key=self.tp.index)
            assert group is not None
            self._copies[count] = group
        return self._copies[count]

    def close(self) -> None:
        """Give the groups back (a collective call); `comm` stays."""
        for group in self._copies.values():
            group.close()
        for axis in self.axes.values():
            axis.comm.close()

    def __str__(self) -> str:
        return " × ".join(f"{name}={self.shape[name]}" for name in reversed(AXES))

    def describe(self) -> str:
        """The grid as text: a row a replica, a column a part of the model."""
        ranks = [
            [rank_at({"dp": dp, "tp": tp}, self.shape) for tp in range(self.tp.size)] for dp in range(self.dp.size)
        ]
        head = ["", *(f"tp {tp}" for tp in range(self.tp.size))]
        rows = [[f"dp {dp}", *map(str, row)] for dp, row in enumerate(ranks)]
        width = max(len(cell) for row in (head, *rows) for cell in row) + 2
        lines = ["".join(cell.rjust(width) for cell in row) for row in (head, *rows)]
        here = ", ".join(f"{name} {self.axes[name].index}" for name in reversed(AXES))
        title = f"mesh {self}, {self.comm.size} ranks over {self.comm.backend}; this is rank {self.comm.rank}: {here}"
        return "\n".join([title, *lines])
