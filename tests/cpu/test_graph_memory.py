"""The bytes that a step's values take: the order in which operators run, and a budget that decides what is kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tilemesh.graph import build
from tilemesh.graph.backend import Backend, tilemesh
from tilemesh.graph.emit import program
from tilemesh.graph.evaluate import run_numpy
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.memory import Lifetime, lifetimes, live_bytes, owner, scheduled


def _mlp(layers: int = 3, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    group = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))
    return nn.Sequential(*(type(each)(*_sizes(each)) for _ in range(layers) for each in group)).double()


def _sizes(layer: nn.Module) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    return tuple(layer.normalized_shape) if isinstance(layer, nn.LayerNorm) else ()


def _gradients(model: nn.Module, call: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    call(x).square().sum().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def test_a_budget_of_memory_is_kept_by_computing_again() -> None:
    x = torch.randn(256, 32, dtype=torch.float64)
    expected = _gradients(*[_mlp()] * 2, x)
    everything = None
    predicted, shares = [], []
    for budget in ("64MiB", 0.8, 0.65):
        torch._dynamo.reset()
        model = _mlp()
        if isinstance(budget, float):
            assert everything is not None
            budget = int(budget * everything)
        backend = Backend(memory=budget)
        ours = _gradients(model, torch.compile(model, backend=backend), x)
        for mine, theirs in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
        (cut,) = backend.report.cuts
        assert cut.predicted is not None
        assert cut.predicted <= cut.budget
        assert str(cut) in str(backend.report)
        # What liveness says of the two programs that run is what the cut promised.
        forward, backward = (piece.graph for piece in backend.report.pieces)
        assert forward is not None
        assert backward is not None
        kept = [node for node in backward.inputs if not node["name"].startswith("primals")]
        assert cut.predicted == max(max(live_bytes(lives)) for lives in (lifetimes(forward), lifetimes(backward, kept)))
        everything = everything or cut.predicted
        predicted.append(cut.predicted)
        shares.append(cut.share)
    assert shares[0] is None
    assert None not in shares[1:]
    assert sorted(predicted, reverse=True) == predicted


@pytest.mark.parametrize("dynamic", [False, True])
def test_random_numbers_are_not_drawn_again(dynamic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(*shape, generator=generator) / 4 for shape in ((16, 64), (64, 16))]

    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = x + nn.functional.dropout(nn.functional.gelu(x @ weights[0]), 0.3) @ weights[1]
        return x

    torch._dynamo.reset()
    backend, gradients = Backend(memory="40KiB"), []
    for run in (call, torch.compile(call, backend=backend, dynamic=dynamic)):
        torch.manual_seed(0)
        x = torch.linspace(-2, 2, 512).reshape(32, 16).requires_grad_()
        run(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    (cut,) = backend.report.cuts
    assert cut.share is not None, "nothing was computed again"


def test_a_budget_that_cannot_be_kept_is_refused_with_what_would_do() -> None:
    torch._dynamo.reset()
    model = _mlp(1)
    with pytest.raises(Exception, match=r"memory=8 KiB is too little: the values of a step take at least .* KiB"):
        torch.compile(model, backend=Backend(memory="8KiB"))(torch.randn(64, 32, dtype=torch.float64))


def test_sizes_that_change_keep_as_little_as_possible() -> None:
    torch._dynamo.reset()
    model, backend = _mlp(1), Backend(memory="64MiB")
    call = torch.compile(model, backend=backend, dynamic=True)
    for rows in (6, 11):
        x = torch.randn(rows, 32, dtype=torch.float64)
        for mine, theirs in zip(_gradients(model, call, x), _gradients(model, model, x), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    assert [cut.predicted for cut in backend.report.cuts] == [None] * len(backend.report.cuts)
    assert "sizes change, not predicted" in str(backend.report)


def test_a_piece_that_is_no_graph_has_no_budget() -> None:
    torch._dynamo.reset()
    call = torch.compile(lambda x: x.as_strided((2, 2), (1, 1)) * 2.0, backend=Backend(memory="1GiB"))
    with pytest.raises(Exception, match=r"memory: a piece stays as torch traced it .*as_strided"):
        call(torch.randn(3, 3, requires_grad=True))


@pytest.mark.parametrize("value", [0, True, 1.5, "much"])
def test_what_is_no_budget_is_refused(value: object) -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"give bytes|size 'much'"):
        torch.compile(nn.Linear(2, 2), backend=tilemesh, options={"memory": value})(torch.ones(1, 2))


def _backward(layers: int) -> Graph:
    """A backward program: the gradient of each layer's result, and each weight's from it and from what was kept."""
    gradient = build.argument("g", [512, 16], "float64")
    kept = [build.argument(f"x{layer}", [512, 16], "float64") for layer in range(layers)]
    weights = [build.argument(f"w{layer}", [16, 16], "float64") for layer in range(layers)]
    slopes: list[Node] = []
    node: Node = gradient
    for x, weight in zip(kept, weights, strict=True):
        again = build.tanh(x)
        node = build.multiply(node, build.subtract(1.0, build.multiply(again, again)))
        slopes.insert(0, build.dot(build.transpose(again), node))
        node = build.dot(node, build.transpose(weight))
    return Graph((gradient, *kept, *weights), (node, *slopes))


def test_the_order_follows_what_operators_read_and_lowers_the_peak() -> None:
    graph = _backward(6)
    order, plain = scheduled(graph), graph.nodes()
    assert {*order} == {*plain}
    assert len(order) == len(plain)
    places = {node: place for place, node in enumerate(order)}
    assert all(places[value] < places[node] for node in order for value in node.inputs)
    value, slope = 512 * 16 * 8, 16 * 16 * 8
    assert max(live_bytes(lifetimes(graph))) <= 4 * value + 6 * slope < max(live_bytes(_lives(graph, plain)))
    torch.manual_seed(0)
    given = [torch.randn([int(str(size)) for size in node.shape], dtype=torch.float64) / 4 for node in graph.inputs]
    for mine, theirs in zip(program(graph)(*given), run_numpy(graph, *[each.numpy() for each in given]), strict=True):
        torch.testing.assert_close(mine, torch.from_numpy(theirs), rtol=1e-10, atol=1e-12)


def _lives(graph: Graph, order: list[Node]) -> list[Lifetime]:
    """Lifetimes in an order, by their definition: from where a value is made to the last that reads it."""
    places = {node: place for place, node in enumerate(order)}
    ends = {owner(value): len(order) for value in graph.outputs}
    for node in order:
        for value in node.inputs:
            ends[owner(value)] = max(ends.get(owner(value), 0), places[node])
    lives = {life.node: life for life in lifetimes(graph)}
    return [Lifetime(node, places[node], ends[node], life.size) for node, life in lives.items()]
