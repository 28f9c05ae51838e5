"""Who holds what: a batch cut over dp, a parameter cut over tp, as plain values; and the way back.

The one idea: a `Shard` says of one parameter on one rank which stretches of the whole it holds, along which dim, and
follows from (shape, split, tp, index) alone. So any rank can work out what any other holds, cut it from the whole,
put the whole together again, and read a checkpoint that another layout wrote. numpy and torch alike; no torch needed.

Convention (torch's weights are (out, in)): a column split cuts the output, dim 0 of weight and bias; a row split cuts
the input, dim 1 of the weight, and its bias is whole, added once after the partial outputs are summed; a vocabulary
split cuts the rows of a table, padded with zeros to a multiple of tp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilemesh.comm.schedules.collectives import cut
from tilemesh.core.errors import UsageError, unknown


@dataclass(frozen=True)
class Column:
    """Cut by the output.

    `units`: so many pieces must stay whole (heads); with `repeats`, fewer of them than ranks are held by several.
    `parts`: how many equal blocks are stacked in the output, each cut alike (3 where q, k and v are one matrix).
    `joins`: the ranks' outputs are put together again (gather-all), for a layer that no row layer follows.
    """

    units: int | None = None
    repeats: bool = False
    parts: int = 1
    joins: bool = False

    def __post_init__(self) -> None:
        if self.joins and (self.parts > 1 or self.repeats):
            raise UsageError(f"{self}: outputs in several parts, or held by several ranks, cannot be joined end to end")


@dataclass(frozen=True)
class Row:
    """Cut by the input; the ranks' outputs are partial sums."""


@dataclass(frozen=True)
class Vocabulary:
    """A table (or output projection) cut by its rows, padded where they do not divide.

    `joins`: the ranks' parts of an output projection are put together again, without the padding.
    """

    joins: bool = False


@dataclass(frozen=True)
class Region:
    """A module whose input all its column layers share: it is exchanged once, here, not at each of them.

    `divides`: attributes of the module that count heads: each rank keeps its part of them (at least 1).
    """

    divides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Whole:
    """The same on every rank."""


Split = Column | Row | Vocabulary | Region | Whole
KINDS: Mapping[str, Split] = {
    "column": Column(),
    "row": Row(),
    "vocabulary": Vocabulary(),
    "region": Region(),
    "whole": Whole(),
}


def split_of(kind: str | Split) -> Split:
    """A split by its name."""
    if isinstance(kind, Split):
        return kind
    if not isinstance(kind, str):
        raise UsageError(f"a split is {kind!r}: expected one of {', '.join(KINDS)}, or a value such as Column(parts=3)")
    if kind not in KINDS:
        raise unknown("split", kind, KINDS)
    return KINDS[kind]


@dataclass(frozen=True)
class Span:
    """`length` rows along the cut dim: from `local` in the rank's own tensor, from `whole` in the whole one."""

    local: int
    whole: int
    length: int


@dataclass(frozen=True)
class Shard:
    """What one rank holds of one parameter."""

    name: str
    """Of the parameter in the whole model, which is also its name in the local one."""
    whole: tuple[int, ...]
    """Shape of the whole."""
    split: Split = Whole()
    ranks: int = 1
    """Of tp, over which it is split."""
    dim: int | None = None
    """The dim that is cut; None: this rank holds all of it."""
    length: int = 0
    """Of the local tensor along `dim`, padding included."""
    spans: tuple[Span, ...] = ()
    """In order, without overlap. What no span covers is padding: zeros that stay zeros."""
    copies: int = 1
    """How many ranks of tp hold this very part; they are consecutive."""
    copy: int = 0
    """Which of them this one is."""
    partial: bool = False
    """Each copy's gradient is a part of the whole one: their sum is what every copy needs."""
    writes: bool = True
    """Of all ranks of the mesh that hold this part, this is the one that writes it to a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the local tensor."""
        if self.dim is None:
            return self.whole
        return (*self.whole[: self.dim], self.length, *self.whole[self.dim + 1 :])

    @property
    def padding(self) -> int:
        """Rows along `dim` that are in no span."""
        return 0 if self.dim is None else self.length - sum(span.length for span in self.spans)

    def pieces(self) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """(where in the local tensor, where in the whole one) of each stretch, as slices to index with."""
        if self.dim is None:
            everything = tuple(slice(0, length) for length in self.whole)
            return [(everything, everything)]
        before = tuple(slice(0, length) for length in self.whole[: self.dim])
        after = tuple(slice(0, length) for length in self.whole[self.dim + 1 :])
        return [
            (
                (*before, slice(span.local, span.local + span.length), *after),
                (*before, slice(span.whole, span.whole + span.length), *after),
            )
            for span in self.spans
        ]


