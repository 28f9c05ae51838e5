"""Exchanges as nodes: what a rank does to have a tensor placed otherwise, step by step.

Along one axis the two placements say which collective it is (`core/tensor_placement.py`). Over several axes the order
matters: of axes that cut one dim only the last can be undone, and what makes a tensor smaller comes first. Nodes say
which ranks (`axis`), which dims, and how long everyone's parts are; they are the same on all ranks but for the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tilemesh.core.axes import Axes, coordinates
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import share
from tilemesh.core.tensor_placement import Mark, P, R, TensorPlacement, V
from tilemesh.graph.ir import Node, make

Step = tuple[str, Mark, Mark]
"""An axis, and a tensor's marks along it before and after."""


def exchange_steps(before: TensorPlacement, after: TensorPlacement, axes: Axes) -> list[Step]:
    """From one placement to another, an axis at a time."""
    marks = {**dict(before), **{axis: R for axis, _ in axes if before[axis] == R}}
    wanted = {**dict(after), **{axis: R for axis, _ in axes if after[axis] == R}}
    wanted = {axis: mark for axis, mark in wanted.items() if mark != V}
    if V in (marks[axis] for axis in wanted if wanted[axis] != marks[axis]):
        raise UsageError(f"from {before} to {after}: what differs from rank to rank (V) cannot be made one again")
    made: list[Step] = []
    while step := next(_next_steps(marks, wanted), None):
        axis, _, mark = step
        made.append(step)
        del marks[axis]  # a new cut comes after those that there are
        marks[axis] = mark
    return made


def _next_steps(marks: Mapping[str, Mark], wanted: Mapping[str, Mark]) -> Iterator[Step]:
    """What can be done next, the best first. Axes are wanted to cut in the order in which `wanted` has them."""

    def cuts(marked: Mapping[str, Mark], mark: Mark) -> list[str]:
        return [axis for axis in marked if marked[axis] == mark]

    def fits(axis: str, mark: Mark) -> bool:
        """Whether this axis is the next to cut there."""
        done = [*cuts(marks, mark), axis]
        return done == cuts(wanted, mark)[: len(done)]

    for kind in "RP":  # own rows of what all have, then of a sum
        for axis, mark in wanted.items():
            if mark.kind == "S" and marks[axis].kind == kind and fits(axis, mark):
                yield axis, marks[axis], mark
    yield from ((axis, P, R) for axis, mark in wanted.items() if mark == R and marks[axis] == P)
    wrong = []  # the last cuts of dims that are not cut as they should be
    for mark in dict.fromkeys(mark for mark in marks.values() if mark.kind == "S"):
        now, then = cuts(marks, mark), cuts(wanted, mark)
        if now != then[: len(now)]:
            wrong.append(now[-1])
    for axis in wrong:
        if wanted[axis].kind == "S" and wanted[axis] != marks[axis] and fits(axis, wanted[axis]):
            yield axis, marks[axis], wanted[axis]
    yield from ((axis, marks[axis], P if wanted[axis] == P else R) for axis in wrong)
    yield from ((axis, R, P) for axis, mark in wanted.items() if mark == P and marks[axis] == R)


@dataclass
class Exchanger:
    """Writes the exchanges of one rank. Each gets the next number: all ranks write the same ones in the same order."""

    axes: Axes
    rank: int
    serials: Iterator[int] = field(default_factory=count)

    def exchange(self, node: Node, whole: tuple[int, ...], before: TensorPlacement, after: TensorPlacement) -> Node:
        """A rank's part `node` of a tensor of shape `whole`, placed otherwise."""
        placement = before
        for axis, old, new in exchange_steps(before, after, self.axes):
            node = self._step(node, whole, placement, axis, old, new)
            placement = placement.put(axis, new)
        return node

    def _step(
        self, node: Node, whole: tuple[int, ...], placement: TensorPlacement, axis: str, old: Mark, new: Mark
    ) -> Node:
        others = placement.put(axis, R)
        ranks, index = dict(self.axes)[axis], coordinates(self.rank, self.axes)[axis]
        local = others.shard(whole, self.axes, self.rank).shape

        def lengths(mark: Mark) -> tuple[int, ...]:
            assert isinstance(mark.dim, int)
            return tuple(share(local[mark.dim], ranks, place)[1] for place in range(ranks))

        if (old.kind, new.kind) == ("P", "R"):
            return make("all_reduce", node, axis=axis, ranks=ranks, serial=next(self.serials))
        if (old.kind, new.kind) == ("R", "P"):
            return self._share(node, ranks, index)
        cut = new if new.kind == "S" else old
        assert isinstance(cut.dim, int)
        counts = lengths(cut)
        begin = sum(counts[:index])
        if (old.kind, new.kind) == ("R", "S"):
            stop = [begin + counts[index] if dim == cut.dim else size for dim, size in enumerate(node.shape)]
            start = [begin if dim == cut.dim else 0 for dim in range(len(stop))]
            return make("slice", node, start=start, stop=stop, step=(1,) * len(stop))
        if (old.kind, new.kind) == ("S", "P"):
            low = [begin if dim == cut.dim else 0 for dim in range(len(node.shape))]
            high = [sum(counts[index + 1 :]) if dim == cut.dim else 0 for dim in range(len(node.shape))]
            return make("pad", node, low=low, high=high, inner=(0,) * len(low))
        given: dict[str, Any] = {"axis": axis, "index": index, "serial": next(self.serials)}
        if (old.kind, new.kind) == ("S", "S"):
            return make(
                "all_to_all", node, dim=old.dim, counts=lengths(old), into=new.dim, parts=counts, scatters=False,
                **given,
            )  # fmt: skip
        op = "all_gather" if new == R else "reduce_scatter"
        return make(op, node, dim=cut.dim, counts=counts, scatters=op == "reduce_scatter", **given)

    def _share(self, node: Node, ranks: int, index: int) -> Node:
        """One of equal parts of a sum; of whole numbers the first rank has all of it."""
        is_float = "float" in node.dtype
        number = make("constant", value=float(ranks) if is_float else int(index == 0), shape=(), dtype=node.dtype)
        return make("divide" if is_float else "multiply", node, make("broadcast", number, shape=node.shape, dims=()))
