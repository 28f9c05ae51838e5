"""Rules of placements proved by z3 where they are algebraic: for all numbers, not for some that were drawn.

Elements are unknown reals, of what is a sum every rank's part too. numpy computes the whole and every rank's part of it
with them, and z3 is asked for numbers for which the two differ. Functions that are not linear are unknown functions.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated_mesh import pieces
from test_place_rules import LINEAR, MADE, arrays

from tilemesh.core.tensor_placement import Mark, P, R, S, TensorPlacement, V
from tilemesh.graph.evaluate import _NUMPY
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.plan.place.local import local_node
from tilemesh.plan.place.rules import Way, ways

z3 = pytest.importorskip("z3", reason="pip install 'tilemesh[graph]'")
DRAWN = 4
MOST_ELEMENTS = 120
"""Of a result: shapes with more are drawn again."""
ALGEBRAIC = [op for op in LINEAR.split() if op not in ("cast", "switch", "merge", "where")]
"""The others choose among values, or round them."""
names = itertools.count()


def unknown(shape: Sequence[int]) -> Any:
    reals = [z3.Real(f"x{next(names)}") for _ in range(math.prod(shape))]
    return np.array(reals, object).reshape(shape)


def run(graph: Graph, arrays: Sequence[Any]) -> Any:
    """The output by numpy's own functions, which take unknowns too; numbers stay as they are, whatever their dtype."""
    values: dict[Node, Any] = dict(zip(graph.inputs, arrays, strict=True))
    for node in graph.nodes():
        if node not in values:
            inputs = [values[value] for value in node.inputs]
            own = _NUMPY.get(node.op)
            values[node] = np.asarray(own(node, *inputs) if own else getattr(np, node.op)(*inputs))
    [output] = graph.outputs
    return values[output]


def cut(shape: Sequence[int], mark: Mark, ranks: int) -> tuple[Any, list[Any]]:
    """Unknown numbers, whole and as ranks have them."""
    if mark == P:
        parts = [unknown(shape) for _ in range(ranks)]
        return functools.reduce(np.add, parts), parts
    return (whole := unknown(shape)), scattered(whole, mark, ranks)


def scattered(whole: Any, mark: Mark, ranks: int) -> list[Any]:
    if mark == R:
        return [whole] * ranks
    assert isinstance(mark.dim, int)
    lead = (slice(None),) * mark.dim
    return [whole[(*lead, piece)] for piece in pieces(whole.shape[mark.dim], ranks)]


def differ(node: Node, way: Way, ranks: int, index: Any) -> Any:
    """That the ranks' results, put together, are not the whole's."""
    pairs = [
        (index, scattered(index, mark, ranks)) if value.dtype == "int64" else cut(value.shape, mark, ranks)
        for value, mark in zip(node.inputs, way.inputs, strict=True)
    ]
    taken, given = [TensorPlacement.of(tp=mark) for mark in way.inputs], TensorPlacement.of(tp=way.output)
    axes = (("tp", ranks),)
    whole = run(Graph(node.inputs, (node,)), [whole for whole, _ in pairs])
    parts = []
    for rank in range(ranks):
        own = [parts[rank] for _, parts in pairs]
        typed = enumerate(zip(own, node.inputs, strict=True))
        inputs = [make("input", name=f"x{n}", shape=x.shape, dtype=value.dtype) for n, (x, value) in typed]
        parts.append(run(Graph(tuple(inputs), (local_node(node, inputs, taken, given, axes, rank),)), own))
    if way.output == P:
        joined = functools.reduce(np.add, parts)
    else:
        joined = np.concatenate(parts, way.output.dim)
    assert joined.shape == whole.shape
    known = [divisor != 0 for divisor in pairs[1][0].flat] if node.op == "divide" else []
    differs = z3.Or(*(z3.simplify(z3.RealVal(0) + a - b) != 0 for a, b in zip(joined.flat, whole.flat, strict=True)))
    return z3.And(*known, differs)


@pytest.mark.parametrize("op", ALGEBRAIC)
def test_each_way_holds_for_all_numbers(op: str) -> None:
    random, done, seen = np.random.default_rng([*op.encode(), 1]), 0, set()
    while done < DRAWN:
        drawn, ranks = MADE[op](random), 2 + done % 2
        if max(math.prod(each.shape) for each in (*drawn.inputs, drawn)) > MOST_ELEMENTS:
            continue
        done += 1
        index = next((value for value in arrays(drawn, random) if value.dtype == "int64"), None)
        for way in ways(drawn, ranks):
            if V in (*way.inputs, way.output) or way.output == R:
                continue
            solver = z3.Solver()
            solver.add(differ(drawn, way, ranks, index))
            assert solver.check() == z3.unsat, f"{drawn} {way} on {ranks} ranks"
            seen.add(way)
    assert {way.output.kind for way in seen} == {"S", "P"}


@pytest.mark.parametrize(
    ("op", "way"),
    [
        ("multiply", Way((P, P), P)),
        ("dot", Way((P, P), P)),
        ("divide", Way((R, P), P)),
        ("add", Way((P, R), P)),
        ("reshape", Way((S(1),), S(0))),
    ],
)
def test_a_way_that_is_wrong_is_refuted(op: str, way: Way) -> None:
    shapes = {"dot": ((2, 2), (2, 2)), "reshape": ((2, 2),)}.get(op, ((2,), (2,)))
    inputs = [make("input", name=name, shape=shape, dtype="float64") for name, shape in zip("xy", shapes, strict=False)]
    node = make(op, *inputs, **({"shape": (4,)} if op == "reshape" else {}))
    solver = z3.Solver()
    solver.add(differ(node, way, 2, None))
    assert solver.check() == z3.sat


def test_pieces_of_a_reshape_end_at_the_same_elements_whatever_the_sizes() -> None:
    """Of a dim that several axes cut: `rules._reshape` asks that the pieces divide both dims, and that the dims hold
    the same elements. Then piece k of one begins where piece k of the other does."""
    pieces, k, each, inner, other, outer = z3.Ints("pieces k each inner other outer")
    solver = z3.Solver()
    solver.set("timeout", 20_000)
    solver.add(pieces >= 1, each >= 1, inner >= 1, other >= 1, outer >= 1, k >= 0, k <= pieces)
    solver.add((pieces * each) * inner == (pieces * other) * outer)
    solver.add(k * each * inner != k * other * outer)
    assert solver.check() == z3.unsat
