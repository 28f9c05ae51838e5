"""How one kernel computes a region: which values are full and which one per row, and where each operand is read.

A region's elements are `rows` x `columns`. Each is a list of sizes, because an operand may lie in memory in any way:
its offset is the sum over these sizes of index times stride. Neighbouring sizes that every operand runs through in one
go are one size. Writers of C and of Triton read this plan; it knows neither. Plain Python.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from tilemesh.graph.ir import Graph, Node, make, ordered, rebuilt
from tilemesh.graph.ops import REDUCTIONS, primitive
from tilemesh.graph.regions import COLUMN, FULL, ROW, cuts_of, trailing
from tilemesh.graph.rewrite import number_of
from tilemesh.graph.rotations import swapped, swapped_source


@dataclass(frozen=True)
class OperandRead:
    """An operand: which input of the region it is, one number per element or per row, its strides, its order."""

    input: int
    level: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    swap: int = 0  # half of the last dim, where its halves are read in the other order


@dataclass(frozen=True)
class KernelPlan:
    """The sizes of rows and columns, how operands are read, and of every operator its level."""

    body: Graph
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    reads: dict[Node, OperandRead]
    levels: dict[Node, str]

    @property
    def row_count(self) -> int:
        return prod(self.rows)

    @property
    def column_count(self) -> int:
        return prod(self.columns)

    @property
    def members(self) -> list[Node]:
        """The operators, each after its operands."""
        return [node for node in self.body.nodes() if node in self.levels]

    @property
    def reduces(self) -> bool:
        return any(level != FULL for level in self.levels.values())


def operand(node: Node) -> Node:
    """What an operand stands for in a kernel: reshapes change nothing there, nor does repeating a row's value."""
    while node.op == "reshape":
        node = node.inputs[0]
    if node.op == "broadcast" and number_of(node) is None:
        inner = node.inputs[0]
        while inner.op == "reshape":
            inner = inner.inputs[0]
        return node if inner.op == "input" else inner
    return node


