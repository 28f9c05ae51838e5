"""Which part of a tensor each rank of a mesh holds, as a plain value.

The one idea: a shard is a list of cuts, each along one dim over one axis of the mesh. Every cut is applied to what the
cuts before it left, so tensor parallelism and then ZeRO, along different dims or the same one, is two cuts. Along each
dim a rank then holds a few stretches of the whole, and its part is their product: a few boxes. All else follows from
the value: what any other rank holds, which ranks hold the same, whose gradients are to be summed, and which one rank
writes a box to a checkpoint. Cuts may be uneven and nothing is padded, so a checkpoint is independent of the layout.

No arrays here: cutting and joining them is in `parallel/shard.py`, reading and writing boxes in `runs/`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property

from tilemesh.core.axes import Axes, Blocks, block_name, coordinates, place_among, ranks_of, size_of, strided
from tilemesh.core.errors import UsageError


@dataclass(frozen=True)
class Box:
    """A rectangular part of an array: where it begins and how long it is along each dim."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """To index the whole array with."""
        return tuple(slice(begin, begin + length) for begin, length in zip(self.begin, self.shape, strict=True))

    def overlap(self, other: Box) -> Box | None:
        """What two boxes share; None where they share nothing."""
        begin = tuple(map(max, self.begin, other.begin))
        ends = zip(self.begin, self.shape, other.begin, other.shape, begin, strict=True)
        shape = tuple(min(a + n, b + m) - start for a, n, b, m, start in ends)
        return None if any(length <= 0 for length in shape) else Box(begin, shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Slices that index this box in an array that holds the outer one."""
        begins = zip(self.begin, outer.begin, self.shape, strict=True)
        return tuple(slice(begin - first, begin - first + length) for begin, first, length in begins)


