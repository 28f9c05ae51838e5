"""A model over parse trees, whose program differs from sentence to sentence: four ways to run it.

A leaf of a tree is a word's row of a table; an inner node is tanh(left · a + right · b + c). *One by one* runs the
tree as Python walks it, a program that exists only while it runs. *One program per tree* compiles each shape of tree:
fast once compiled, and there are Catalan(n - 1) shapes of n words. *One program with switches* holds every tree of n
words: the tree is data, a predicate for each step says whether it is a leaf, `switch` lets the step's operands into
one of two branches and `merge` takes the result of the branch that was taken. *Levels in buckets* computes all inner
nodes of one height at once, their number filled up to a power of two: static pieces between Python that gathers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilemesh.graph import build
from tilemesh.graph.backend import Backend
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph, Node

Tensor = torch.Tensor


@dataclass(frozen=True)
class Tree:
    """A binary tree as steps, children first: a leaf is (word, -1), an inner node its two earlier steps."""

    steps: tuple[tuple[int, int], ...]

    @property
    def leaves(self) -> int:
        return (len(self.steps) + 1) // 2

    @property
    def shape(self) -> tuple[tuple[int, int], ...]:
        """The tree without its words."""
        return tuple((0, -1) if right < 0 else (left, right) for left, right in self.steps)


def random_tree(words: Sequence[int], draws: random.Random) -> Tree:
    """A tree over a sentence: cut at a random place, again and again."""
    steps: list[tuple[int, int]] = []

    def grow(low: int, high: int) -> int:
        if high - low == 1:
            steps.append((words[low], -1))
        else:
            cut = draws.randrange(low + 1, high)
            left, right = grow(low, cut), grow(cut, high)
            steps.append((left, right))
        return len(steps) - 1

    grow(0, len(words))
    return Tree(tuple(steps))


class TreeModel(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(vocabulary, width) / 4)
        self.a, self.b = (nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(2))
        self.c = nn.Parameter(torch.zeros(width))

    def cell(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(left @ self.a + right @ self.b + self.c)

    def forward(self, tree: Tree) -> Tensor:
        """The root's row, node by node."""
        values: list[Tensor] = []
        for left, right in tree.steps:
            row = self.table[left : left + 1] if right < 0 else self.cell(values[left], values[right])
            values.append(row)
        return values[-1]


class PerTree:
    """A compiled program for every shape of tree that is met."""

    def __init__(self, model: TreeModel) -> None:
        self.model = model
        self.programs: dict[Any, Any] = {}

    def __call__(self, tree: Tree) -> Tensor:
        compiled = self.programs.get(tree.shape)
        if compiled is None:
            compiled = self.programs[tree.shape] = program(self._graph(tree))
        words = torch.tensor([left for left, right in tree.steps if right < 0])
        model = self.model
        return compiled(words, model.table, model.a, model.b, model.c)[0]  # type: ignore[no-any-return]

    def _graph(self, tree: Tree) -> Graph:
        words, weights = build.argument("words", [tree.leaves], "int64"), _weights(self.model)
        rows = build.take(weights[0], words)
        values: list[Node] = []
        leaves = 0
        for left, right in tree.steps:
            if right < 0:
                values.append(build.part(rows, 0, leaves, leaves + 1))
                leaves += 1
            else:
                values.append(_cell(values[left], values[right], weights))
        return Graph((words, *weights), (values[-1],))


