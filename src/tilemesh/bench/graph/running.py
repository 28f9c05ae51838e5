"""Small studies of how programs run: what eager mode costs the host, parse trees."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from tilemesh.bench.graph.study import NOT_PREDICTED, study_row
from tilemesh.bench.graph.trees import WAYS, TreeModel, random_tree
from tilemesh.graph import build
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph
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