@dataclass(frozen=True)
class Cut:
    """A cut along one dim over one axis of the mesh, into pieces that differ by at most one unit, larger ones first.

    `parts`: equal blocks stacked along the dim, each cut alike (3 where q, k and v are one matrix).
    `units`: what each block consists of and what stays whole (heads); None: single rows.
    `pieces`: into how many; None: one per rank of the axis. If fewer, consecutive ranks hold the same, equally many;
    with `stride` pieces follow one another at ranks so far apart, again and again: of 1, consecutive ranks hold
    different ones, and those `pieces` apart the same.
    """

    axis: str
    dim: int
    parts: int = 1
    units: int | None = None
    pieces: int | None = None
    stride: int | None = None

    def stretches(self, length: int, size: int, index: int) -> list[tuple[int, int]]:
        """(begin, length) of what rank `index` of `size` keeps of a dim of this length."""
        block = length // self.parts
        units = block if self.units is None else self.units
        unit = block // units if units else 0
        pieces = self.pieces or size
        first, count = share(units, pieces, index // (self.stride or size // pieces) % pieces)
        return [(part * block + first * unit, count * unit) for part in range(self.parts)]


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """(begin, length) of one part when `total` is cut into parts that differ by at most one, the larger ones first."""
    base, more = divmod(total, parts)
    return index * base + min(index, more), base + (index < more)


@dataclass(frozen=True)
class Span:
    """A stretch along one dim: from `local` in the rank's own tensor, from `whole` in the whole one."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Shard:
    """What one rank of a mesh holds of one parameter."""

    name: str
    """Of the parameter in the whole model, which is also its name in the local one."""
    whole: tuple[int, ...]
    """Shape of the whole."""
    axes: Axes = ()
    rank: int = 0
    cuts: tuple[Cut, ...] = ()
    """In the order in which they are applied, at most one for each axis."""
    partial: tuple[str, ...] = ()
    """Axes along which each rank that holds the same box has only a part of its gradient: their sum is the gradient."""
    holders: tuple[int, ...] = ()
    """Places on pp whose ranks hold the parameter; empty: all. Each of several has only a part of its gradient."""
    spread: Blocks = ()
    """(axis, n): along it every n-th place holds it, the others nothing: experts that replicas share out. Of several
    axes the first is counted fastest ..."""
    at: int = 0
    """... and which of the places in one such block it is."""

    def __post_init__(self) -> None:
        lengths = list(self.whole)
        if not 0 <= self.rank < ranks_of(self.axes):
            raise UsageError(f"{self.name}: rank {self.rank} of a mesh of {ranks_of(self.axes)}")
        if len({cut.axis for cut in self.cuts}) < len(self.cuts):
            raise UsageError(f"{self.name} is cut twice over one axis: {self.cuts}")
        for cut in self.cuts:
            size = size_of(self.axes, cut.axis)
            if not 0 <= cut.dim < len(lengths):
                raise UsageError(f"{self.name} of shape {self.whole} has no dim {cut.dim} to cut over {cut.axis}")
            length = lengths[cut.dim]
            if length % cut.parts or (cut.units and length // cut.parts % cut.units):
                raise UsageError(f"{self.name}: {length} along dim {cut.dim} cannot be cut by {cut}")
            if size % (cut.pieces or size):
                raise UsageError(f"{self.name}: {size} ranks of {cut.axis} cannot hold {cut.pieces} pieces alike")
            index = coordinates(self.rank, self.axes).get(cut.axis, 0)
            lengths[cut.dim] = sum(kept for _, kept in cut.stretches(length, size, index))

    # What is where ------------------------------------------------------------------------------------------------

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """For each dim the stretches of the whole that this rank holds, in the order of its own tensor."""
        by_dim: list[tuple[Span, ...]] = [(Span(0, 0, length),) if length else () for length in self.whole]
        place = coordinates(self.rank, self.axes)
        for cut in self.cuts:
            length = sum(span.length for span in by_dim[cut.dim])
            kept = cut.stretches(length, size_of(self.axes, cut.axis), place.get(cut.axis, 0))
            by_dim[cut.dim] = _kept(by_dim[cut.dim], kept)
        return tuple(by_dim) if self.is_here else ((), *by_dim[1:])[: len(by_dim)]

    @property
    def is_here(self) -> bool:
        """Whether this rank is among those that hold any of it."""
        return place_among(self.rank, self.spread, self.axes) == self.at

    @property
    def every(self) -> int:
        """How many ranks share out what it is one of."""
        return math.prod(count for _, count in self.spread)

    def apart(self, axis: str) -> int:
        """How far apart along an axis those are that hold any of it."""
        return dict(self.spread).get(axis, 1)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        return tuple(sum(span.length for span in spans) for spans in self.spans)

    @cached_property
    def boxes(self) -> tuple[tuple[Box, Box], ...]:
        """(in the local tensor, in the whole one) of each box; together they are all of the local tensor, once."""
        return tuple(
            (
                Box(tuple(span.local for span in spans), tuple(span.length for span in spans)),
                Box(tuple(span.whole for span in spans), tuple(span.length for span in spans)),
            )
            for spans in (itertools.product(*self.spans) if self.is_here else ())
        )

    # Who else -----------------------------------------------------------------------------------------------------

    def on(self, rank: int) -> Shard:
        """The same parameter as another rank of the mesh holds it."""
        return replace(self, rank=rank)

    def cut_over(self, cut: Cut) -> Shard:
        """Cut once more."""
        return replace(self, cuts=(*self.cuts, cut))

    def by_replica(self) -> Shard:
        """With a first dim of replicas, of which each rank has its own: for what differs between them."""
        cuts = tuple(replace(cut, dim=cut.dim + 1) for cut in self.cuts)
        return replace(self, whole=(size_of(self.axes, "dp"), *self.whole), cuts=(Cut("dp", 0), *cuts))

    def copies_along(self, axis: str) -> int:
        """How many ranks along an axis hold the same: all of them, or where it cuts, mostly 1."""
        if axis == "pp" and self.holders:
            return 1
        cut, size = self._cut_over(axis), size_of(self.axes, axis)
        copies = size if cut is None else size // (cut.pieces or size)
        return copies // self.apart(axis)

    def _cut_over(self, axis: str) -> Cut | None:
        return next((cut for cut in self.cuts if cut.axis == axis), None)

    @property
    def replicas(self) -> Blocks:
        """Along which axes, and in blocks of how many, consecutive ranks hold the same boxes as this one; not those of
        other stages of a pipeline, which are `holders`."""
        apart = {cut.axis for cut in self.cuts if cut.stride}
        blocks = ((name, self.copies_along(name)) for name, _ in self.axes if name not in apart)
        return tuple((block_name(name, self.apart(name)), count) for name, count in blocks if count > 1)

    @property
    def copies(self) -> int:
        """How many ranks of the whole mesh hold the same boxes."""
        return math.prod(self.copies_along(name) for name, _ in self.axes) * max(1, len(self.holders))

    @property
    def summed(self) -> Blocks:
        """Those of the replicas whose gradients have to be summed."""
        return tuple((name, count) for name, count in self.replicas if strided(name)[0] in self.partial)

    @property
    def alike(self) -> int:
        """How many ranks have the very same gradient before any is summed."""
        return math.prod(count for name, count in self.replicas if strided(name)[0] not in self.partial)

    @property
    def writes(self) -> bool:
        """Whether this is the one of all ranks with the same boxes that writes them to a checkpoint: the first."""
        place = coordinates(self.rank, self.axes)
        if self.holders and place["pp"] != self.holders[0]:
            return False
        return all(self._is_first_along(name, index) for name, index in place.items())

    def _is_first_along(self, axis: str, index: int) -> bool:
        cut, copies = self._cut_over(axis), self.copies_along(axis)
        if (cut is not None and cut.stride) or self.apart(axis) > 1:
            return index < size_of(self.axes, axis) // copies
        return index % copies == 0


def _kept(spans: tuple[Span, ...], stretches: list[tuple[int, int]]) -> tuple[Span, ...]:
    """What is left of spans when only these stretches of the local dim are kept; neighbours become one."""
    kept: list[Span] = []
    local = 0
    for begin, length in stretches:
        for span in spans:
            first = max(begin, span.local)
            count = min(begin + length, span.local + span.length) - first
            if count <= 0:
                continue
            place_in_whole = span.whole + first - span.local
            if kept and kept[-1].whole + kept[-1].length == place_in_whole:
                kept[-1] = replace(kept[-1], length=kept[-1].length + count)
            else:
                kept.append(Span(local, place_in_whole, count))
            local += count
    return tuple(kept)
