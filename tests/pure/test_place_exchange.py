"""Exchanges as nodes of each rank's own program: the right ones, in one order on all ranks, and what they compute."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated_mesh import gather, scatter
from test_place import grown, mlp, placed, tensor

from tilemesh.core.axes import Axes, coordinates, ranks_of
from tilemesh.core.errors import UsageError
from tilemesh.core.shard import share
from tilemesh.core.tensor_placement import P, R, S, TensorPlacement, parse
from tilemesh.graph.build import argument
from tilemesh.graph.derive import jvp, vjp
from tilemesh.graph.evaluate import evaluate_numpy, run_numpy
from tilemesh.graph.ir import Graph, Node, make
from tilemesh.plan.place.combine import combined
from tilemesh.plan.place.exchange import exchange_steps
from tilemesh.plan.place.local import local_graph
from tilemesh.plan.place.overlap import begun_early
from tilemesh.plan.place.propagate import PlacedGraph, propagate
from tilemesh.plan.place.rules import EXCHANGES

Array = Any
MESH = (("tp", 2), ("dp", 3))


def steps(before: str, after: str, axes: Axes = MESH) -> str:
    return ", ".join(f"{axis} {old}>{new}" for axis, old, new in exchange_steps(parse(before), parse(after), axes))


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        ("tp:P", "R", "tp P>R"),
        ("tp:S0", "tp:S1", "tp S(0)>S(1)"),
        ("tp:P,dp:S0", "R", "tp P>R, dp S(0)>R"),  # the sum of the smaller part
        ("tp:P", "tp:S1,dp:S0", "dp R>S(0), tp P>S(1)"),
        ("tp:S0,dp:S0", "dp:S0", "dp S(0)>R, tp S(0)>R, dp R>S(0)"),  # only the last cut can be undone
        ("tp:S0,dp:S0", "tp:S0", "dp S(0)>R"),
        ("tp:S0", "tp:P", "tp S(0)>P"),
        ("R", "tp:P", "tp R>P"),
        ("tp:S0,dp:S0", "tp:S1,dp:S0", "dp S(0)>R, tp S(0)>S(1), dp R>S(0)"),
    ],
)
def test_steps_from_one_placement_to_another(before: str, after: str, wanted: str) -> None:
    assert steps(before, after) == wanted
    assert steps(before, before) == ""


def test_what_differs_from_rank_to_rank_is_not_made_one() -> None:
    with pytest.raises(UsageError, match=r"from tp:V to R: what differs from rank to rank \(V\)"):
        steps("tp:V", "R")


# Ranks that compute in turn -------------------------------------------------------------------------------------------


def rank_program(graph: Graph, arrays: Sequence[Array]) -> Generator[tuple[Node, Array], Array, list[Array]]:
    """One rank, which gives what it exchanges and is sent what it gets."""
    values: dict[Node, Array] = dict(zip(graph.inputs, arrays, strict=True))
    for node in begun_early(graph):
        if node.op in EXCHANGES:
            values[node] = yield node, values[node.inputs[0]]
            assert values[node].shape == node.shape
        elif node not in values:
            values[node] = evaluate_numpy(node, [values[value] for value in node.inputs])
    return [values[node] for node in graph.outputs]


def collective(node: Node, index: int, arrays: Sequence[Array]) -> Array:
    """By numpy, from the words of the primitive's name and how long everyone's parts are."""
    attributes = dict(node.attributes)
    if node.op == "all_reduce":
        return sum(arrays[1:], start=arrays[0])
    if node.op == "all_gather":
        return np.concatenate(arrays, attributes["dim"])
    cut = attributes["dim"] if node.op == "reduce_scatter" else attributes["into"]
    lengths = attributes["counts" if node.op == "reduce_scatter" else "parts"]
    mine = (*[slice(None)] * cut, slice(sum(lengths[:index]), sum(lengths[: index + 1])))
    if node.op == "reduce_scatter":
        return sum(arrays[1:], start=arrays[0])[mine]
    return np.concatenate([array[mine] for array in arrays], attributes["dim"])


def run_ranks(graphs: Sequence[Graph], arrays: Sequence[Sequence[Array]], axes: Axes) -> list[list[Array]]:
    running = [rank_program(graph, own) for graph, own in zip(graphs, arrays, strict=True)]
    done: dict[int, list[Array]] = {}
    sent: list[Array] = [None] * len(running)
    while len(done) < len(running):
        offered: dict[int, tuple[Node, Array]] = {}
        for rank, each in enumerate(running):
            try:
                offered[rank] = each.send(sent[rank])
            except StopIteration as end:
                done[rank] = end.value
        assert not (offered and done), "ranks wait for one that has ended"
        assert len({(node.op, node["axis"], node["serial"]) for node, _ in offered.values()}) <= 1, "ranks disagree"
        for rank, (node, _) in offered.items():
            place = coordinates(rank, axes)
            group = [
                other for other in offered if coordinates(other, axes) | {node["axis"]: 0} == place | {node["axis"]: 0}
            ]
            sent[rank] = collective(node, place[node["axis"]], [offered[other][1] for other in group])
    return [done[rank] for rank in range(len(running))]


def require_equal(result: PlacedGraph, seed: int, outputs: Sequence[TensorPlacement] | None = None) -> list[Graph]:
    random = np.random.default_rng(seed)
    arrays = [random.integers(-4, 5, node.shape).astype(node.dtype) for node in result.graph.inputs]
    lie = [result.placements.get(node, TensorPlacement()) for node in result.graph.inputs]
    parts = [scatter(*pair, result.axes, random) for pair in zip(arrays, lie, strict=True)]
    ranks = range(ranks_of(result.axes))
    graphs = [local_graph(result, rank, outputs) for rank in ranks]
    fewer = [combined(graph, graphs[0], fewest=2) for graph in graphs]
    for programs in (graphs, fewer):
        made = run_ranks(programs, [[part[rank] for part in parts] for rank in ranks], result.axes)
        placements = outputs or [result.placements[node] for node in result.graph.outputs]
        wanted = run_numpy(result.graph, *arrays)
        for number, (whole, placement) in enumerate(zip(wanted, placements, strict=True)):
            got = gather([own[number] for own in made], placement, result.axes)
            np.testing.assert_allclose(got, whole, rtol=1e-9, atol=1e-9)
    for own, less in zip(graphs, fewer, strict=True):
        assert set(begun_early(less)) == set(less.nodes())
        assert sum(map(sent_elements, less.nodes())) == sum(map(sent_elements, own.nodes())), "as many bytes"
    return graphs


def sent_by(node: Node, element_bytes: int) -> float:
    """What this rank sends at least for an exchange."""
    value = node.inputs[0]
    size = math.prod(size for size in value.shape if isinstance(size, int)) * element_bytes
    if node.op == "all_reduce":
        return 2 * size * (int(node["ranks"]) - 1) / int(node["ranks"])
    ranks = len(node["counts"])
    return size * (ranks - 1) if node.op == "all_gather" else size * (ranks - 1) / ranks


def sent_elements(node: Node) -> float:
    return sent_by(node, 1) if node.op in EXCHANGES else 0.0


@pytest.mark.parametrize("seed", range(24))
def test_programs_at_random_run_on_ranks_with_their_exchanges(seed: int) -> None:
    random = np.random.default_rng(seed)
    axes = [(("tp", 2),), (("tp", 3),), (("dp", 2), ("tp", 2))][seed % 3]
    choices = [S(0), S(1), R, P]
    for _ in range(4):
        graph = grown(random)
        pins: dict[Any, TensorPlacement] = {}
        for node in graph.inputs[: random.integers(1, 4)]:
            marks = [(axis, choices[random.integers(4)]) for axis, _ in axes]
            pins[node["name"]] = TensorPlacement(tuple(marks)) if len({mark for _, mark in marks}) == len(marks) else R_
        result = propagate(graph, pins, axes)
        ends = [TensorPlacement.of({axes[0][0]: choices[random.integers(3)]}) for _ in graph.outputs]
        require_equal(result, seed, None if seed % 2 else ends)


R_ = TensorPlacement()


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes() if node.op in EXCHANGES]


def test_one_exchange_serves_all_readers_and_goes_where_they_want_it_at_once() -> None:
    x, w = tensor("x", 4, 6), tensor("w", 6, 4)
    product = make("dot", x, w)
    graph = Graph((x, w), (make("tanh", product), make("exp", product)))
    result = placed(graph, x="tp:S1", output0="tp:S0", output1="tp:S0")
    assert ops(require_equal(result, 0)[0]) == ["reduce_scatter"], "once, and no sum that is then cut"
    spread = placed(Graph((x,), (make("tanh", x),)), x="tp:S0")
    [graph, _] = require_equal(spread, 0, [TensorPlacement.of(tp=S(1))])
    assert ops(graph) == ["all_to_all"], "not gathered and cut"


def uneven(size: int, ranks: int) -> tuple[int, ...]:
    return tuple(share(size, ranks, rank)[1] for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_each_ranks_program_are_parts_of_the_whole_programs(ranks: int) -> None:
    """An MLP written rank by rank, as Megatron does: its first input whole, or cut along tokens and exchanged into
    features. The transposes of its exchanges are the exchanges of its backward pass."""
    random, (tokens, width, hidden) = np.random.default_rng(ranks), (5, 4, 7)
    x, up, down = (argument(name, shape, "float64") for name, shape in (
        ("x", (tokens, width)), ("up", (width, hidden)), ("down", (hidden, width)),
    ))  # fmt: skip
    whole = make("dot", make("tanh", make("dot", make("sin", x), up)), down)
    arrays = [random.standard_normal(node.shape) for node in (x, up, down)]
    slope = random.standard_normal((tokens, width))
    seed = argument("seed", (tokens, width), "float64")
    wanted = run_numpy(Graph((x, up, down, seed), tuple(vjp([whole], [seed], [x, up, down]))), *arrays, slope)

    def cut(array: Array, dim: int, rank: int) -> Array:
        lengths = uneven(array.shape[dim], ranks)
        return array[(*[slice(None)] * dim, slice(sum(lengths[:rank]), sum(lengths[: rank + 1])))]

    rows, columns = uneven(tokens, ranks), uneven(width, ranks)
    for way in ("copy", "gather", "turn"):
        graphs, parts = [], []
        for rank in range(ranks):
            words: dict[str, Any] = {"axis": "tp", "index": rank}
            mine = [arrays[0], cut(arrays[1], 1, rank), cut(arrays[2], 0, rank)]
            last = slope
            if way != "copy":
                mine[0], last = cut(arrays[0], 0, rank), cut(slope, 0, rank)
            own = [
                argument(node["name"], array.shape, "float64") for node, array in zip((x, up, down), mine, strict=True)
            ]
            entered = make("sin", own[0])
            if way == "copy":
                entered = make("own_copy", entered, axis="tp", ranks=ranks, serial=0)
            elif way == "gather":
                entered = make("all_gather", entered, dim=0, counts=rows, serial=0, scatters=False, **words)
            else:  # into columns of all tokens, and gathered along these
                entered = make(
                    "all_to_all", entered, dim=0, counts=rows, into=1, parts=columns, serial=0, scatters=False, **words
                )  # fmt: skip
                entered = make("all_gather", entered, dim=1, counts=columns, serial=1, scatters=False, **words)
            part = make("dot", make("tanh", make("dot", entered, own[1])), own[2])
            if way == "copy":
                left = make("all_reduce", part, axis="tp", ranks=ranks, serial=2)
            else:
                left = make("reduce_scatter", part, dim=0, counts=rows, serial=2, scatters=True, **words)
            given = argument("seed", last.shape, "float64")
            assert {node.op for node in jvp(Graph(tuple(own), (left,)), own).nodes() if node.op in EXCHANGES}
            graphs.append(Graph((*own, given), tuple(vjp([left], [given], own))))
            parts.append([*mine, last])
        backward = {"copy": ["all_reduce"], "gather": ["all_gather", "reduce_scatter"], "turn": ["all_to_all"]}[way]
        assert set(backward) <= set(ops(graphs[0]))
        made = run_ranks(graphs, parts, (("tp", ranks),))
        for at, dim in ((0, None if way == "copy" else 0), (1, 1), (2, 0)):
            got = [own[at] for own in made]
            joined = got[0] if dim is None else np.concatenate(got, dim)
            np.testing.assert_allclose(joined, wanted[at], atol=1e-12, err_msg=way)
            assert dim is not None or all(np.array_equal(each, got[0]) for each in got), "all ranks have it"


def test_ranks_with_uneven_parts_join_the_same_exchanges() -> None:
    """129 rows of 512 float32 are above 256 KiB, 128 of another replica are not."""
    x, *weights = tensor("x", 257, 2, dtype="float32"), *(tensor(name, 2, 512, dtype="float32") for name in "abc")
    graph = Graph((x, *weights), tuple(make("exp", make("dot", x, weight)) for weight in weights))
    result = placed(graph, (("tp", 2), ("dp", 2)), x="dp:S0,tp:S1", a="tp:S0", b="tp:S0", c="tp:S0")
    graphs = [local_graph(result, rank) for rank in range(4)]
    assert {ops(combined(local, graphs[0])) == ["all_reduce"] * 3 for local in graphs} == {True}
    assert sorted(len(ops(combined(local))) for local in graphs) == [1, 1, 3, 3], "each by its own sizes"


def test_bytes_of_a_program_are_those_that_its_placement_says() -> None:
    for pins in ({"up": "tp:S1"}, {"x": "tp:S1"}, {"down": "tp:S1"}):
        result = placed(mlp(), **pins)
        local = local_graph(result, 0)
        assert sum(sent_by(node, 8) for node in local.nodes() if node.op in EXCHANGES) == result.nbytes > 0
