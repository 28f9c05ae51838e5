"""Every way in which a primitive can be computed on ranks, against numpy on the whole, over random shapes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated_mesh import gather, run_node, scatter

from tilemesh.core.tensor_placement import P, R, S, TensorPlacement, V
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.graph.ops import PRIMITIVES
from tilemesh.plan.place.rules import EXCHANGES, RULES, Way, ways

Draw = np.random.Generator


def tensor(name: str, *shape: int, dtype: str = "float64") -> Node:
    return make("input", name=name, shape=shape, dtype=dtype)


def sizes(random: Draw, rank: int) -> tuple[int, ...]:
    return tuple(int(size) for size in random.integers(1, 8, rank))


def elementwise(op: str) -> Callable[[Draw], Node]:
    def node(random: Draw) -> Node:
        shape = sizes(random, int(random.integers(1, 4)))
        if op == "where":
            inputs = [tensor("c", *shape, dtype="bool"), tensor("x", *shape), tensor("y", *shape)]
        else:
            inputs = [tensor(name, *shape) for name in "xy"[: PRIMITIVES[op].arity]]
        more = {"compare": {"kind": "less"}, "cast": {"dtype": "float32"}}
        return make(op, *inputs, **more.get(op, {}))

    return node


def reduced(op: str) -> Callable[[Draw], Node]:
    def node(random: Draw) -> Node:
        shape = sizes(random, 3)
        if op == "argmax":
            return make(op, tensor("x", *shape), dim=int(random.integers(3)))
        return make(
            op, tensor("x", *shape), dims=tuple(sorted(random.permutation(3)[: random.integers(1, 3)].tolist()))
        )

    return node


def reshape(random: Draw) -> Node:
    a, b, c, d = sizes(random, 4)
    old, new = [
        ((a, b, c), (a * b, c)), ((a * b, c), (a, b, c)), ((a, b, c, d), (a, b * c, d)), ((a, b * c), (a * b, c)),
        ((a, b, c), (a, b, 1, c)), ((2 * a, b), (a, 2, b)), ((1, a, b), (a, b)), ((6 * a, 4), (6, 4 * a)),
    ][random.integers(8)]  # fmt: skip
    return make("reshape", tensor("x", *old), shape=new)


def broadcast(random: Draw) -> Node:
    shape = sizes(random, 3)
    dims = tuple(random.permutation(3)[:2].tolist())
    return make("broadcast", tensor("x", *(shape[dim] for dim in dims)), shape=shape, dims=dims)


def concat(random: Draw) -> Node:
    shape, dim = sizes(random, 3), int(random.integers(3))
    others = [(*shape[:dim], int(random.integers(1, 5)), *shape[dim + 1 :]) for _ in range(2)]
    return make("concat", *(tensor(f"x{n}", *other) for n, other in enumerate(others)), dim=dim)


def part(random: Draw) -> Node:
    shape, ranges = sizes(random, 3), []
    for size in shape:
        start = int(random.integers(size)) * int(random.integers(2))
        stop = size if random.integers(2) else int(random.integers(start, size)) + 1
        ranges.append((start, stop, int(random.integers(1, 3))))
    starts, stops, steps = zip(*ranges, strict=True)
    return make("slice", tensor("x", *shape), start=starts, stop=stops, step=steps)


def pad(random: Draw) -> Node:
    low, high, inner = (random.integers(0, 3, 3) * random.integers(0, 2, 3) for _ in range(3))
    words = {"low": low.tolist(), "high": high.tolist(), "inner": inner.tolist()}
    return make("pad", tensor("x", *sizes(random, 3)), **words)


def dot(random: Draw) -> Node:
    b, m, k, n = sizes(random, 4)
    batch = (b,) * int(random.integers(3))
    return make("dot", tensor("x", *batch, m, k), tensor("y", *batch, k, n))


def take(random: Draw) -> Node:
    rows, width, *index = sizes(random, 4)
    return make("take", tensor("x", rows, width), tensor("i", *index[: random.integers(3)], dtype="int64"))


def put_add(random: Draw) -> Node:
    rows, width, *index = sizes(random, 4)
    index = index[: random.integers(1, 3)]
    return make("put_add", tensor("x", *index, width), tensor("i", *index, dtype="int64"), size=rows)


def convolved(random: Draw) -> dict[str, Any]:
    groups = int(random.choice([1, 1, 2]))
    stride, padding, dilation = int(random.integers(1, 3)), int(random.integers(0, 2)), int(random.integers(1, 3))
    return {"groups": groups, "stride": (stride,), "padding": (padding,), "dilation": (dilation,)}


def conv(random: Draw) -> Node:
    words, (n, c, out, size, taps) = convolved(random), sizes(random, 5)
    groups, taps = words["groups"], min(taps, 3)
    return make("conv", tensor("x", n, c * groups, size + 6), tensor("w", out * groups, c, taps), **words)


def conv_input(random: Draw) -> Node:
    whole = conv(random)
    x, w = whole.inputs
    return make("conv_input", tensor("g", *whole.shape), w, size=x.shape, **dict(whole.attributes))  # type: ignore[arg-type]


def conv_weight(random: Draw) -> Node:
    whole = conv(random)
    x, w = whole.inputs
    return make("conv_weight", x, tensor("g", *whole.shape), size=w.shape, **dict(whole.attributes))  # type: ignore[arg-type]


def windows(random: Draw) -> Node:
    n, c, size = sizes(random, 3)
    return make("windows", tensor("x", n, c, size + 3), taps=(3,), stride=(int(random.integers(1, 3)),))


def unwindows(random: Draw) -> Node:
    node = windows(random)
    words = dict(node.attributes) | {"shape": node.inputs[0].shape}
    return make("unwindows", tensor("g", *node.shape), **words)  # type: ignore[arg-type]


MADE: dict[str, Callable[[Draw], Node]] = {
    **{name: elementwise(name) for name, known in PRIMITIVES.items() if known.kind == "elementwise"},
    **{name: reduced(name) for name in ("sum", "amax", "argmax")},
    "reshape": reshape,
    "transpose": lambda random: make("transpose", tensor("x", *sizes(random, 3)), order=random.permutation(3).tolist()),
    "broadcast": broadcast,
    "concat": concat,
    "slice": part,
    "pad": pad,
    "reverse": lambda random: make("reverse", tensor("x", *sizes(random, 3)), dims=[int(random.integers(3))]),
    "dot": dot,
    "take": take,
    "put_add": put_add,
    "conv": conv,
    "conv_input": conv_input,
    "conv_weight": conv_weight,
    "windows": windows,
    "unwindows": unwindows,
    "switch": lambda random: make("switch", tensor("x", *sizes(random, 2)), tensor("c", dtype="bool"), branch=True),
    "merge": lambda random: make(
        "merge", tensor("c", dtype="bool"), *(tensor(name, 4, 5) for name in "xy")
    ),
}  # fmt: skip
LINEAR = (
    "add subtract multiply divide negate where cast sum reshape transpose broadcast concat slice pad reverse dot take "
    "put_add conv conv_input conv_weight windows unwindows switch merge"
)
ALWAYS_WHOLE = {"input", "constant", "iota", "item", "lay", "region", "opaque", "own_copy", *EXCHANGES}


def test_every_primitive_has_a_row_and_is_tried() -> None:
    assert RULES.keys() | {"opaque"} == PRIMITIVES.keys()
    assert MADE.keys() == PRIMITIVES.keys() - ALWAYS_WHOLE


def arrays(node: Node, random: Draw) -> list[Any]:
    """Whole numbers, so that parts of a sum add up to the bit where nothing is divided."""
    values = []
    for value in node.inputs:
        shape = value.shape
        if value.dtype == "bool":
            drawn: Any = np.ones((), bool) if shape == () else random.integers(0, 2, shape).astype(bool)
        elif value.dtype == "int64":
            rows = node.inputs[0].shape[0] if node.op == "take" else node["size"]
            drawn = random.integers(0, rows, shape)
        else:
            drawn = random.integers(1, 9, shape).astype(value.dtype)
        values.append(drawn)
    return values


@pytest.mark.parametrize("op", MADE)
def test_each_way_gives_what_one_process_computes(op: str) -> None:
    random = np.random.default_rng([*op.encode()])
    seen: set[tuple[str, ...]] = set()
    for turn in range(24):
        node, ranks = MADE[op](random), 2 + turn % 3
        axes = (("tp", ranks),)
        whole = arrays(node, random)
        with np.errstate(all="ignore"):
            [wanted] = run_numpy(Graph(tuple(dict.fromkeys(node.inputs)), (node,)), *whole)
            for way in ways(node, ranks):
                if way.output == V:
                    continue
                taken = [TensorPlacement.of(tp=mark) for mark in way.inputs]
                cut = [scatter(value, place, axes, random) for value, place in zip(whole, taken, strict=True)]
                given = TensorPlacement.of(tp=way.output)
                parts = run_node(node, cut, taken, given, axes)
                np.testing.assert_allclose(
                    gather(parts, given, axes), wanted, rtol=1e-12, atol=1e-12, err_msg=f"{node} {way} on {ranks}"
                )
                seen.add((*(mark.kind for mark in way.inputs), way.output.kind))
    linear = op in LINEAR.split()
    assert any("S" in kinds for kinds in seen), "cut in some way"
    assert any("P" in kinds[:-1] and kinds[-1] == "P" for kinds in seen) == linear


@pytest.mark.parametrize("op", MADE)
def test_what_is_no_row_would_be_wrong(op: str) -> None:
    """No row is missing for want of care: of every way with parts of a sum that is refused, some numbers show it."""
    random = np.random.default_rng(7)
    node = MADE[op](random)
    if op in ("where", "merge") or not node.shape:
        return
    axes, known = (("tp", 2),), {way.inputs for way in ways(node, 2) if way.output == P}
    for place, value in enumerate(node.inputs):
        if value.dtype != "float64":
            continue
        inputs = tuple(P if other == place else R for other in range(len(node.inputs)))
        if inputs in known:
            continue
        whole = arrays(node, random)
        taken = [TensorPlacement.of(tp=mark) for mark in inputs]
        with np.errstate(all="ignore"):
            [wanted] = run_numpy(Graph(tuple(dict.fromkeys(node.inputs)), (node,)), *whole)
            cut = [scatter(x, at, axes, random) for x, at in zip(whole, taken, strict=True)]
            parts = run_node(node, cut, taken, TensorPlacement(), axes)
            assert not np.allclose(sum(part.astype(float) for part in parts), wanted.astype(float))


def test_a_reshape_keeps_a_cut_only_where_pieces_end_at_the_same_elements() -> None:
    """pytorch 179502: a view of [12, 8], cut along dim 1 over four ranks, as [16, 6] was taken for one cut by rows."""

    def kept(old: tuple[int, ...], new: tuple[int, ...], ranks: int, pieces: int = 1) -> set[tuple[Any, Any]]:
        node = make("reshape", tensor("x", *old), shape=new)
        every = ways(node, ranks, lambda node, dim: pieces)
        return {(way.inputs[0].dim, way.output.dim) for way in every if way.output.kind == "S"}

    assert kept((12, 8), (16, 6), 4) == {(0, 0)}, "of dim 0, whose pieces are 24 elements in both; not of dim 1"
    assert kept((6, 4), (24,), 3) == {(0, 0)}
    assert kept((5, 4), (20,), 2) == set(), "5 rows are 3 and 2, 20 elements 10 and 10"
    assert kept((5, 4), (5, 2, 2), 2) == {(0, 0), (1, 1)}
    assert kept((4, 6), (24,), 2) == {(0, 0)}, "never dim 1: its pieces do not follow one another"
    assert kept((2, 6), (2, 3, 2), 3) == {(1, 1)}
    assert kept((2, 4), (2, 2, 2), 3) == set(), "4 are 2, 1 and 1 of a dim, and 2 rows are too few"
    assert kept((8, 3), (2, 4, 3), 2, pieces=2) == set(), "cut by another axis already: 2 rows are too few"
    assert kept((8, 3), (4, 2, 3), 2, pieces=2) == {(0, 0)}


def test_two_sums_are_not_multiplied_and_a_maximum_takes_no_parts() -> None:
    x, y = tensor("x", 4, 4), tensor("y", 4, 4)
    assert Way((P, P), P) not in ways(make("dot", x, y), 2)
    assert Way((P, P), P) not in ways(make("multiply", x, y), 2)
    for op in ("exp", "maximum", "amax"):
        assert all(P not in way.inputs for way in ways(MADE[op](np.random.default_rng(1)), 2))


def test_space_of_a_convolution_is_not_cut_and_its_backward_is_placed_right() -> None:
    """Halos: a window at the end of a rank's part reaches into the next. pytorch 191926: the gradient of an
    input that was cut along its width came out as one cut by examples."""
    words: dict[str, Any] = {"groups": 1, "stride": (1,), "padding": (1,), "dilation": (1,)}
    node = make("conv", tensor("x", 4, 4, 8), tensor("w", 4, 4, 3), **words)
    assert {way.inputs[0] for way in ways(node, 2)} == {R, S(0), S(1), P, V}
    weight = make("conv_weight", tensor("x", 4, 4, 8), tensor("g", 4, 4, 8), size=(4, 4, 3), **words)
    assert {way.output for way in ways(weight, 2) if way.inputs == (S(0), S(0))} == {P}
    back = make("conv_input", tensor("g", 4, 4, 8), tensor("w", 4, 4, 3), size=(4, 4, 8), **words)
    assert all(S(2) not in (*way.inputs, way.output) for node in (weight, back) for way in ways(node, 2))
    grouped = make("conv", tensor("x", 4, 4, 8), tensor("w", 4, 2, 3), **words | {"groups": 2})
    assert {way.inputs for way in ways(grouped, 2)} == {(R, R), (S(0), R), (P, R), (R, P), (V, V)}


@pytest.mark.parametrize("bad", [-1, 7, 100])
def test_an_index_that_no_rank_has_is_refused_as_it_is_of_a_whole_table(bad: int) -> None:
    axes, index = (("tp", 3),), np.array([0, 3, bad, 6])
    node = make("take", tensor("x", 7, 2), tensor("i", 4, dtype="int64"))
    taken = [TensorPlacement.of(tp=S(0)), TensorPlacement()]
    parts = scatter(np.arange(14.0).reshape(7, 2), taken[0], axes, np.random.default_rng(0))
    with pytest.raises(IndexError):
        run_node(node, [parts, [index] * 3], taken, TensorPlacement.of(tp=P), axes)
    got = gather(
        run_node(node, [parts, [index % 7] * 3], taken, TensorPlacement.of(tp=P), axes), TensorPlacement.of(tp=P), axes
    )
    np.testing.assert_array_equal(got, np.arange(14.0).reshape(7, 2)[index % 7])


def test_random_numbers_differ_between_ranks_and_other_operators_are_whole() -> None:
    drawn = make("opaque", tensor("x", 4), target="aten.bernoulli.p", shape=(4,), dtype="float64", kwargs=())
    assert ways(drawn, 2) == [Way((R,), V)]
    sort = make("opaque", tensor("x", 4), target="aten.sort.default", shape=(4,), dtype="float64", kwargs=())
    assert ways(sort, 2) == [Way((R,), R)]
    by_rows = {"aten.sort.default": lambda node, ranks: [Way((S(0),), S(0))]}
    assert ways(sort, 2, opaque=by_rows) == [Way((R,), R), Way((S(0),), S(0))], "a rule is one line"
