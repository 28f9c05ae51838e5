"""Small studies of how programs run: what eager mode costs the host, branches at once, parse trees."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from tilemesh.bench.graph.study import NOT_PREDICTED, inputs_of, predicted_here, ranking_device, study_row
from tilemesh.bench.graph.trees import WAYS, TreeModel, random_tree
from tilemesh.bench.harness import calling
from tilemesh.graph import build
from tilemesh.graph.concurrent import ConcurrentProgram
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph, Node
from tilemesh.measure.row import Row

LENGTH = 200  # operators of the chain that shows the host's cost


def host_rows(seconds: float, place: torch.device) -> list[Row]:
    """A chain of operators on 16 numbers: no time for a device, all of it is the host's.

    Eager without gradients calls operators; with them it also builds the graph of the backward pass, anew in each
    step, and walks it. The program was written once.
    """
    x = build.argument("x", [16])
    node = x
    for _ in range(LENGTH):
        node = build.multiply(build.add(node, 0.5), 0.99)
    run = program(Graph((x,), (node,)), place)
    numbers = torch.randn(16, device=place)
    leaf = numbers.clone().requires_grad_()

    def eager(tensor: torch.Tensor) -> torch.Tensor:
        for _ in range(LENGTH):
            tensor = (tensor + 0.5) * 0.99
        return tensor

    def alone(index: int) -> object:
        with torch.no_grad():
            return eager(numbers)

    def both(index: int) -> object:
        return torch.autograd.grad(eager(leaf).sum(), leaf)

    calls: dict[str, Callable[[int], object]] = {
        "ours": lambda index: run(numbers),
        "eager, no graph": alone,
        "eager, graph built": lambda index: eager(leaf),
        "eager, graph built and walked": both,
    }
    case = {"operators": 2 * LENGTH, "elements": 16}
    row = study_row("graph host", case, NOT_PREDICTED, calls, seconds, place)
    return [row]


def inception(batch: int, channels: int, side: int) -> Graph:
    """A block of Inception: four branches over one input, concatenated."""
    x = build.argument("x", [batch, channels, side, side])
    weights: list[Node] = []

    def conv(value: Node, out: int, taps: int) -> Node:
        weight = build.argument(f"w{len(weights)}", [out, value.shape[1], taps, taps])
        weights.append(weight)
        return build.relu(build.conv(value, weight, padding=[taps // 2] * 2))

    half = channels // 2
    branches = [
        conv(x, half, 1),
        conv(conv(x, half, 1), half, 3),
        conv(conv(x, half // 4, 1), half // 2, 5),
        conv(conv(conv(x, half, 1), half, 3), half, 3),
    ]
    return Graph((x, *weights), (build.concat(branches, 1),))


def branch_rows(seconds: float, place: torch.device) -> list[Row]:
    """A block of Inception with its branches one after the other and at once, beside what is predicted."""
    rows = []
    for batch, channels, side in ((1, 64, 14), (1, 192, 28), (16, 192, 28)):
        graph = inception(batch, channels, side)
        inputs = inputs_of(graph, place)
        programs = {
            way: ConcurrentProgram(
                graph, ranking_device(place), place, streams=2 if place.type == "cpu" else 4, at_once=way
            )
            for way in (True, False)
        }
        expected, got = programs[False](*inputs)[0], programs[True](*inputs)[0]
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        plan = programs[True].plan
        case: dict[str, float] = {
            "batch": batch, "channels": channels, "side": side, "waits": plan.waits, "taken": plan.pays,
        }  # fmt: skip
        guess = predicted_here(place, plan.at_once_s)
        if guess.value is not None:
            case["predicted gain"] = round(plan.one_by_one_s / plan.at_once_s, 3)
        calls: dict[str, Callable[[int], object]] = {"ours": calling(programs[True], *inputs)}
        if place.type == "cuda":
            # Both as recorded programs: what is compared are streams, not the cost of launching.
            single = ConcurrentProgram(graph, ranking_device(place), place, streams=1, at_once=True)
            calls["one after the other, recorded"] = calling(single, *inputs)
        calls["one after the other"] = calling(programs[False], *inputs)
        rows.append(study_row("graph branches", case, guess, calls, seconds, place))
    return rows


def tree_rows(seconds: float, place: torch.device) -> list[Row]:
    """Sentences of eight words, each with a parse tree of its own, by four ways of running a program that changes."""
    torch.manual_seed(0)
    draws = random.Random(0)
    model = TreeModel(1000, 64)
    trees = [random_tree([draws.randrange(1000) for _ in range(8)], draws) for _ in range(64)]
    runs = {name: make(model, 8) for name, make in WAYS.items()}
    with torch.no_grad():
        expected = torch.cat(runs["one by one"](trees))
        for run in runs.values():
            torch.testing.assert_close(torch.cat(run(trees)), expected, rtol=1e-4, atol=1e-5)
    shapes = len({tree.shape for tree in trees})
    case = {"trees": len(trees), "words": 8, "width": 64, "shapes of trees": shapes}

    def calling(run: Callable[..., object]) -> Callable[[int], object]:
        def call(index: int) -> object:
            with torch.no_grad():
                return run(trees)

        return call

    calls = {("ours" if name == "levels in buckets" else name): calling(run) for name, run in runs.items()}
    return [study_row("graph trees", case, NOT_PREDICTED, calls, seconds)]
