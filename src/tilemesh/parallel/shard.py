"""How layers are split over tp, as shards of their parameters; and arrays cut and joined by them.

The one idea: a kind of split (column, row, vocabulary) says along which dim a layer's parameters are cut, and becomes a
`Cut` of `core/shard.py`. From there on nothing knows of layers: any rank can work out what any other holds, cut it from
the whole, put the whole together again, and read a checkpoint that another layout wrote. numpy and torch alike.

Convention (torch's weights are (out, in)): a column split cuts the output, dim 0 of weight and bias; a row split cuts
the input, dim 1 of the weight, and its bias is whole, added once after the partial outputs are summed; a vocabulary
split cuts the rows of a table, unevenly where tp does not divide them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tilemesh.core.axes import Axes, size_of
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.shard import Cut, Shard, share

if TYPE_CHECKING:
    from torch import nn


class Held(NamedTuple):
    """A parameter as this rank holds it, and what that is of the whole: what gradients and optimizers work on."""

    tensor: nn.Parameter
    shard: Shard


def trained(module: nn.Module, shards: Mapping[str, Shard] | None = None, is_trained: bool = True) -> dict[str, Held]:
    """The parameters of a module that are trained, or those that are not, by name; without shards each is the whole."""
    return {
        name: Held(tensor, Shard(name, tuple(tensor.shape)) if shards is None else shards[name])
        for name, tensor in module.named_parameters()
        if tensor.requires_grad == is_trained
    }


@dataclass(frozen=True)
class ColumnSplit:
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
class RowSplit:
    """Cut by the input; the ranks' outputs are partial sums.

    `sums`: they are added up where the layer ends; otherwise the region that it lies in sees to it.
    """

    sums: bool = True


@dataclass(frozen=True)
class VocabularySplit:
    """A table (or output projection) cut by its rows, unevenly where they do not divide.

    `joins`: the ranks' parts of an output projection are put together again.
    """

    joins: bool = False


@dataclass(frozen=True)
class Region:
    """A module whose input all its column layers share: it is exchanged once, here, not at each of them.

    All tensors it is given are whole, and it ends with its row layer: a residual or a norm after that belongs outside,
    since every rank would compute it whole and ranks' gradients are summed.
    `divides`: attributes of the module that count heads: each rank keeps its part of them; fewer than ranks need a
    column split that repeats them. `sums`: what it gives is a part of a sum on each rank, which is added up at its end.
    """

    divides: tuple[str, ...] = ()
    sums: bool = False


@dataclass(frozen=True)
class Whole:
    """The same on every rank."""


Split = ColumnSplit | RowSplit | VocabularySplit | Region | Whole
KINDS: Mapping[str, Split] = {
    "column": ColumnSplit(),
    "row": RowSplit(),
    "vocabulary": VocabularySplit(),
    "region": Region(),
    "whole": Whole(),
}


def split_of(kind: str | Split) -> Split:
    """A split by its name."""
    if isinstance(kind, Split):
        return kind
    if not isinstance(kind, str):
        raise UsageError(
            f"a split is {kind!r}: expected one of {', '.join(KINDS)}, or a value such as ColumnSplit(parts=3)"
        )
    if kind not in KINDS:
        raise unknown("split", kind, KINDS)
    return KINDS[kind]


def shard(name: str, whole: Sequence[int], split: str | Split, axes: Axes = (), rank: int = 0) -> Shard:
    """What a rank of a mesh holds of a parameter whose module is split so; by its name a weight or a bias."""
    split, shape, tp = split_of(split), tuple(whole), size_of(axes, "tp")
    is_bias = name.rpartition(".")[2] == "bias"
    if isinstance(split, (Region, Whole)) or tp == 1 or (isinstance(split, RowSplit) and is_bias):
        return Shard(name, shape, axes, rank)
    if isinstance(split, VocabularySplit):
        if shape[0] < tp:
            raise UsageError(f"tp is {tp} and {name} has {shape[0]} rows: every rank needs at least one")
        return Shard(name, shape, axes, rank, (Cut("tp", 0),))
    if isinstance(split, RowSplit):
        if len(shape) < 2:
            raise UsageError(f"{name} has shape {shape}: a row split needs a matrix")
        _require_even(name, "input", shape[1], tp)
        return Shard(name, shape, axes, rank, (Cut("tp", 1),))
    return _column(name, shape, split, tp, Shard(name, shape, axes, rank))


def _column(name: str, shape: tuple[int, ...], split: ColumnSplit, tp: int, uncut: Shard) -> Shard:
    _require_even(name, "output", shape[0], split.parts, "parts")
    units = tp if split.units is None else split.units
    what = "ranks of tp" if split.units is None else "units"
    _require_even(name, "output", shape[0] // split.parts, units, what)
    is_repeated = split.repeats and units < tp
    if (tp % units) if is_repeated else (units % tp):
        how = "split nor repeated" if split.repeats else "split"
        raise UsageError(f"tp is {tp}: the {units} units of {name} cannot be {how} evenly over it")
    # Several ranks that hold the same heads use them for different queries: each has a part of their gradient.
    partial = ("tp",) if is_repeated else ()
    cut = Cut("tp", 0, split.parts, units, pieces=min(units, tp))
    return Shard(name, shape, uncut.axes, uncut.rank, (cut,), partial)


def _require_even(name: str, what: str, length: int, parts: int, unit: str = "ranks of tp") -> None:
    if length % parts:
        raise UsageError(f"{name}: its {what} of {length} is not divisible by {parts} {unit}")


# Arrays -----------------------------------------------------------------------------------------------------------


def take(mine: Shard, whole: Any) -> Any:
    """This rank's part of a whole array: a view where it is one box."""
    _require_shape(mine, whole, mine.whole, "whole")
    if len(mine.boxes) == 1:
        return whole[mine.boxes[0][1].slices]
    local = _empty(whole, mine.shape)
    for here, there in mine.boxes:
        local[here.slices] = whole[there.slices]
    return local