def shard(
    name: str, whole: Sequence[int], split: str | Split, tp: int = 1, tp_index: int = 0, dp_index: int = 0
) -> Shard:
    """What rank (tp_index, dp_index) holds of a parameter whose module is split so; by its name a weight or a bias."""
    split, shape, is_bias = split_of(split), tuple(whole), name.rpartition(".")[2] == "bias"
    if isinstance(split, (Region, Whole)) or tp == 1 or (isinstance(split, Row) and is_bias):
        return Shard(name, shape, split, tp, copies=tp, copy=tp_index, writes=tp_index == 0 == dp_index)
    if isinstance(split, Vocabulary):
        length = -(-shape[0] // tp)
        valid = max(0, min(length, shape[0] - tp_index * length))
        spans = (Span(0, tp_index * length, valid),) if valid else ()
        return Shard(name, shape, split, tp, 0, length, spans, writes=dp_index == 0)
    if isinstance(split, Row):
        if len(shape) < 2:
            raise UsageError(f"{name} has shape {shape}: a row split needs a matrix")
        length = _even(name, "input", shape[1], tp)
        return Shard(name, shape, split, tp, 1, length, (Span(0, tp_index * length, length),), writes=dp_index == 0)
    return _column(name, shape, split, tp, tp_index, dp_index)


def _column(name: str, shape: tuple[int, ...], split: Column, tp: int, tp_index: int, dp_index: int) -> Shard:
    block = _even(name, "output", shape[0], split.parts, "parts")
    units = tp if split.units is None else split.units
    width = _even(name, "output", block, units, "ranks of tp" if split.units is None else "units")
    copies = tp // units if split.repeats and units < tp else 1
    if (tp % units) if copies > 1 else (units % tp):
        how = "split nor repeated" if split.repeats else "split"
        raise UsageError(f"tp is {tp}: the {units} units of {name} cannot be {how} evenly over it")
    length = max(1, units // tp) * width
    spans = tuple(
        Span(part * length, part * block + tp_index // copies * length, length) for part in range(split.parts)
    )
    copy = tp_index % copies
    return Shard(
        name, shape, split, tp, 0, length * split.parts, spans, copies, copy, copies > 1, copy == 0 == dp_index
    )


def _even(name: str, what: str, length: int, parts: int, unit: str = "ranks of tp") -> int:
    if length % parts:
        raise UsageError(f"{name}: its {what} of {length} is not divisible by {parts} {unit}")
    return length // parts


def everyones(mine: Shard) -> list[Shard]:
    """All ranks' parts of a parameter, in order of tp_index."""
    return [shard(mine.name, mine.whole, mine.split, mine.ranks, index) for index in range(mine.ranks)]


# Arrays -----------------------------------------------------------------------------------------------------------


def take(mine: Shard, whole: Any) -> Any:
    """This rank's part of a whole array: a view where that is possible, zeros where there is padding."""
    _require_shape(mine, whole, mine.whole, "whole")
    pieces = mine.pieces()
    if len(pieces) == 1 and not mine.padding:
        return whole[pieces[0][1]]
    local = _zeros(whole, mine.shape)
    for here, there in pieces:
        local[here] = whole[there]
    return local


def put(mine: Shard, local: Any, whole: Any) -> None:
    """Write this rank's part into a whole array; padding is left out."""
    _require_shape(mine, local, mine.shape, "local")
    for here, there in mine.pieces():
        whole[there] = local[here]


def join(shards: Sequence[Shard], locals_: Sequence[Any]) -> Any:
    """The whole from all ranks' parts: the inverse of `take`."""
    whole = _zeros(locals_[0], shards[0].whole)
    for mine, local in zip(shards, locals_, strict=True):
        put(mine, local, whole)
    return whole


def split_data(x: Any, y: Any, dp_size: int, dp_index: int) -> tuple[Any, Any]:
    """This replica's rows of a batch: contiguous blocks along axis 0, views, no two differing by more than one."""
    if dp_size < 1 or not 0 <= dp_index < dp_size:
        raise UsageError(f"replica {dp_index} of {dp_size}: expected an index from 0 and below the size")
    if len(x.shape) == 0 or len(y.shape) == 0 or x.shape[0] != y.shape[0]:
        raise UsageError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}: expected as many rows along axis 0 in both"
        )
    sizes = cut(x.shape[0], dp_size)
    start = sum(sizes[:dp_index])
    rows = slice(start, start + sizes[dp_index])
    return x[rows], y[rows]


def _zeros(like: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(like, np.ndarray):
        return np.zeros(shape, like.dtype)
    return like.new_zeros(shape)


def _require_shape(mine: Shard, array: Any, wanted: tuple[int, ...], what: str) -> None:
    if tuple(array.shape) != wanted:
        raise UsageError(f"{mine.name}: the {what} array has shape {tuple(array.shape)}, expected {wanted}")


def elements(shards: Mapping[str, Shard]) -> int:
    """How many numbers a rank holds, padding included."""
    return sum(math.prod(mine.shape) for mine in shards.values())