class Switched:
    """One program for every tree of so many words: what a step does is data."""

    def __init__(self, model: TreeModel, leaves: int) -> None:
        self.model, self.steps = model, 2 * leaves - 1
        weights = _weights(model)
        leaf = build.argument("leaf", [self.steps], "bool")
        left, right = (build.argument(name, [self.steps], "int64") for name in ("left", "right"))
        values: list[Node] = []
        for step in range(self.steps):
            is_leaf = build.reshape(build.part(leaf, 0, step, step + 1), ())
            at, other = (build.part(places, 0, step, step + 1) for places in (left, right))
            word = build.take(build.switch(weights[0], is_leaf, True), at)
            if not values:
                values.append(build.take(weights[0], at))  # the first step of any tree is a leaf
                continue
            # Everything that a branch reads enters it by a switch, so that its gradient leaves by a merge.
            before, *inner = (build.switch(value, is_leaf, False) for value in (build.concat(values, 0), *weights))
            first, second = (build.take(before, place) for place in (at, other))
            values.append(build.merge(is_leaf, word, _cell(first, second, inner)))
        self.graph = Graph((leaf, left, right, *weights), (values[-1],))

    def __call__(self, tree: Tree) -> Tensor:
        leaf = torch.tensor([right < 0 for _, right in tree.steps])
        left = torch.tensor([left for left, _ in tree.steps])
        right = torch.tensor([max(right, 0) for _, right in tree.steps])
        model = self.model
        return run_torch(self.graph, leaf, left, right, model.table, model.a, model.b, model.c)[0]  # type: ignore[no-any-return]


class ByLevels:
    """All inner nodes of one height at once; one compiled piece for each power of two of them."""

    def __init__(self, model: TreeModel, backend: Any | None = None) -> None:
        self.model = model
        self.cell = torch.compile(model.cell, backend=backend or Backend(), dynamic=False)

    def _filled(self, rows: Tensor) -> Tensor:
        """Rows of zeros behind these, up to a power of two."""
        count = len(rows)
        return nn.functional.pad(rows, (0, 0, 0, (1 << (count - 1).bit_length()) - count))

    def __call__(self, trees: Sequence[Tree]) -> Tensor:
        """The roots of several trees, whose levels are computed together."""
        words = torch.tensor([left for tree in trees for left, right in tree.steps if right < 0])
        values = self.model.table[words]
        place: list[list[int]] = []
        leaves = 0
        pending: dict[int, list[tuple[int, int, int, int]]] = {}
        for number, tree in enumerate(trees):
            heights: list[int] = []
            place.append([0] * len(tree.steps))
            for step, (left, right) in enumerate(tree.steps):
                if right < 0:
                    heights.append(0)
                    place[number][step] = leaves
                    leaves += 1
                else:
                    heights.append(1 + max(heights[left], heights[right]))
                    pending.setdefault(heights[-1], []).append((number, step, left, right))
        for height in sorted(pending):
            level = pending[height]
            pairs = [[place[number][child] for number, _, *both in level for child in (both[side],)] for side in (0, 1)]
            new = self.cell(*(self._filled(values[torch.tensor(side)]) for side in pairs))[: len(level)]
            for offset, (number, step, _, _) in enumerate(level):
                place[number][step] = values.shape[0] + offset
            values = torch.cat([values, new])
        return values[torch.tensor([each[-1] for each in place])]


def _weights(model: TreeModel) -> tuple[Node, ...]:
    named = (("table", model.table), ("a", model.a), ("b", model.b), ("c", model.c))
    return tuple(build.argument(name, tuple(value.shape), str(value.dtype)[6:]) for name, value in named)


def _cell(left: Node, right: Node, weights: Sequence[Node]) -> Node:
    _, a, b, c = weights
    return build.tanh(build.add(build.add(build.dot(left, a), build.dot(right, b)), c))


WAYS: dict[str, Callable[[TreeModel, int], Callable[[Sequence[Tree]], list[Tensor]]]] = {
    "one by one": lambda model, leaves: lambda trees: [model(tree) for tree in trees],
    "one program per tree": lambda model, leaves: _each(PerTree(model)),
    "one program with switches": lambda model, leaves: _each(Switched(model, leaves)),
    "levels in buckets": lambda model, leaves: _together(ByLevels(model)),
}


def _each(run: Callable[[Tree], Tensor]) -> Callable[[Sequence[Tree]], list[Tensor]]:
    return lambda trees: [run(tree) for tree in trees]


def _together(run: Callable[[Sequence[Tree]], Tensor]) -> Callable[[Sequence[Tree]], list[Tensor]]:
    return lambda trees: list(torch.split(run(trees), 1))
