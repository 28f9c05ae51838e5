"""From some placements to all: what follows, what is exchanged, and that ranks then compute what one process does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated_mesh import run_placed

from tilemesh.core.errors import UsageError
from tilemesh.core.tensor_placement import P, R, S, TensorPlacement, V, parse
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.plan.place.propagate import PlacedGraph, pins_of_names, propagate, sent_bytes
from tilemesh.plan.place.rules import Way

TP = (("tp", 2),)


def tensor(name: str, *shape: int, dtype: str = "float64") -> Node:
    return make("input", name=name, shape=shape, dtype=dtype)


def placed(graph: Graph, axes: Any = TP, **pins: str) -> PlacedGraph:
    return propagate(graph, {name: parse(words) for name, words in pins.items()}, axes)


def collectives(result: PlacedGraph) -> list[str]:
    return [exchange.collective for exchange in result.exchanges if exchange.nbytes]


def require_equal(result: PlacedGraph, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    arrays = []
    for node in result.graph.inputs:
        low, high = (0, 4) if node.dtype == "int64" else (-4, 5)
        arrays.append(random.integers(low, high, node.shape).astype(node.dtype))
    wanted = run_numpy(result.graph, *arrays)
    for got, whole in zip(run_placed(result, arrays, random), wanted, strict=True):
        np.testing.assert_allclose(got, whole, rtol=1e-9, atol=1e-9)


def mlp(rows: int = 6, width: int = 4, hidden: int = 8) -> Graph:
    x, up, down = tensor("x", rows, width), tensor("up", width, hidden), tensor("down", hidden, width)
    inner = make("tanh", make("dot", x, up))
    return Graph((x, up, down), (make("add", x, make("dot", inner, down)),))


def test_one_pin_makes_megatrons_mlp() -> None:
    graph = mlp()
    result = placed(graph, up="tp:S1")
    [out] = graph.outputs
    product = out.inputs[1]
    assert {node["name"]: str(result.placements[node]) for node in graph.inputs} == {
        "x": "R", "up": "tp:S(1)", "down": "tp:S(0)",
    }  # fmt: skip
    assert result.placements[product]["tp"] == P
    assert collectives(result) == ["all_reduce"], "one sum, where the product leaves"
    assert result.nbytes == sent_bytes(P, R, 2, 6 * 4 * 8) == 6 * 4 * 8
    assert result.conflicts == ()
    require_equal(result)


def test_a_pin_of_rows_makes_data_parallelism_and_names_of_dims_do() -> None:
    graph = mlp()
    named = pins_of_names({"x": ("batch", "width")}, {"batch": "tp"})
    for result in (placed(graph, x="tp:S0"), propagate(graph, named, TP)):
        assert [str(result.placements[node]) for node in graph.inputs] == ["tp:S(0)", "R", "R"]
        assert result.exchanges == ()
        require_equal(result)
    both = pins_of_names({"x": ("batch", "width")}, {"batch": ("dp", "tp")})
    assert both == {"x": parse("dp:S0,tp:S0")}


def test_two_axes_each_follow_their_pins_and_may_cut_one_dim_unevenly() -> None:
    graph = mlp(rows=7)
    axes = (("dp", 3), ("tp", 2))
    result = placed(graph, axes, x="dp:S0", up="tp:S1")
    assert result.placements[graph.outputs[0]]["dp"] == S(0)
    assert [exchange.axis for exchange in result.exchanges if exchange.nbytes] == ["tp"]
    require_equal(result)
    twice = placed(graph, axes, x="dp:S0,tp:S0")
    assert result.nbytes > twice.nbytes == 0
    require_equal(twice)


def test_pins_go_backward_from_a_result() -> None:
    graph = mlp()
    result = placed(graph, output0="tp:S0")
    assert result.placements[graph.inputs[0]] == TensorPlacement.of(tp=S(0))
    assert result.nbytes == 0


def test_a_node_wanted_in_two_placements_is_said_with_what_each_costs() -> None:
    x, y = tensor("x", 4, 6), tensor("y", 4, 6)
    graph = Graph((x, y), (make("add", make("exp", x), make("exp", y)),))
    result = placed(graph, x="tp:S0", y="tp:S1")
    [conflict] = result.conflicts
    assert conflict.node is graph.outputs[0]
    assert {mark for mark, _ in conflict.wishes} == {S(0), S(1)}
    words = str(conflict)
    assert "add [4, 6] is wanted over tp as S(0) (48 bytes per rank) or S(1) (48 bytes per rank)" in words
    assert collectives(result) == ["all_to_all"]
    require_equal(result)


def test_an_input_that_readers_want_cut_differently_is_exchanged_once_for_one_of_them() -> None:
    x, a, b = tensor("x", 4, 4), tensor("a", 4, 4), tensor("b", 4, 4)
    graph = Graph((x, a, b), (make("add", x, a), make("multiply", x, b)))
    result = placed(graph, output0="tp:S0", output1="tp:S1", a="tp:S0", b="tp:S1")
    [conflict] = result.conflicts
    assert conflict.node is x
    require_equal(result)


def test_a_broadcast_has_a_transpose_that_is_a_part_of_a_sum() -> None:
    """The bias of rows that are cut: forward each rank repeats it, backward each has a part of its gradient."""
    bias, gradient = tensor("bias", 4), tensor("g", 6, 4)
    spread = make("broadcast", bias, shape=(6, 4), dims=(1,))
    graph = Graph((bias, gradient), (make("multiply", spread, gradient), make("sum", gradient, dims=(0,))))
    result = placed(graph, g="tp:S0")
    assert result.placements[bias] == TensorPlacement()
    assert result.placements[graph.outputs[0]] == TensorPlacement.of(tp=S(0))
    assert result.given[graph.outputs[1]] == TensorPlacement.of(tp=P)
    assert collectives(result) == ["all_reduce"]
    require_equal(result)


def test_what_is_not_linear_waits_for_the_sum() -> None:
    x, w = tensor("x", 4, 6), tensor("w", 6, 4)
    product = make("dot", x, w)
    graph = Graph((x, w), (make("tanh", make("add", product, product)),))
    result = placed(graph, x="tp:S1")
    assert result.placements[graph.outputs[0].inputs[0]] == TensorPlacement.of(tp=P), "linear: parts are passed on"
    assert collectives(result) in (["all_reduce"], ["reduce_scatter"])
    require_equal(result)


def test_a_reshape_that_mixes_cut_rows_gathers_them() -> None:
    x = tensor("x", 5, 4)
    uneven = Graph((x,), (make("reshape", x, shape=(20,)),))
    result = placed(uneven, x="tp:S0")
    assert collectives(result) == ["all_gather"]
    require_equal(result)
    even = Graph((y := tensor("x", 6, 4),), (make("reshape", y, shape=(24,)),))
    assert placed(even, x="tp:S0").nbytes == 0
    require_equal(placed(even, x="tp:S0"))


def test_a_dim_that_two_axes_cut_is_reshaped_only_where_all_pieces_are_alike() -> None:
    """Uneven pieces of two axes along one dim, as pytorch 168134 has them."""
    axes = (("dp", 2), ("tp", 2))
    for rows in (6, 7, 8):
        x = tensor("x", rows, 3)
        graph = Graph((x,), (make("reshape", make("negate", x), shape=(rows * 3,)),))
        result = placed(graph, axes, x="dp:S0,tp:S0")
        assert (result.nbytes == 0) == (rows == 8)
        require_equal(result)
    with pytest.raises(UsageError, match="axes cut in the order of the mesh, dp, tp"):
        placed(graph, axes, x="tp:S0,dp:S0")


def test_two_axes_cut_what_a_product_sums_over_in_one_order() -> None:
    """pytorch 166598: of two operands, cut by the same axes in different orders, parts were multiplied that do not
    belong together."""
    axes = (("dp", 2), ("tp", 2))
    a, b = tensor("a", 4, 32), tensor("b", 32, 4)
    graph = Graph((a, b), (make("dot", a, b),))
    result = placed(graph, axes, a="dp:S1,tp:S1", b="dp:S0,tp:S0")
    assert str(result.given[graph.outputs[0]]) == "dp:P tp:P"
    require_equal(result)
    with pytest.raises(UsageError, match="axes cut in the order of the mesh, dp, tp"):
        placed(graph, axes, a="dp:S1,tp:S1", b="tp:S0,dp:S0")


def test_a_table_cut_by_rows_gives_parts_and_one_cut_by_features_does_not() -> None:
    table, index = tensor("table", 71, 4), tensor("index", 5, dtype="int64")
    graph = Graph((table, index), (make("take", table, index),))
    rows = placed(graph, table="tp:S0")
    assert collectives(rows) == ["all_reduce"]
    require_equal(rows)
    assert placed(graph, table="tp:S1").placements[graph.outputs[0]] == TensorPlacement.of(tp=S(1))


def test_windows_in_space_are_gathered_and_examples_are_not() -> None:
    x, w = tensor("x", 4, 2, 8), tensor("w", 4, 2, 3)
    graph = Graph((x, w), (make("conv", x, w, groups=1, stride=(1,), padding=(1,), dilation=(1,)),))
    halo = placed(graph, x="tp:S2")
    assert collectives(halo)[0] in ("all_gather", "all_to_all")
    require_equal(halo)
    assert placed(graph, x="tp:S0").nbytes == 0


def test_random_numbers_of_each_rank_are_not_taken_for_the_same() -> None:
    x = tensor("x", 4)
    drawn = make("opaque", x, target="aten.bernoulli.p", shape=(4,), dtype="float64", kwargs=())
    graph = Graph((x,), (make("multiply", x, drawn),))
    result = placed(graph, x="R")
    assert result.placements[graph.outputs[0]] == TensorPlacement.of(tp=V), "and this is said, not hidden"
    with pytest.raises(UsageError, match=r"multiply \[4\] is R over tp, and no way leads there from R, V"):
        placed(graph, output0="tp:R")
    alike = propagate(graph, {}, TP, {"aten.bernoulli.p": lambda node, ranks: [Way((S(0),), S(0))]})
    assert alike.placements[drawn] == TensorPlacement(), "a rule says that ranks draw the same"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"z": "tp:S0"}, "tensor 'z'"),
        ({"x": "cp:S0"}, "axis 'cp'"),
        ({"x": "tp:S2"}, "has no dim 2"),
        ({"up": "tp:S1", "x": "dp:S0"}, "axis 'dp'"),
    ],
)
def test_pins_that_cannot_be_are_refused(pins: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        placed(mlp(), **pins)
    assert message in str(caught.value)


def test_a_dim_shorter_than_its_ranks_is_not_cut() -> None:
    with pytest.raises(UsageError, match="1 along dim 0 cannot be cut for 2 ranks"):
        placed(mlp(rows=1), x="tp:S0")


def grown(random: np.random.Generator) -> Graph:
    """A program of matrices of a few sizes, drawn at random."""
    sizes = [4, 5, 6]
    nodes = [tensor(f"x{n}", *(int(size) for size in random.choice(sizes, 2))) for n in range(4)]
    inputs = tuple(nodes)
    for _ in range(int(random.integers(3, 9))):
        x = nodes[random.integers(len(nodes))]
        alike = [node for node in nodes if node.shape == x.shape]
        fits = [node for node in nodes if node.shape[0] == x.shape[1]]
        y = alike[random.integers(len(alike))]
        rows, columns = (int(size) for size in x.shape)  # type: ignore[arg-type]
        match int(random.integers(8)):
            case 0:
                nodes.append(make("add", x, y))
            case 1:
                nodes.append(make("multiply", x, y))
            case 2:
                nodes.append(make("tanh", x))
            case 3 if fits:
                nodes.append(make("dot", x, fits[random.integers(len(fits))]))
            case 4:
                nodes.append(make("transpose", x, order=(1, 0)))
            case 5:
                nodes.append(make("broadcast", make("sum", x, dims=(0,)), shape=(rows, columns), dims=(1,)))
            case 6:
                nodes.append(make("reshape", make("reshape", x, shape=(rows * columns,)), shape=(columns, rows)))
            case _:
                largest = make("amax", x, dims=(1,))
                nodes.append(make("subtract", x, make("broadcast", largest, shape=(rows, columns), dims=(0,))))
    return Graph(inputs, (nodes[-1], nodes[len(nodes) // 2]))


@pytest.mark.parametrize("seed", range(40))
def test_programs_at_random_compute_the_same_on_ranks(seed: int) -> None:
    random = np.random.default_rng(seed)
    axes = [(("tp", 2),), (("tp", 3),), (("dp", 2), ("tp", 2))][seed % 3]
    for _ in range(5):
        graph = grown(random)
        pins: dict[Any, TensorPlacement] = {}
        for node in graph.inputs[: random.integers(1, 4)]:
            marks = [(axis, [S(0), S(1), R, P][random.integers(4)]) for axis, _ in axes]
            if len({mark for _, mark in marks}) == len(marks):
                pins[node["name"]] = TensorPlacement(tuple(marks))
        require_equal(propagate(graph, pins, axes), seed)