def put(mine: Shard, local: Any, whole: Any) -> None:
    """Write this rank's part into a whole array."""
    _require_shape(mine, local, mine.shape, "local")
    for here, there in mine.boxes:
        whole[there.slices] = local[here.slices]


def join(shards: Sequence[Shard], locals_: Sequence[Any]) -> Any:
    """The whole from all ranks' parts: the inverse of `take`."""
    whole = _empty(locals_[0], shards[0].whole)
    for mine, local in zip(shards, locals_, strict=True):
        put(mine, local, whole)
    return whole


def split_data(x: Any, y: Any, dp_size: int, dp_index: int) -> tuple[Any, Any]:
    """This replica's rows of a batch: contiguous blocks along axis 0, views, no two differing by more than one."""
    if dp_size < 1 or not 0 <= dp_index < dp_size:
        raise UsageError(f"replica {dp_index} of {dp_size}: expected an index from 0 and below the size")
    for name, given in (("x", x), ("y", y)):
        if not hasattr(given, "shape"):
            raise UsageError(f"{name} is {type(given).__name__}: expected an array or a tensor with rows along axis 0")
    if len(x.shape) == 0 or len(y.shape) == 0 or x.shape[0] != y.shape[0]:
        raise UsageError(
            f"x has shape {tuple(x.shape)} and y {tuple(y.shape)}: expected as many rows along axis 0 in both"
        )
    start, count = share(x.shape[0], dp_size, dp_index)
    rows = slice(start, start + count)
    return x[rows], y[rows]


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


def _require_shape(mine: Shard, array: Any, wanted: tuple[int, ...], what: str) -> None:
    if tuple(array.shape) != wanted:
        raise UsageError(f"{mine.name}: the {what} array has shape {tuple(array.shape)}, expected {wanted}")


def elements(shards: Mapping[str, Shard]) -> int:
    """How many numbers a rank holds."""
    return sum(math.prod(mine.shape) for mine in shards.values())


def require_no_hooks(name: str, parameter: Any) -> None:
    """Of a parameter that another takes the place of: its gradient would go where no hook sees it."""
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise UsageError(
            f"{name} has hooks on its gradient, and a rank has a part of it, without them: change gradients after the "
            "backward pass instead"
        )
