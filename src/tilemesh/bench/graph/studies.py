"""A small study, measured: one program imperative and symbolic; `running.py` has those of how programs run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilemesh.bench.graph.blocks import block_rows
from tilemesh.bench.graph.running import host_rows, tree_rows
from tilemesh.bench.graph.study import call_of, inputs_of, predicted_here, study_row
from tilemesh.bench.harness import calling
from tilemesh.core.errors import unknown
from tilemesh.graph import build, derive
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.cost import graph_seconds
from tilemesh.graph.generated import server, way_for
from tilemesh.graph.ir import Graph
from tilemesh.graph.regions import fused
from tilemesh.graph.rules import simplify
from tilemesh.measure.row import Row


def imperative_rows(seconds: float, place: torch.device) -> list[Row]:
    """One training step of an MLP: operators one by one as they are called, and as one optimised program."""
    rows = []
    for width in (8, 64, 512):
        names = {"x": [64, width], "t": [64, 1], "a": [width, width], "b": [width, width], "c": [width, 1]}
        arguments = {name: build.argument(name, shape) for name, shape in names.items()}
        hidden = build.silu(build.dot(build.silu(build.dot(arguments["x"], arguments["a"])), arguments["b"]))
        error = build.subtract(build.dot(hidden, arguments["c"]), arguments["t"])
        loss = build.mean(build.multiply(error, error))
        weights = [arguments[name] for name in "abc"]
        graph = Graph(tuple(arguments.values()), (loss, *derive.update(loss, weights, rate=0.01)))
        way = way_for(place)
        better, _ = simplify(graph)
        better = fused(better, server(way)) if way else better
        inputs = inputs_of(graph, place)
        case = {"width": width, "operators": graph.launches, "launches": better.launches}
        calls = {
            "ours": call_of(better, inputs),
            "imperative": calling(_imperative, *inputs),
            "one by one": calling(run_torch, graph, *inputs),
        }
        guess = predicted_here(place, functools.partial(graph_seconds, better))
        rows.append(study_row("graph symbolic", case, guess, calls, seconds, place))
    return rows


def _imperative(x: Any, t: Any, *weights: Any) -> Any:
    """The same step as torch runs it: the graph of the backward pass is built anew in every call."""
    a, b, c = (weight.detach().requires_grad_() for weight in weights)
    hidden = torch.nn.functional.silu(torch.nn.functional.silu(x @ a) @ b)
    loss = (hidden @ c - t).square().mean()
    slopes = torch.autograd.grad(loss, [a, b, c])
    with torch.no_grad():
        return loss, [weight - 0.01 * slope for weight, slope in zip((a, b, c), slopes, strict=True)]


STUDIES: Mapping[str, Callable[[float, torch.device], list[Row]]] = {
    "symbolic": imperative_rows,
    "host": host_rows,
    "trees": tree_rows,
    "blocks": block_rows,
}


def study_rows(name: str, seconds: float, place: torch.device | None = None) -> list[Row]:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name](seconds, place or torch.device("cpu"))