def plan_kernel(body: Graph, space: int, columns: int, strides: Sequence[Sequence[int]]) -> KernelPlan:
    """The plan for a region's program, given the strides of its inputs in elements."""
    levels: dict[Node, str] = {}
    leaves: dict[Node, str] = {}
    cuts = {1, space, columns or 1}
    for node in body.nodes():
        if node.op in ("input", "constant", "broadcast", "reshape", "iota", "slice", "concat"):
            continue
        if node.op in REDUCTIONS:
            levels[node] = ROW if trailing(node) == columns else COLUMN
            read_at = FULL
        else:
            read_at = levels[node] = FULL if prod(node.shape) == space else ROW
        shape = node.inputs[0].shape
        cuts |= {cut * (columns if read_at == ROW else 1) for cut in cuts_of(shape)}
        for value in node.inputs:
            leaf = operand(value)
            if leaf not in levels and number_of(leaf) is None and leaf.op != "iota":
                leaves[leaf] = read_at
                cuts |= {cut * (columns if read_at == ROW else 1) for cut in cuts_of(leaf.shape)}
    order = sorted(cuts)
    sizes = [more // less for less, more in pairwise(order)]
    all_strides = {
        leaf: _refined(leaf, strides[body.inputs.index(_input(leaf))], order[:-1], columns if level == ROW else 1)
        for leaf, level in leaves.items()
    }
    inner = order.index(columns) if columns else 0
    # The last dim of an operand that is read in another order stays a size of its own: nothing else steps so.
    ends = {leaf: leaf.shape[-1] for leaf in leaves if leaf.op == "concat"}
    alone = [[start * (start < end) for start in order[:-1]] for end in ends.values()]
    kept, dims = _collapsed(sizes, inner, [*all_strides.values(), *alone])
    split = dims if columns else min(1, len(kept))
    sizes = [size for size, _ in kept]
    reads = {}
    for place, (leaf, level) in enumerate(leaves.items()):
        own = [each[place] for _, each in kept]
        reads[leaf] = OperandRead(
            body.inputs.index(_input(leaf)),
            level,
            tuple(reversed(own[split:])),
            tuple(reversed(own[:split])),
            ends.get(leaf, 0) // 2,
        )
    rows, inside = tuple(reversed(sizes[split:])), tuple(reversed(sizes[:split]))
    return KernelPlan(body, rows or (1,), inside or (1,), _padded(reads, rows, inside), levels)


def _padded(reads: dict[Node, OperandRead], rows: Sequence[int], columns: Sequence[int]) -> dict[Node, OperandRead]:
    """A size of 1 where there is none has a stride of 0."""
    return {
        leaf: replace(read, rows=read.rows if rows else (0,), columns=read.columns if columns else (0,))
        for leaf, read in reads.items()
    }


def _input(leaf: Node) -> Node:
    node = leaf.inputs[0] if leaf.op == "broadcast" else swapped_source(leaf) or leaf
    assert node.op == "input", f"{node} is read by a region"
    return node


def _refined(leaf: Node, strides: Sequence[int], starts: Sequence[int], scale: int) -> list[int]:
    """The stride of an operand for each elementary size, the last dim first; `starts`: where each size begins."""
    shape = leaf.shape
    of_dims = [0] * len(shape)
    for place, stride in zip(leaf["dims"] if leaf.op == "broadcast" else range(len(shape)), strides, strict=True):
        of_dims[place] = stride
    begins, ranges = scale, []
    for size, stride in zip(reversed(shape), reversed(of_dims), strict=True):
        if size > 1:
            ranges.append((begins, begins * size, stride))
        begins *= size
    return [
        next((stride * (start // low) for low, high, stride in ranges if low <= start < high), 0) for start in starts
    ]


def _collapsed(
    sizes: Sequence[int], inner: int, strides: Sequence[Sequence[int]]
) -> tuple[list[tuple[int, list[int]]], int]:
    """Sizes, the innermost first, with neighbours joined on each side of `inner`, their strides for every operand, and
    how many of them are columns."""
    kept: list[tuple[int, list[int]]] = []
    columns = 0
    for place, size in enumerate(sizes):
        own = [each[place] for each in strides]
        begins = place in (0, inner)
        if kept and not begins:
            last, previous = kept[-1]
            if all(stride == before * last for stride, before in zip(own, previous, strict=True)):
                kept[-1] = (last * size, previous)
                continue
        kept.append((size, own))
        if place < inner:
            columns = len(kept)
    return kept, columns


def passes(plan: KernelPlan, beside: Mapping[Node, Node] | None = None) -> tuple[dict[Node, int], int]:
    """In which run over a row each value can be computed, and how many runs there are: a reduction ends one.

    beside: sums that are known with another reduction (`sums_of_powers`).
    """
    ready: dict[Node, int] = {}
    for node in plan.members:
        if beside and node in beside:
            ready[node] = ready[beside[node]]
            continue
        first = max((ready.get(operand(value), 0) for value in node.inputs), default=0)
        reduced = plan.levels[node] == ROW and node.op in REDUCTIONS
        ready[node] = first + 1 if reduced else first
    full = [ready[node] for node in plan.members if plan.levels[node] != ROW]
    full += [ready[node] - 1 for node in plan.members if node.op in REDUCTIONS and plan.levels[node] == ROW]
    return ready, max(full, default=0) + 1


def reordered(body: Graph, strides: Sequence[Sequence[int]]) -> tuple[Graph, tuple[int, ...]] | None:
    """An elementwise body with its dims in the order in which its first whole operand lies in memory, and that order.

    Results then lie as this operand does, as torch's own elementwise operators leave them: what reads them through
    the same transpose needs no copy. None where rows already lie one after the other, or the body is not that simple.
    """
    shape = body.outputs[0].shape
    whole = [own for node, own in zip(body.inputs, strides, strict=True) if node.shape == shape]
    if not whole or any(node.shape != shape for node in body.outputs):
        return None
    # Where a dim of size 1 lies means nothing: it comes first.
    long = sorted((dim for dim, size in enumerate(shape) if size != 1), key=lambda dim: (-whole[0][dim], dim))
    steps = [whole[0][dim] for dim in long]
    if long == sorted(long) or steps[-1] != 1 or 0 in steps:
        return None
    order = (*(dim for dim, size in enumerate(shape) if size == 1), *long)
    new: dict[Node, Node] = {}
    for node in body.nodes():
        source = swapped_source(node)
        if node.op == "input":
            moved = tuple(shape[dim] for dim in order) if node.shape == shape else node.shape
            new[node] = make("input", name=node["name"], shape=moved, dtype=node.dtype)
        elif node.op == "broadcast" and node.shape == shape:
            dims = tuple(order.index(dim) for dim in node["dims"])
            if list(dims) != sorted(dims):
                return None
            new[node] = make("broadcast", new[node.inputs[0]], shape=tuple(shape[dim] for dim in order), dims=dims)
        elif source is not None and order[-1] == len(shape) - 1:
            new[node] = swapped(new[source])
        elif node.op == "constant" or (primitive(node.op).kind == "elementwise" and node.shape == shape):
            new[node] = rebuilt(node, [new[value] for value in node.inputs])
        elif node.op != "slice":
            return None
    return Graph(tuple(new[node] for node in body.inputs), tuple(new[node] for node in body.outputs)), order


def sums_of_powers(plan: KernelPlan) -> dict[Node, Node]:
    """Sums of exp(x - m) over a row where m is the row's largest x, with that maximum.

    Both can be had in one run over the row: where a larger x is found, what was summed so far is scaled down.
    """
    found = {}
    for node in plan.members:
        power = operand(node.inputs[0])
        if node.op != "sum" or plan.levels[node] != ROW or power.op != "exp":
            continue
        shifted = operand(power.inputs[0])
        if shifted.op != "subtract" or {node.dtype, power.dtype, shifted.dtype} != {node.dtype}:
            continue
        x, most = (operand(value) for value in shifted.inputs)
        if most.op == "amax" and plan.levels.get(most) == ROW and operand(most.inputs[0]) is x:
            found[node] = most
    return found


def chosen_column(total: Node) -> Node | None:
    """The value that says which column alone a sum over a row adds, where it adds one: a loss takes its target's."""
    value = operand(total.inputs[0])
    while value.op == "cast":
        value = operand(value.inputs[0])
    if total.op != "sum" or value.op != "where" or number_of(value.inputs[2]) != 0:
        return None
    chosen = operand(value.inputs[0])
    if chosen.op == "where" and number_of(chosen.inputs[1]) == 0:
        chosen = operand(chosen.inputs[2])
    if chosen.op != "compare" or chosen["kind"] != "equal" or operand(chosen.inputs[0]).op != "iota":
        return None
    return operand(chosen.inputs[1])


def needed(plan: KernelPlan, roots: Sequence[Node], stops: Collection[Node]) -> list[Node]:
    """The full values that these need, each after its operands, not going beyond `stops`."""

    def full(values: Iterable[Node]) -> list[Node]:
        return [value for value in values if value not in stops and plan.levels.get(value) == FULL]

    return ordered(full(roots), lambda node: full(map(operand, node.inputs)))


def offset_terms(index: str, sizes: Sequence[int], strides: Sequence[int], divide: str, swap: int = 0) -> list[str]:
    """The offset of an operand as the terms of a sum: for every size, its index times the stride.

    swap: half of the innermost size, where its halves are read in the other order.
    """
    terms, inner = [], 1
    for place, (size, stride) in enumerate(reversed(list(zip(sizes, strides, strict=True)))):
        at = index if inner == 1 else f"{index} {divide} {inner}"
        if place < len(sizes) - 1:
            at = f"{at} % {size}"
        if swap and place == 0:
            at = f"({at} + {swap}) % {size}"
        if stride:
            terms.append(f"({at}) * {stride}" if stride != 1 else f"({at})")
        inner *= size
    return terms
