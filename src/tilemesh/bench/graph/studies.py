"""Small studies of graphs, measured: search beside greedy rewriting, a partly equivalent convolution, one program
imperative and symbolic. `running.py` has those of how programs run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tilemesh.bench.graph.blocks import block_rows
from tilemesh.bench.graph.running import host_rows, tree_rows
from tilemesh.bench.graph.study import call_of, inputs_of, predicted_here, ranking_device, study_row
from tilemesh.bench.harness import calling
from tilemesh.core.errors import unknown
from tilemesh.graph import build, derive
from tilemesh.graph.by_torch import run_torch
from tilemesh.graph.cost import graph_seconds
from tilemesh.graph.generated import server, way_for
from tilemesh.graph.ir import Graph
from tilemesh.graph.partial import correct, mutants
from tilemesh.graph.regions import fused
from tilemesh.graph.rules import simplify
from tilemesh.graph.search import as_rules, greedy, read_substitutions, search
from tilemesh.measure.row import Row


def _square(count: int, size: int = 384) -> list[Any]:
    return [build.argument(name, [size, size]) for name in "xyzwvu"[:count]]


def _factor() -> Graph:
    x, y, z, w = _square(4)
    return Graph((x, y, z, w), (build.add(build.dot(x, y), build.add(w, build.dot(x, z))),))


def _convolutions() -> Graph:
    x, b = build.argument("x", [2, 24, 32, 32]), build.argument("b", [2, 32, 32, 32])
    v, w = (build.argument(name, [32, 24, 3, 3]) for name in "vw")
    first, second = (build.conv(x, each, padding=[1, 1]) for each in (v, w))
    return Graph((x, b, v, w), (build.add(first, build.add(b, second)),))


def _chain() -> Graph:
    x, y = _square(2)
    z = build.argument("z", [384, 4])
    return Graph((x, y, z), (build.dot(build.dot(x, y), z),))


def _branches() -> Graph:
    x = build.argument("x", [2, 24, 32, 32])
    v, w = (build.argument(name, [16, 24, 3, 3]) for name in "vw")
    return Graph((x, v, w), (build.concat([build.conv(x, each, padding=[1, 1]) for each in (v, w)], 1),))


def _transposed() -> Graph:
    x, y, z = _square(3)
    inner = build.add(build.transpose(build.dot(x, y)), build.transpose(build.dot(z, y)))
    return Graph((x, y, z), (build.transpose(inner),))


SEARCHED: Mapping[str, Callable[[], Graph]] = {
    "factor": _factor,
    "convolutions": _convolutions,
    "chain": _chain,
    "branches": _branches,
    "transposed": _transposed,
}


def search_rows(seconds: float, place: torch.device) -> list[Row]:
    """Five programs: what greedy rewriting makes of them, and what the search does."""
    rules, rows = as_rules(read_substitutions()), []
    for name, make in SEARCHED.items():
        graph = make()
        cost = functools.partial(graph_seconds, device=ranking_device(place))
        searched = search(graph, rules, cost)
        stuck = greedy(graph, rules, cost)
        inputs = inputs_of(graph, place)
        torch.testing.assert_close(run_torch(searched.graph, *inputs), run_torch(graph, *inputs), rtol=1e-3, atol=1e-3)
        case = {
            "program": name, "operators": graph.launches, "greedy": stuck.graph.launches,
            "search": searched.graph.launches, "looked at": searched.seen,
        }  # fmt: skip
        calls = {
            "ours": call_of(searched.graph, inputs),
            "greedy": call_of(stuck.graph, inputs),
            "as given": call_of(graph, inputs),
        }
        guess = predicted_here(place, functools.partial(graph_seconds, searched.graph))
        rows.append(study_row("graph search", case, guess, calls, seconds, place))
    return rows


def partial_rows(seconds: float, place: torch.device) -> list[Row]:
    """Two pictures convolved by the same weights: apart, and joined with the seam corrected."""
    rows = []
    for batch, size in ((1, 14), (1, 28), (4, 56)):
        pictures = [build.argument(name, [batch, 64, size, size]) for name in "xy"]
        w = build.argument("w", [64, 64, 3, 3])
        graph = Graph((*pictures, w), tuple(build.conv(picture, w, padding=[1, 1]) for picture in pictures))
        inputs = inputs_of(graph, place)
        for mutant in mutants(graph):
            corrected = correct(graph, mutant)
            for mine, theirs in zip(run_torch(corrected, *inputs), run_torch(graph, *inputs), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            wrong = sum(stop - start for strips in mutant.wrong for _, start, stop in strips)
            case = {
                "mutant": mutant.name, "batch": batch, "size": size, "regions": mutant.regions,
                "positions": mutant.positions, "wrong rows": wrong,
            }  # fmt: skip
            calls = {"ours": call_of(corrected, inputs), "apart": call_of(graph, inputs)}
            guess = predicted_here(place, functools.partial(graph_seconds, corrected))
            rows.append(study_row("graph partial", case, guess, calls, seconds, place))
    return rows


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
    "search": search_rows,
    "partial": partial_rows,
    "symbolic": imperative_rows,
    "host": host_rows,
    "trees": tree_rows,
    "blocks": block_rows,
}


def study_rows(name: str, seconds: float, place: torch.device | None = None) -> list[Row]:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name](seconds, place or torch.device("cpu"))
